"""Sensitive data in prompts: what counts as such, where it stands, and the prompt without it.

Rule: nothing here keeps or repeats what was found; findings are kinds, counts and places.
"""
