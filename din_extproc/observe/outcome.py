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
| `upstream_truncated` | an event stream that ended well-formed, without end mark and finish reason, and was read whole    |
| `completed`          | everything else                                                                                   |

What it costs (`Usage`):

| case                                                             | charge                                                       |
|------------------------------------------------------------------|--------------------------------------------------------------|
| refused, or no node reached                                      | 0: the whole reservation goes back                           |
| the engine told a usage that can be                              | that; of a cut stream at least what was counted              |
| the node failed or refused (4xx, 429, 5xx, reset) with no token  | 0: a client can't cause this and gain by it                  |
| anything else: cut, left, timed out, no usage or an absurd one   | prompt estimate + tokens counted (`estimated`)               |

What can be: a prompt that the context holds, and as much output as was asked for; more than that where the bytes that passed hold so
many tokens (engines have parameters of their own) and the context does too. Zeros alone are a usage where nothing is generated, such as
the embedding of an empty text; elsewhere they are none: some engines send them until the end, or always.

Tokens counted: events of a stream, by bytes where an event has several; of any other answer its bytes over four, whatever was reserved,
for they have passed. An engine that pads its answers gains no more than twice its context by that. Where nothing is generated, none.
"""

import math
from http import HTTPStatus

from msgspec import Struct

from din_extproc.domain.usage import Outcome, Usage

_TIMEOUTS = frozenset({"UT", "SI", "DT", "UMSDR"})
_CLIENT_GONE = frozenset({"DC", "DR", "DPE"})
_RESETS = frozenset({"UF", "UR", "UC", "LR", "UPE", "DF"})
_CUT = _TIMEOUTS | _CLIENT_GONE | _RESETS
_UNCHARGED = frozenset({Outcome.UPSTREAM_BUSY, Outcome.UPSTREAM_ERROR, Outcome.CLIENT_ERROR})
_DELTA_BYTES_PER_TOKEN = 6
_DELTAS_OF_ONE_TOKEN = (7, 64)
"""Bytes per delta, and beyond that: no more, and every event has one token. More: the engine puts several into one."""
_CONTEXTS, _CONTEXTS_OF_MANY = 2, 128
"""More tokens than fill so many contexts are no usage, of one prompt or of a list of them."""
_ESTIMATES = 4
"""A prompt of more tokens than this many estimates, which fills contexts as well, is none."""
_BODY_BYTES_PER_TOKEN = 4
_LEAST_BYTES_PER_TOKEN = 2
"""More tokens than that have not passed."""
_ENVELOPE_BYTES = 350
"""What surrounds the text of a JSON answer."""


class ExchangeEnding(Struct, frozen=True, gc=False):
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
    context: int = 0
    """Tokens of the node's context; 0: not known."""
    output_asked: int = 0
    """The most output that the client asked for, all choices together; 0: it did not say."""
    one_prompt: bool = True
    """Not a list of them, each with an answer."""
    generates: bool = True
    """There are output tokens at all: not so of embeddings and ranks."""
    unread: bool = False
    """An event was too long to be read: the end may have been in it."""

    @property
    def ended(self) -> bool:
        """The answer was complete when it left the node."""
        return self.done or bool(self.finish_reason)


def outcome(ending: ExchangeEnding) -> Outcome:
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


def _by_node(ending: ExchangeEnding) -> Outcome:
    if ending.flags & _RESETS:
        return Outcome.UPSTREAM_TRUNCATED if ending.answered and ending.status < HTTPStatus.BAD_REQUEST else Outcome.UPSTREAM_ERROR
    if ending.status == HTTPStatus.TOO_MANY_REQUESTS:
        return Outcome.UPSTREAM_BUSY
    if ending.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Outcome.UPSTREAM_ERROR
    if ending.status >= HTTPStatus.BAD_REQUEST:
        return Outcome.CLIENT_ERROR
    if ending.deltas is not None and not (ending.ended or ending.unread):
        return Outcome.UPSTREAM_TRUNCATED
    return Outcome.COMPLETED


def usage(ending: ExchangeEnding, ended_as: Outcome) -> Usage:
    """What the exchange costs: the second table above."""
    if not ending.reached or ended_as in (Outcome.REFUSED, Outcome.NOT_DISPATCHED):
        return Usage(0, 0)
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    counted = _counted(ending)
    if (prompt is not None or completion is not None) and _can_be(ending, prompt or 0, completion or 0):
        told, least = completion or 0, 0 if _is_final(ending) else counted
        guessed = prompt is None or least > told
        return Usage(ending.prompt_estimate if prompt is None else prompt, max(told, least), ending.cached_tokens, estimated=guessed)
    if ended_as in _UNCHARGED and not ending.deltas:
        return Usage(0, 0)
    return Usage(ending.prompt_estimate, counted, estimated=True)


def _is_final(ending: ExchangeEnding) -> bool:
    """Whether the usage that was told is the last one: of several choices one finishes first, and the stream can be cut after it."""
    if ending.done or ending.deltas is None:
        return True
    return bool(ending.finish_reason) and not ending.flags & _CUT


def _can_be(ending: ExchangeEnding, prompt: int, completion: int) -> bool:
    """Whether an engine can have used that much: one that lies, or counts wrongly, does not empty a tenant's bucket."""
    if not prompt and not completion:
        return not ending.generates
    if ending.context and prompt > max(_CONTEXTS * ending.context, _ESTIMATES * ending.prompt_estimate):
        return False
    asked = ending.output_asked if ending.one_prompt else 0
    if asked and completion <= asked:
        return True
    return completion <= _room(ending) and (not asked or completion <= _most(ending))


def _room(ending: ExchangeEnding) -> float:
    """Tokens that the node's context has room for."""
    return (_CONTEXTS if ending.one_prompt else _CONTEXTS_OF_MANY) * ending.context or math.inf


def _most(ending: ExchangeEnding) -> int:
    """Tokens that can have passed."""
    if ending.deltas is not None:
        return max(ending.deltas, ending.delta_bytes // _LEAST_BYTES_PER_TOKEN)
    return ending.body_bytes // _LEAST_BYTES_PER_TOKEN


def _counted(ending: ExchangeEnding) -> int:
    """Output tokens as far as events or bytes tell; by bytes no more than the context has room for."""
    if ending.deltas is not None:
        each, beyond = _DELTAS_OF_ONE_TOKEN
        if ending.delta_bytes <= each * ending.deltas + beyond:
            return ending.deltas
        return max(ending.deltas, math.ceil(ending.delta_bytes / _DELTA_BYTES_PER_TOKEN))
    if not ending.generates or not ending.answered or ending.status >= HTTPStatus.BAD_REQUEST:
        return 0
    return int(min(_room(ending), max(0, ending.body_bytes - _ENVELOPE_BYTES) // _BODY_BYTES_PER_TOKEN))
