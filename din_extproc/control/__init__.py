"""The control plane: builds Envoy's configuration from the topology."""
