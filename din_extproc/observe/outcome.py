"""Outcome and charge of an exchange: two tables over the reports of Envoy, the Lua filter and the admission.

Rule: the first matching line decides. Only failures of a node count against the node, and only usage that a client can have caused is
charged.

Outcome (`Outcome`):

| outcome              | when                                                                                              |
|----------------------|---------------------------------------------------------------------------------------------------|
| `refused`            | the gateway said no                                                                               |
| `upstream_timeout`   | a node was reached, and the request, idle or total time ran out (UT, SI, DT, UMSDR)               |
| `client_error`       | an error inside a 200 answer that every node would give to this request                           |
| `upstream_busy`      | an error inside a 200 answer by which the node asks for time                                      |
| `upstream_error`     | any other error inside a 200 answer                                                               |
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

Charge (`Usage`):

| case                                                             | charge                                                       |
|------------------------------------------------------------------|--------------------------------------------------------------|
| refused, or no node reached                                      | 0: the whole reservation goes back                           |
| the engine told a usage that can be                              | that; of a cut stream at least what was counted              |
| the engine told no more than the sum                             | that sum; where tokens are generated, those counted are the  |
|                                                                  | output and the rest the prompt (`estimated`)                 |
| the node failed or refused (4xx, 429, 5xx, reset) with no token  | 0: a client can't cause this and gain by it                  |
| anything else: cut, left, timed out, no usage or an absurd one   | prompt estimate + tokens counted (`estimated`)               |

Beside tokens, of an exchange that costs any:

| operation is charged for | charge                                                                                            |
|--------------------------|---------------------------------------------------------------------------------------------------|
| images                   | the images that were asked for                                                                    |
| audio seconds            | the seconds that the engine told, up to 256 times the estimate; without that the estimate by the  |
|                          | size of the file. 10 tokens each, where it told no tokens                                         |

A usage can be when all of this holds; otherwise the engine's word is `disputed`, which costs the node trust:

- Its numbers count tokens (whole, not negative, below 10^12), and none falls while the answer is written.
- The prompt has at most 4 times the tokens of its estimate, and 1,024 more for what an engine adds by itself. The band of an estimate is
  narrower by far. A prompt with media, whose tokens can't be estimated, fills two contexts at most.
- The output is no more than the client asked for, no more than the context has room for, and every token but a few (marks that are not
  shown) has passed as at least one byte.

Zeros alone are a usage where nothing is generated, such as the embedding of an empty text; elsewhere they are none: some engines send
them until the end, or always.

Tokens counted: events of a stream, by bytes where an event has several; of any other answer its bytes over four; never more than the client
asked for, nor than fits into two contexts. Where nothing is generated, none.
"""

import math
from http import HTTPStatus

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.usage import AUDIO_TOKENS, Outcome, Usage

_TIMEOUTS = frozenset({"UT", "SI", "DT", "UMSDR"})
_CLIENT_GONE = frozenset({"DC", "DR", "DPE"})
_RESETS = frozenset({"UF", "UR", "UC", "LR", "UPE", "DF"})
_CUT = _TIMEOUTS | _CLIENT_GONE | _RESETS
_UNCHARGED = frozenset({Outcome.UPSTREAM_BUSY, Outcome.UPSTREAM_ERROR, Outcome.CLIENT_ERROR})
_IN_BAND = {"request": Outcome.CLIENT_ERROR, "busy": Outcome.UPSTREAM_BUSY}
"""Mark of `usage.lua` for an in-band error that is not the node's fault."""
_DELTA_BYTES_PER_TOKEN = 6
_DELTAS_OF_ONE_TOKEN = (7, 64)
"""Bytes per delta, and beyond that: no more, and every event has one token. More: the engine puts several into one."""
_CONTEXTS, _CONTEXTS_OF_MANY = 2, 128
"""More tokens than fill so many contexts are no usage, of one prompt or of a list of them."""
_ESTIMATES, _ADDED = 4, 1024
"""A prompt of more tokens than so many estimates and what an engine may add by itself is none."""
_AUDIO_ESTIMATES = 256
"""Audio that is so many times longer than its file suggests is none: no codec is that dense."""
_BODY_BYTES_PER_TOKEN = 4
_UNSEEN = 64
"""Output tokens that may pass without a byte: marks of turns, of reasoning and of tool calls."""
_ENVELOPE_BYTES = 350
"""Bytes around the text of a JSON answer."""


class ExchangeEnding(Struct, frozen=True, gc=False):
    """Facts about a finished exchange before it is classified. Token counts None: not reported."""

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
    charged: bool = True
    """The operation costs tokens at all."""
    generates: bool = True
    """There are output tokens at all: not so of embeddings and ranks."""
    unread: bool = False
    """An event was too long to be read: the end may have been in it."""
    open_choices: int = 0
    """Choices that have not finished while another has."""
    total_tokens: int | None = None
    """The sum, where the engine told no more than that."""
    bad_usage: bool = False
    """The engine told numbers that count no tokens, or took back what it had told."""
    fault: str = ""
    """The origin of the in-band error, if it is not the node's."""
    media: bool = False
    """The prompt holds images, audio or files."""
    images: int = 0
    """Images that were asked for."""
    audio_estimate: int = 0
    """Seconds of audio by the size of its file."""
    audio_seconds: int = 0
    """Seconds of audio that the engine told; 0: it told none, or that is not what is charged."""

    @property
    def ended(self) -> bool:
        """The answer was complete when it left the node."""
        return self.done or (bool(self.finish_reason) and not self.open_choices)


