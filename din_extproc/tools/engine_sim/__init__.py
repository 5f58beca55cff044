"""The `engine-sim` command: the modelled engine as an HTTP server."""
