"""The `serve` command: the sidecar beside Envoy, in one process or in several."""
