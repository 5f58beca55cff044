"""Commands that look at or change a running deployment."""
