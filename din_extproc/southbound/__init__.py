"""Engine dialects, one file each, and the normaliser of engine errors."""
