"""Commands that check and write configuration: `check`, `render ...`, `keys ...`."""
