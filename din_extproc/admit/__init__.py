"""Admission: whether a tenant may spend a request's tokens now. Contains the arithmetic and the port to the counters."""
