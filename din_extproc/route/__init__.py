"""Routing: maps an intent to a pool by aliases, versions and ordered rules, compiled once into an immutable table."""
