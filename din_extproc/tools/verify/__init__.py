"""The `verify` command: every entry of a deployment's route table, requested from outside."""
