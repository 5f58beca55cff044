"""Circuit breakers, ramps and probes' timing: what outcomes say of nodes and pools. Pure: time is an argument."""
