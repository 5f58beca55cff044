"""The `demo` command: Envoy, Redis, the sidecar and small real models on loopback."""
