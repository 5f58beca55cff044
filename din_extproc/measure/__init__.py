"""What requests took, seen from outside: a streamed answer by a stopwatch, two ways of asking compared, one request taken apart.

Rule: the caller brings the times; nothing here asks, waits or looks at a clock.
"""
