"""I/O of the agent beside an engine: weights, memory, metrics pages, the batch window."""
