"""Telemetry of a process: logs, counters, spans and metrics."""
