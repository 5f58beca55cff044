"""The conductors: the only place where the order of things is written."""
