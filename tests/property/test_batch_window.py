"""The batch window under any traffic: nobody is kept too long, mixed with another length, overtaken in its bucket, or lost."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from din_extproc.schedule.batch import SEGMENT_TOKENS, BatchBuckets, BatchLimits


class Traffic(RuleBasedStateMachine):
    """Requests come and leave while time passes. Times are whole milliseconds, so that sums are exact."""

    def __init__(self):
        super().__init__()
        self.window = BatchLimits(max_batch_tokens=2_000, max_wait_s=50)
        self.batches = BatchBuckets(self.window)
        self.now = 0
        self.number = 0
        self.held: dict[int, tuple[int, int]] = {}

    def released(self, going):
        """Nobody waited too long, and no one of the same length who came earlier is still held."""
        for request in going:
            tokens, since = self.held.pop(request)
            assert self.now - since <= self.window.max_wait_s
            assert not any(other < request and size // SEGMENT_TOKENS == tokens // SEGMENT_TOKENS for other, (size, _) in self.rest(going))

    def rest(self, going):
        return [(request, held) for request, held in self.held.items() if request not in going]

    @rule(tokens=st.integers(0, 3_000))
    def join(self, tokens):
        self.number += 1
        self.held[self.number] = (tokens, self.now)
        going = self.batches.join(self.number, tokens, self.now)
        assert len({self.held[request][0] // SEGMENT_TOKENS for request in going}) <= 1
        assert list(going) == sorted(going)
        self.released(going)

    @rule(data=st.data())
    def leave(self, data):
        if self.held:
            request = data.draw(st.sampled_from(sorted(self.held)))
            del self.held[request]
            self.batches.leave(request)

    @rule(step=st.integers(0, 60))
    def wait(self, step):
        end = self.now + step
        while (due := self.batches.next_due) is not None and due <= end:
            self.now = due
            going = self.batches.release_due(due)
            assert going
            self.released(going)
        self.now = end

    @invariant()
    def no_request_is_lost(self):
        assert self.batches.held_count == len(self.held)

    @invariant()
    def no_bucket_mixes_segments_or_holds_too_much(self):
        for segment, bucket in self.batches._buckets.items():
            assert {tokens // SEGMENT_TOKENS for tokens in bucket.held.values()} == {segment}
            assert bucket.tokens == sum(bucket.held.values()) < self.window.max_batch_tokens


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=30)


@given(sizes=st.lists(st.integers(0, 511), min_size=1, max_size=50))
def test_requests_of_one_length_go_in_the_order_in_which_they_came(sizes):
    batches = BatchBuckets(BatchLimits(max_batch_tokens=1_500, max_wait_s=1.0))
    gone = [request for at, tokens in enumerate(sizes) for request in batches.join(at, tokens, 0.0)]
    assert [*gone, *batches.release_due(1.0)] == list(range(len(sizes)))
