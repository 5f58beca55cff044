"""Latency seen from outside: a timed stream, two paths compared, one request split into its parts.

Rule: the caller brings the times; nothing here asks, waits or looks at a clock.
"""
