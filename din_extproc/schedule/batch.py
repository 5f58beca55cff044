"""The batch window of one node (R19): requests of like length wait for each other, so that the engine gets them together.

Rule: a bucket is released when `max_batch_tokens` is reached or its first request has waited `max_wait_s`, whichever comes first. Buckets
hold one segment of 512 tokens each: a short request never waits for a long one. Time is an argument, in seconds of any monotonic clock.
"""

from msgspec import Struct

SEGMENT_TOKENS = 512
_NO_IDS: tuple[int, ...] = ()


class _Bucket:
    """Requests of one segment, in the order in which they came."""

    __slots__ = ("due", "held", "tokens")

    def __init__(self, due: float) -> None:
        self.due = due
        self.held: dict[int, int] = {}
        """Tokens by request."""
        self.tokens = 0


class BatchLimits(Struct, frozen=True):
    """What a batch may be."""

    max_batch_tokens: int = 8192
    max_wait_s: float = 0.05

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_wait_s < 0:
            raise ValueError("max_batch_tokens is at least 1, max_wait_s at least 0")


class BatchBuckets:
    """The open buckets of a node. Requests are numbers of the caller's choice, each there once at most."""

    __slots__ = ("_buckets", "_of", "window")

    def __init__(self, window: BatchLimits) -> None:
        self.window = window
        self._buckets: dict[int, _Bucket] = {}
        self._of: dict[int, int] = {}
        """Segment by request."""

    def join(self, request: int, tokens: int, now: float) -> tuple[int, ...]:
        """A request comes. Returns those that go now, in order: its whole bucket when that is full, or what it has no room beside."""
        segment = tokens // SEGMENT_TOKENS
        bucket = self._buckets.get(segment)
        going = _NO_IDS
        if bucket is not None and bucket.tokens + tokens > self.window.max_batch_tokens:
            going, bucket = self._release(segment), None
        if bucket is None:
            bucket = self._buckets[segment] = _Bucket(now + self.window.max_wait_s)
        bucket.held[request] = tokens
        bucket.tokens += tokens
        self._of[request] = segment
        return going + self._release(segment) if bucket.tokens >= self.window.max_batch_tokens else going

    def leave(self, request: int) -> None:
        """The request's client is gone. Nothing happens when it is not held any more."""
        segment = self._of.pop(request, None)
        if segment is None:
            return
        bucket = self._buckets[segment]
        bucket.tokens -= bucket.held.pop(request)
        if not bucket.held:
            del self._buckets[segment]

    def due(self, now: float) -> tuple[int, ...]:
        """Those that have waited long enough, with all of their buckets, oldest bucket first."""
        ripe = sorted((bucket.due, segment) for segment, bucket in self._buckets.items() if bucket.due <= now)
        return tuple(request for _, segment in ripe for request in self._release(segment))

    @property
    def next_due(self) -> float | None:
        """When `due` has something to say next; None while nothing is held."""
        return min((bucket.due for bucket in self._buckets.values()), default=None)

    @property
    def held(self) -> int:
        """How many requests are held."""
        return len(self._of)

    def _release(self, segment: int) -> tuple[int, ...]:
        bucket = self._buckets.pop(segment)
        for request in bucket.held:
            del self._of[request]
        return tuple(bucket.held)
