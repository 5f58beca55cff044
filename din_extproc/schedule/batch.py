"""The batch window of one node: requests of similar length wait for each other, so that the engine receives them together.

A bucket is released when `max_batch_tokens` is reached or its first request has waited `max_wait_s`, whichever comes first. Each bucket
holds one segment of 512 tokens, so a short request never waits for a long one. Time is an argument in monotonic seconds.
"""

from msgspec import Struct

SEGMENT_TOKENS = 512
_NO_IDS: tuple[int, ...] = ()


class _Bucket:
    """Requests of one segment in order of arrival."""

    __slots__ = ("due", "held", "tokens")

    def __init__(self, due: float) -> None:
        self.due = due
        self.held: dict[int, int] = {}
        """Tokens by request."""
        self.tokens = 0


class BatchLimits(Struct, frozen=True):
    """Limits of a batch."""

    max_batch_tokens: int = 8192
    max_wait_s: float = 0.05

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1 or self.max_wait_s < 0:
            raise ValueError("max_batch_tokens is at least 1, max_wait_s at least 0")


class BatchBuckets:
    """The open buckets of a node. Requests are caller-chosen numbers, unique at any time."""

    __slots__ = ("_buckets", "_segment_of", "limits")

    def __init__(self, window: BatchLimits) -> None:
        self.limits = window
        self._buckets: dict[int, _Bucket] = {}
        self._segment_of: dict[int, int] = {}
        """Segment by request."""

    def join(self, request: int, tokens: int, now: float) -> tuple[int, ...]:
        """Add a request. Return the requests to send now, in order: a bucket that is full, or one without room for this request."""
        segment = tokens // SEGMENT_TOKENS
        bucket = self._buckets.get(segment)
        going = _NO_IDS
        if bucket is not None and bucket.tokens + tokens > self.limits.max_batch_tokens:
            going, bucket = self._release(segment), None
        if bucket is None:
            bucket = self._buckets[segment] = _Bucket(now + self.limits.max_wait_s)
        bucket.held[request] = tokens
        bucket.tokens += tokens
        self._segment_of[request] = segment
        return going + self._release(segment) if bucket.tokens >= self.limits.max_batch_tokens else going

    def leave(self, request: int) -> None:
        """Remove a request whose client has disconnected. Does nothing when it is no longer held."""
        segment = self._segment_of.pop(request, None)
        if segment is None:
            return
        bucket = self._buckets[segment]
        bucket.tokens -= bucket.held.pop(request)
        if not bucket.held:
            del self._buckets[segment]

    def release_due(self, now: float) -> tuple[int, ...]:
        """Return the requests of all buckets whose time has come, oldest bucket first."""
        ripe = sorted((bucket.due, segment) for segment, bucket in self._buckets.items() if bucket.due <= now)
        return tuple(request for _, segment in ripe for request in self._release(segment))

    @property
    def next_due(self) -> float | None:
        """The time of the next release by age; None while nothing is held."""
        return min((bucket.due for bucket in self._buckets.values()), default=None)

    @property
    def held_count(self) -> int:
        """The number of held requests."""
        return len(self._segment_of)

    def _release(self, segment: int) -> tuple[int, ...]:
        bucket = self._buckets.pop(segment)
        for request in bucket.held:
            del self._segment_of[request]
        return tuple(bucket.held)
