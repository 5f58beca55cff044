"""The HTTP ports: admin pages, dashboard, registry, the agent's health."""
