"""Admission: may this tenant spend so many tokens now? Pure arithmetic, and the port to whoever keeps the counters."""
