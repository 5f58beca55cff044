"""Frozen nouns that the rooms hand to each other. No behaviour beyond what a noun knows about itself."""
