"""Which pool serves this intent: aliases, versions, ordered rules, compiled once into an immutable table."""
