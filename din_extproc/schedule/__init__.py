"""Which node of the pool: filter, score, pick. One file per strategy."""
