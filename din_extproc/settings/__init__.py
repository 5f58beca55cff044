"""din.yaml and the environment -> one frozen tree, with all errors at once."""
