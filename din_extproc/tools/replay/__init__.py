"""The `replay` command: recorded requests decided again under another configuration."""
