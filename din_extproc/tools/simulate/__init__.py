"""The `simulate` command: a whole network in virtual time around the product's own decisions."""
