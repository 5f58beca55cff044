"""The node table, liveness, trust and the catalogue. Pure: time is an argument."""
