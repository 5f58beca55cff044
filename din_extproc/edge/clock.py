"""Wall clock and monotonic clock. All other code takes time as an argument."""

import time


class SystemClock:
    """This machine's clocks, in seconds."""

    @staticmethod
    def wall() -> float:
        """Return seconds since the epoch."""
        return time.time()

    @staticmethod
    def monotonic() -> float:
        """Return monotonic seconds."""
        return time.perf_counter()

    @staticmethod
    def monotonic_ms() -> int:
        """Return monotonic time in whole milliseconds."""
        return int(time.perf_counter() * 1000)
