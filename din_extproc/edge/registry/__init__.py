"""The registry's two halves: the replica's and the node's; and the catalogue behind a URL."""
