"""The `bench` commands: a deployment measured from outside."""
