"""The `node` command: the agent beside an engine, and the ext_proc server of the Envoy in front of it."""
