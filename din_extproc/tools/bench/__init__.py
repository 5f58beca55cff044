"""The `bench` commands: measurements of a running deployment from outside."""
