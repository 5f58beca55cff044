"""Node selection within a pool: filter, score, pick. One file per strategy."""
