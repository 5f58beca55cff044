"""The audit log on disk (see `audit`)."""
