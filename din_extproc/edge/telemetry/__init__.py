"""What is told of a process: logs, counters, spans and metrics."""
