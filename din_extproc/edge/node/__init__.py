"""What the agent beside an engine touches: weights, memory, metrics pages, the batch window."""
