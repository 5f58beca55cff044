"""How an exchange ended, and what it costs: two tables over what Envoy, the Lua filter and the admission left behind.

Rule: the first line that fits decides. Only what a node did speaks against the node, and only what a client may have caused is charged.

How it ended (`Outcome`):

| outcome              | when                                                                                              |
|----------------------|---------------------------------------------------------------------------------------------------|
| `refused`            | the gateway said no                                                                               |
| `upstream_timeout`   | a node was reached, and the request, idle or total time ran out (UT, SI, DT, UMSDR)               |
| `upstream_error`     | an error inside a 200 answer                                                                      |
| `upstream_truncated` | the engine gave up (`finish_reason` `abort`)                                                      |
| `client_cancelled`   | the client left (DC, DR, DPE) before the end was sent; after it: `completed`                      |
| `not_dispatched`     | no node was reached and the answer is an error (UH, NR, NC, UO, a filter's own answer)            |
| `upstream_truncated` | reset or broken framing (UR, UC, LR, UPE, UF, DF) after a good answer had begun                   |
| `upstream_error`     | the same before that: connect failures too                                                        |
| `upstream_busy`      | 429 from the node: back-pressure, no failure                                                      |
| `upstream_error`     | 5xx from the node                                                                                 |
| `client_error`       | any other 4xx from the node                                                                       |
| `upstream_truncated` | an event stream that ended well-formed, without end mark and finish reason                        |
| `completed`          | everything else                                                                                   |

What it costs (`Usage`):

| case                                                             | charge                                                       |
|------------------------------------------------------------------|--------------------------------------------------------------|
| refused, or no node reached                                      | 0: the whole reservation goes back                           |
| the engine told a usage that can be                              | that; of a cut stream at least what was counted              |
| the node failed or refused (4xx, 429, 5xx, reset) with no token  | 0: a client can't cause this and gain by it                  |
| anything else: cut, left, timed out, no usage or an absurd one   | prompt estimate + tokens counted (`estimated`)               |
"""

import math
from http import HTTPStatus

from msgspec import Struct

from din_extproc.domain.usage import Outcome, Usage

_TIMEOUTS = frozenset({"UT", "SI", "DT", "UMSDR"})
_CLIENT_GONE = frozenset({"DC", "DR", "DPE"})
_RESETS = frozenset({"UF", "UR", "UC", "LR", "UPE", "DF"})
_UNCHARGED = frozenset({Outcome.UPSTREAM_BUSY, Outcome.UPSTREAM_ERROR, Outcome.CLIENT_ERROR})
_DELTA_BYTES_PER_TOKEN = 6
_DELTAS_OF_ONE_TOKEN = (7, 64)
"""Bytes per delta, and beyond that: no more, and every event has one token. More: the engine puts several into one."""
_CONTEXTS, _CONTEXTS_OF_MANY = 2, 128
"""More tokens than fill so many contexts are no usage, of one prompt or of a list of them."""
_ESTIMATES = 4
"""A prompt of more tokens than this many estimates, which fills contexts as well, is none."""
_BODY_BYTES_PER_TOKEN = 4
_ENVELOPE_BYTES = 350
"""What surrounds the text of a JSON answer."""


class Ending(Struct, frozen=True, gc=False):
    """What is known of a finished exchange before it is judged. Token counts None: not told."""

    status: int
    """0: no answer was sent."""
    flags: frozenset[str]
    reached: bool
    """A node was connected to, or at least tried."""
    answered: bool
    """The node's answer began."""
    refusal: str
    error: str
    finish_reason: str
    done: bool
    deltas: int | None
    """None: the answer was no event stream that could be read."""
    delta_bytes: int
    body_bytes: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int
    prompt_estimate: int
    reserved_tokens: int
    context: int = 0
    """Tokens of the node's context; 0: not known."""
    output_asked: int = 0
    """The most output that the client asked for, all choices together; 0: it did not say."""
    one_prompt: bool = True
    """Not a list of them, each with an answer."""

    @property
    def ended(self) -> bool:
        """The answer was complete when it left the node."""
        return self.done or bool(self.finish_reason)


def outcome(ending: Ending) -> Outcome:
    """How the exchange ended: the first table above."""
    flags = ending.flags
    if ending.refusal:
        return Outcome.REFUSED
    if flags & _TIMEOUTS and ending.reached:
        return Outcome.UPSTREAM_TIMEOUT
    if ending.error and ending.answered and ending.status < HTTPStatus.BAD_REQUEST:
        return Outcome.UPSTREAM_ERROR
    if ending.finish_reason == "abort":
        return Outcome.UPSTREAM_TRUNCATED
    if flags & _CLIENT_GONE:
        return Outcome.COMPLETED if ending.ended else Outcome.CLIENT_CANCELLED
    if not ending.reached:
        return Outcome.COMPLETED if 0 < ending.status < HTTPStatus.BAD_REQUEST else Outcome.NOT_DISPATCHED
    return _by_node(ending)


def _by_node(ending: Ending) -> Outcome:
    if ending.flags & _RESETS:
        return Outcome.UPSTREAM_TRUNCATED if ending.answered and ending.status < HTTPStatus.BAD_REQUEST else Outcome.UPSTREAM_ERROR
    if ending.status == HTTPStatus.TOO_MANY_REQUESTS:
        return Outcome.UPSTREAM_BUSY
    if ending.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.UPSTREAM_ERROR
    if ending.status >= HTTPStatus.BAD_REQUEST:
        return Outcome.CLIENT_ERROR
    if ending.deltas is not None and not ending.ended:
        return Outcome.UPSTREAM_TRUNCATED
    return Outcome.COMPLETED


def usage(ending: Ending, ended_as: Outcome) -> Usage:
    """What the exchange costs: the second table above."""
    if not ending.reached or ended_as in (Outcome.REFUSED, Outcome.NOT_DISPATCHED):
        return Usage(0, 0)
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    if (prompt or completion) and _can_be(ending, prompt or 0, completion or 0):
        counted = 0 if ending.ended else _counted(ending)
        told = completion or 0
        guessed = prompt is None or counted > told
        return Usage(ending.prompt_estimate if prompt is None else prompt, max(told, counted), ending.cached_tokens, estimated=guessed)
    if ended_as in _UNCHARGED and not ending.deltas:
        return Usage(0, 0)
    return Usage(ending.prompt_estimate, _counted(ending), estimated=True)


def _can_be(ending: Ending, prompt: int, completion: int) -> bool:
    """Whether an engine can have used that much: one that lies, or counts wrongly, does not empty a tenant's bucket."""
    if ending.context and prompt > max(_CONTEXTS * ending.context, _ESTIMATES * ending.prompt_estimate):
        return False
    contexts = _CONTEXTS if ending.one_prompt else _CONTEXTS_OF_MANY
    most = (ending.output_asked if ending.one_prompt else 0) or contexts * ending.context
    return not most or completion <= most


def _counted(ending: Ending) -> int:
    """Output tokens as far as events or bytes tell; by bytes never more than what was reserved for the output."""
    if ending.deltas is not None:
        each, beyond = _DELTAS_OF_ONE_TOKEN
        if ending.delta_bytes <= each * ending.deltas + beyond:
            return ending.deltas
        return max(ending.deltas, math.ceil(ending.delta_bytes / _DELTA_BYTES_PER_TOKEN))
    if not ending.answered or ending.status >= HTTPStatus.BAD_REQUEST:
        return 0
    room = max(0, ending.reserved_tokens - ending.prompt_estimate)
    return min(room, max(0, ending.body_bytes - _ENVELOPE_BYTES) // _BODY_BYTES_PER_TOKEN)
