"""Envoy's timeouts of one request: for the whole response, and for its first byte before another node is tried.

Rule: of several limits the shortest applies, and the time that a request has waited here is already subtracted from its client's deadline.

| limit                        | set by                                          | when it expires                                    |
|------------------------------|-------------------------------------------------|----------------------------------------------------|
| beginning of the answer      | the pool, `timeouts.first_byte_s`               | another node is asked; the last one: 504           |
| silence between two chunks   | `envoy.timeouts.node_idle_ms`, but not of a     | before the first byte as above; after it: reset    |
|                              | whole answer                                    |                                                    |
| the whole answer, all tries  | the client, `x-din-timeout-ms`; the pool,       | 504; a stream that has begun is reset              |
|                              | `timeouts.total_s`, or for a request of the     |                                                    |
|                              | long tail `long_tail.timeout_s` in its place    |                                                    |

An engine that sends the head of its stream before it has a token has begun by that; from then on the silence counts. Only responses that
begin soon have the first limit: a generated response that is not streamed begins when it is complete.
"""

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import Pool
from din_extproc.domain.request import Intent
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.flow.node_selector import NodeSelection

_TOTAL = "x-envoy-upstream-rq-timeout-ms"
_FIRST_BYTE = "x-envoy-upstream-rq-per-try-timeout-ms"
"""Envoy takes both for its own timeouts and does not send them to the node."""
_WHOLE: Headers = (("x-din-whole", "true"),)


class RequestTimeouts(Struct, frozen=True, gc=False):
    """In milliseconds; None: Envoy's own configuration decides."""

    total_ms: int | None
    first_byte_ms: int | None
    whole: bool = False
    """The answer begins when it is complete."""

    def headers(self) -> Headers:
        """The headers that tell Envoy."""
        found: Headers = _WHOLE if self.whole else ()
        if self.total_ms is not None:
            found = (*found, (_TOTAL, str(self.total_ms)))
        return found if self.first_byte_ms is None else (*found, (_FIRST_BYTE, str(self.first_byte_ms)))


def compute_timeouts(intent: Intent, pool: Pool, picked: NodeSelection) -> RequestTimeouts:
    """Return the timeouts of a request to this pool. A first token that may take as long as the whole answer has no limit of its own."""
    own = pool.timeouts.total_ms if picked.timeout_ms is None else picked.timeout_ms
    deadline = intent.timeout_ms
    total = own if deadline is None else deadline if own is None else min(own, deadline)
    first, whole = pool.timeouts.first_byte_ms, not (intent.stream or intent.operation.spec.begins_soon)
    if first is not None and ((total is not None and first >= total) or whole):
        first = None
    return RequestTimeouts(total, first, whole)


def deduct_wait(intent: Intent, waited_s: float) -> Intent | Refusal:
    """Return the intent with the rest of its client's deadline, or a refusal when it has passed."""
    if intent.timeout_ms is None:
        return intent
    left = intent.timeout_ms - int(waited_s * 1000)
    if left < 1:
        return Refusal(RefusalCode.UPSTREAM_TIMEOUT, "The time that x-din-timeout-ms allows ran out before a node could be asked.")
    return intent if left == intent.timeout_ms else replace(intent, timeout_ms=left)
