"""Processes: workers, children, the binaries that a demo runs."""
