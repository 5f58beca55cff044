"""The `explain` command: where a request would go, and why."""
