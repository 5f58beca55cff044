"""Circuit breakers, traffic ramps and the probe schedule. Pure: time is an argument."""
