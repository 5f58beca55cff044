"""Registry: the replica's side, the node's side, and the catalogue source."""
