"""Composition roots. Only these construct things."""
