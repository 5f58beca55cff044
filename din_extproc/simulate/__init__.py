"""The whole network in virtual time: modelled nodes and clients around the product's own decisions."""
