"""Node table, liveness, trust and catalogue. The package is pure: time is an argument."""
