"""The only clocks: the wall's and the monotonic one. Everything else takes time as an argument."""

import time


class SystemClock:
    """This machine's clocks, in seconds."""

    @staticmethod
    def wall() -> float:
        """Seconds since the epoch."""
        return time.time()

    @staticmethod
    def monotonic() -> float:
        """Seconds that only grow."""
        return time.perf_counter()

    @staticmethod
    def monotonic_ms() -> int:
        """The same in whole milliseconds."""
        return int(time.perf_counter() * 1000)
