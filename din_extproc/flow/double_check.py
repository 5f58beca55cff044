"""Double checks: requests are sampled and sent again to two nodes that should agree.

Rule: the client's request is never changed, delayed or billed for it; a check is a request of its own. A greedy or seeded request is
repeated unchanged, up to its own length; for any other the start of the greedy response is compared. Requests that can't be compared are
not sampled, and the tokens that checks use are bounded.
"""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.domain.request import Operation
from din_extproc.flow.decision import Decision
from din_extproc.intent.outline import Outline
from din_extproc.intent.read import ParsedRequest
from din_extproc.intent.splice import splice_values

NODES_COMPARED = 3
"""Nodes at most: two, and a third when they differ."""
_ENGINES = frozenset({"vllm", "sglang", "llamacpp", "tensorrt_llm"})
"""Engines with OpenAI's API that accept `logprobs`."""
_INCOMPARABLE = ("tools", "functions", "response_format", "best_of", "n_cmpl", "echo")
_WAITING = 32
_WHOLE = {"stream": b"false", "n": b"1"}
_GREEDY = {"temperature": b"0", "top_p": b"1", "seed": b"1"}
_CANDIDATES = b"5"
"""Tokens told beside each one of an answer: as many as every engine and API gives."""


class DoubleCheckPolicy(Struct, frozen=True):
    """Share and token limits of the checks of one worker."""

    share: float
    """Of comparable requests, 0 to 1."""
    tokens_per_minute: int
    """Prompts and answers of all nodes asked."""
    max_tokens: int
    """Of each answer."""


class DoubleCheck(Struct, frozen=True):
    """One question for two or three nodes."""

    trace_id: str
    pool: str
    path: str
    body: bytes
    node: Node
    """The node that served the request."""
    tokens: int
    """Maximum tokens of one answer to it, prompt included."""
    sampled: bool = False
    """Its answers are drawn with the client's seed, not greedy."""

    def select_peers(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of the pool that should say the same, the request's own left out; not more than are needed."""
        own = self.node
        same = [node for node in nodes if node.id != own.id and (node.model, node.version, node.kind) == (own.model, own.version, own.kind)]
        start = sum(self.trace_id.encode()) % len(same) if same else 0
        return (same[start:] + same[:start])[: NODES_COMPARED - 1]


class CheckSampler:
    """Takes every so many-th request, as long as the budget lasts. Time is an argument, in seconds."""

    __slots__ = ("_budget", "_due", "_since", "policy", "waiting")

    def __init__(self, policy: DoubleCheckPolicy) -> None:
        self.policy = policy
        self.waiting: list[DoubleCheck] = []
        self._due = 0.0
        self._budget = float(policy.tokens_per_minute)
        self._since: float | None = None

    def sample(self, granted: Decision, parsed: ParsedRequest, trace_id: str, now: float) -> None:
        """A request was sent on."""
        self._due += self.policy.share
        if self._due < 1.0:
            return
        check = _make_check(granted, parsed, trace_id, self.policy)
        if check is None or len(self.waiting) >= _WAITING:
            self._due = 1.0  # the next one, then
            return
        self._due -= 1.0
        if self._can_afford(NODES_COMPARED * check.tokens, now):
            self.waiting.append(check)

    def refund_unused(self, check: DoubleCheck, answers: int) -> None:
        """So many nodes were asked: what was set aside for the others is free again."""
        self._budget += (NODES_COMPARED - answers) * check.tokens

    def _can_afford(self, tokens: int, now: float) -> bool:
        full = self.policy.tokens_per_minute
        if self._since is not None:
            self._budget = min(full, self._budget + max(0.0, now - self._since) * full / 60)
        self._since = now
        if tokens > self._budget:
            return False
        self._budget -= tokens
        return True


def _make_check(granted: Decision, parsed: ParsedRequest, trace_id: str, policy: DoubleCheckPolicy) -> DoubleCheck | None:
    """The question; None: answers to this request can't be compared."""
    intent, pool = granted.intent, granted.target.pool
    outline, body = parsed.outline, parsed.body
    if intent.operation not in {Operation.CHAT, Operation.COMPLETIONS} or pool.engine not in _ENGINES or parsed.prompt.media:
        return None
    if any(key in outline.spans for key in _INCOMPARABLE) or outline.value(body, "n") not in {b"", b"1", b"null"}:
        return None
    if intent.operation is Operation.COMPLETIONS and not outline.value(body, "prompt").startswith(b'"'):
        return None
    greedy, seeded = _number(outline, body, "temperature") == 0, isinstance(_number(outline, body, "seed"), int)
    own = intent.output_tokens or max(1, granted.claim.tokens - intent.prompt_tokens)
    affordable = policy.tokens_per_minute // NODES_COMPARED - intent.prompt_tokens
    output = min(own, max(policy.max_tokens, affordable) if greedy or seeded else policy.max_tokens)
    edits = _make_edits(outline, intent.operation, output, repeats=greedy or seeded) | {"model": msgspec.json.encode(pool.served_model)}
    return DoubleCheck(
        trace_id=trace_id,
        pool=pool.name,
        path=intent.operation.value,
        body=splice_values(body, outline, edits),
        node=granted.selection.nodes[0],
        tokens=intent.prompt_tokens + output,
        sampled=seeded and not greedy,
    )


def _number(outline: Outline, body: bytes, key: str) -> float | None:
    """A number of the request, an int where it is written as one; None: it has none there."""
    try:
        return msgspec.json.decode(outline.value(body, key), type=int | float)
    except msgspec.DecodeError:
        return None


def _make_edits(outline: Outline, operation: Operation, output: int, *, repeats: bool) -> dict[str, bytes]:
    """Return the changes to the request. `repeats`: its own sampling stays."""
    logprobs = {"logprobs": b"true", "top_logprobs": _CANDIDATES} if operation is Operation.CHAT else {"logprobs": _CANDIDATES}
    edits = {**_WHOLE, "max_tokens": b"%d" % output, **logprobs, **({} if repeats else _GREEDY)}
    limits = dict.fromkeys(("max_completion_tokens", "n_predict"), b"%d" % output)
    replaced = {**limits, "stream_options": b"null", **({} if repeats else {"min_tokens": b"0", "logit_bias": b"null"})}
    return edits | {key: value for key, value in replaced.items() if key in outline.spans}
