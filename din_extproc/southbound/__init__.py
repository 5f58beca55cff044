"""One file per engine dialect, and the normaliser of their errors."""
