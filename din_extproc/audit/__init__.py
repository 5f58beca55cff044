"""The audit log: what is recorded, how records are chained, and how a reader proves that none was changed, removed or moved."""