def classify_outcome(ending: ExchangeEnding) -> Outcome:
    """Return the outcome of the exchange, by the first table above."""
    flags = ending.flags
    if ending.refusal:
        return Outcome.REFUSED
    if flags & _TIMEOUTS and ending.reached:
        return Outcome.UPSTREAM_TIMEOUT
    if ending.error and ending.answered and ending.status < HTTPStatus.BAD_REQUEST:
        return _IN_BAND.get(ending.fault, Outcome.UPSTREAM_ERROR)
    if ending.finish_reason == "abort":
        return Outcome.UPSTREAM_TRUNCATED
    if flags & _CLIENT_GONE:
        return Outcome.COMPLETED if ending.ended else Outcome.CLIENT_CANCELLED
    if not ending.reached:
        return Outcome.COMPLETED if 0 < ending.status < HTTPStatus.BAD_REQUEST else Outcome.NOT_DISPATCHED
    return _is_by_node(ending)


def _is_by_node(ending: ExchangeEnding) -> Outcome:
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


def compute_usage(ending: ExchangeEnding, ended_as: Outcome) -> Usage:
    """Return the charge of the exchange, by the two tables above."""
    if not (ending.images or ending.audio_estimate or ending.audio_seconds):
        return _compute_tokens(ending, ended_as)
    plausible = 0 < ending.audio_seconds <= _AUDIO_ESTIMATES * max(1, ending.audio_estimate)
    seconds = ending.audio_seconds if plausible else ending.audio_estimate
    usage = _compute_tokens(replace(ending, prompt_estimate=seconds * AUDIO_TOKENS) if plausible else ending, ended_as)
    if not usage.total_tokens:
        return usage
    return replace(
        usage,
        images=ending.images,
        audio_seconds=seconds,
        estimated=usage.estimated and not plausible,
        disputed=usage.disputed or (ending.audio_seconds > 0 and not plausible),
    )


def _compute_tokens(ending: ExchangeEnding, ended_as: Outcome) -> Usage:
    if not (ending.reached and ending.charged) or ended_as in (Outcome.REFUSED, Outcome.NOT_DISPATCHED):
        return Usage(0, 0)
    counted = _count_tokens(ending)
    reported = _read_counts(ending, counted)
    disputed = ending.bad_usage or (reported is not None and not _is_possible(ending, reported))
    if reported is not None and not disputed and (reported.total_tokens or not ending.generates):
        least = 0 if _is_final(ending) else counted
        return reported if least <= reported.completion_tokens else replace(reported, completion_tokens=least, estimated=True)
    if ended_as in _UNCHARGED and not ending.deltas:
        return Usage(0, 0, disputed=disputed)
    return Usage(ending.prompt_estimate, counted, estimated=True, disputed=disputed)


def _read_counts(ending: ExchangeEnding, counted: int) -> Usage | None:
    """The engine's own usage, with the estimate for a prompt that it left out; None: it told none."""
    prompt, completion = ending.prompt_tokens, ending.completion_tokens
    if prompt is None and completion is None:
        total = ending.total_tokens
        if total is None:
            return None
        output = min(counted, total)
        return Usage(total - output, output, ending.cached_tokens, estimated=ending.generates)
    assumed = prompt is None
    return Usage(ending.prompt_estimate if assumed else prompt or 0, completion or 0, ending.cached_tokens, estimated=assumed)


def _is_final(ending: ExchangeEnding) -> bool:
    """Return whether the reported usage is the final one: with several choices, a stream can be cut after the first one finished."""
    if ending.done or ending.deltas is None:
        return True
    return ending.ended and not ending.flags & _CUT


def _is_possible(ending: ExchangeEnding, reported: Usage) -> bool:
    """Return whether an engine can have used that much: a wrong count must not empty a tenant's bucket."""
    most_prompt, most_output = bound_usage(
        ending.prompt_estimate, ending.context, ending.output_asked, one_prompt=ending.one_prompt, media=ending.media
    )
    return reported.prompt_tokens <= most_prompt and reported.completion_tokens <= min(most_output, _count_passed(ending) + _UNSEEN)


def bound_usage(prompt_estimate: int, context: int, output_asked: int, *, one_prompt: bool, media: bool) -> tuple[float, float]:
    """Return the most tokens of prompt and answer that an engine can have used. `context`, `output_asked`: 0 is not known."""
    room, estimated = _compute_room(context, one_prompt=one_prompt), _ESTIMATES * prompt_estimate
    return max(room, estimated) if media else estimated + _ADDED, min(room, output_asked or math.inf)


def _compute_room(context: int, *, one_prompt: bool) -> float:
    """Tokens that the node's context has room for."""
    return (_CONTEXTS if one_prompt else _CONTEXTS_OF_MANY) * context or math.inf


def _count_passed(ending: ExchangeEnding) -> int:
    """Tokens that can have passed, each as one byte; of a stream whose events are not read, by all its bytes."""
    if not ending.deltas or ending.unread:
        return ending.body_bytes
    return max(ending.deltas, ending.delta_bytes)


def _count_tokens(ending: ExchangeEnding) -> int:
    """Output tokens as far as events or bytes tell; no more than were asked for, nor than the context has room for."""
    if ending.deltas is not None:
        each, beyond = _DELTAS_OF_ONE_TOKEN
        one_each = ending.delta_bytes <= each * ending.deltas + beyond
        count = ending.deltas if one_each else max(ending.deltas, math.ceil(ending.delta_bytes / _DELTA_BYTES_PER_TOKEN))
    elif not ending.generates or not ending.answered or ending.status >= HTTPStatus.BAD_REQUEST:
        return 0
    else:
        count = max(0, ending.body_bytes - _ENVELOPE_BYTES) // _BODY_BYTES_PER_TOKEN
    return int(min(count, _compute_room(ending.context, one_prompt=ending.one_prompt), ending.output_asked or math.inf))
