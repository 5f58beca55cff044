"""Every entry of the route table with a request that it takes: what a verification walks (R42).

Rule: a request is proven by the very reading and routing that serve it. An entry for which none can be made says why, and is not left out.

An entry is a name that clients use, a rule (or the pool that takes what no rule took) and a segment of prompt lengths, inside which no
rule turns and no node is too short.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec
from msgspec import Struct

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import Operation, RequestHead
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.node_selector import RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import DecisionView, facts
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.route.table import CompiledRule, Routed
from din_extproc.schedule.pick import Demand, filter_shapes, group_by_shape
from din_extproc.tools.verify.sample_request import SampleRequest, wishes

_OPERATIONS = (
    Operation.CHAT,
    Operation.COMPLETIONS,
    Operation.EMBEDDINGS,
    Operation.RERANK,
    Operation.RESPONSES,
    Operation.MESSAGES,
)
"""In the order in which they are tried."""
_SHORT = 24
"""Tokens of the prompt where nothing asks for more."""
_BEYOND = 1.3
"""How far over its lower end a prompt is made, so that an estimate that is off still lies inside."""
_ATTEMPTS = 6


class RouteEntry(Struct, frozen=True):
    """One entry of the route table."""

    name: str
    """The alias or physical model asked for."""
    rule: str
    """"" for a pool that takes what no rule took."""
    pool: Pool
    operation: Operation
    tokens: int
    """Of the prompt, as estimated."""
    head: RequestHead
    """Without a key."""
    body: bytes
    nodes: tuple[Node, ...]
    """Those of the pool that can take the request; its answer comes from one of them."""
    why: str = ""
    """Why no request gets there; "" when one does."""


class RouteCoverage:
    """The entries that one tenant's requests can take.

    Args:
        view: The configuration.
        members: The nodes of every pool.
        tenant: Who asks.
        hour_utc: 0-23, for rules that look at the time of day.
    """

    def __init__(self, view: DecisionView, members: PoolMembership, tenant: Tenant, hour_utc: int) -> None:
        self._view = view
        self._members = members
        self._tenant = tenant
        self._hour_utc = hour_utc
        self._gauges = TokenCalibrators(view.table.preferred_model)

    def entries(self) -> Iterator[RouteEntry]:
        """All of them: names sorted, aliases first; of each its rules in order, and of each its segments, shortest first."""
        for listed in self._view.table.models_for(self._tenant):
            for rule in self._view.table.rules_for(listed.name):
                yield from self._entries(listed.name, rule)

    def _entries(self, name: str, rule: CompiledRule) -> Iterator[RouteEntry]:
        found = False
        reasons = []
        for lowest, end in pairwise((0, *facts(self._view, rule.pool.model).boundaries, None)):
            entry = self._entry(name, rule, lowest or 0, None if end is None else end - 1)
            if isinstance(entry, RouteEntry):
                found = True
                yield entry
            elif entry:
                reasons.append(entry)
        if not found:
            why = reasons[0] if reasons else "no request meets its condition"
            yield RouteEntry(
                name=name,
                rule=rule.id,
                pool=rule.pool,
                operation=Operation.CHAT,
                tokens=0,
                head=RequestHead("POST", Operation.CHAT.value, {}),
                body=b"",
                nodes=(),
                why=why,
            )

    def _entry(self, name: str, rule: CompiledRule, lowest: int, highest: int | None) -> RouteEntry | str:
        """An entry of one segment; or why there is none, "" when the segment is not the rule's."""
        why = ""
        for wish in wishes(rule.condition):
            first = max(wish.lowest, lowest)
            last = min((bound for bound in (wish.highest, highest) if bound is not None), default=None)
            if last is not None and last < first:
                continue
            tokens = _inside(first, last)
            for operation in _OPERATIONS:
                if (wish.operations and operation not in wish.operations) or not _serves(rule.pool, operation):
                    continue
                made = self._made(name, rule, wish, operation, (first, tokens, last))
                if isinstance(made, RouteEntry):
                    return made
                why = why or made
                break
        return why

    def _made(
        self, name: str, rule: CompiledRule, wish: SampleRequest, operation: Operation, size: tuple[int, int, int | None]
    ) -> RouteEntry | str:
        """The entry with its request; or what else happens to the request."""
        head = RequestHead("POST", operation.value, {"content-type": "application/json", **wish.headers, **_priority(wish)})
        body, reading = self._sized(name, head, operation, size, stream=bool(wish.stream))
        if isinstance(reading, Refusal):
            return reading.message
        routed = self._view.table.route(reading.intent, self._tenant, head, self._hour_utc, self._members.versions)
        if isinstance(routed, Refusal):
            return routed.message
        if (routed.rule, routed.pool.name) != (rule.id, rule.pool.name):
            taker = f"rule {routed.rule}" if routed.rule else f"pool {routed.pool.name}"
            return f"{taker} takes its requests"
        nodes, why = self._nodes(routed, reading)
        return RouteEntry(
            name=name,
            rule=rule.id,
            pool=rule.pool,
            operation=operation,
            tokens=reading.intent.estimate.tokens,
            head=head,
            body=body,
            nodes=nodes,
            why=why,
        )

    def _sized(
        self, name: str, head: RequestHead, operation: Operation, size: tuple[int, int, int | None], *, stream: bool
    ) -> tuple[bytes, ParsedRequest | Refusal]:
        """A body whose prompt is estimated to be about as long as wanted, and within the bounds; and how it reads."""
        first, wanted, last = size
        words = max(1, wanted)
        for _ in range(_ATTEMPTS):
            body = _body(operation, name, words, stream=stream)
            reading = parse_request(head, body, self._gauges.named, self._view.body_limit)
            if isinstance(reading, Refusal):
                break
            estimated = reading.intent.prompt_tokens
            if first <= estimated <= (2 * wanted if last is None else min(last, 2 * wanted)):
                break
            words = max(1, round(words * wanted / max(1, estimated)))
        return body, reading

    def _nodes(self, routed: Routed, reading: ParsedRequest) -> tuple[tuple[Node, ...], str]:
        """The nodes that take the request for certain: those that would get it only in case the estimate is too high are out."""
        tokens = RequestSize.of(reading.intent, band=0.0).tokens
        shapes = group_by_shape(self._members.nodes(routed.pool.name))
        fit = filter_shapes(shapes, Demand(tokens, tokens, routed.versions.text, routed.versions.allows))
        if isinstance(fit, Refusal):
            return (), fit.message
        return tuple(node for shape in fit for node in shapes[shape]), ""


def _inside(first: int, last: int | None) -> int:
    """A prompt length well inside a segment."""
    wanted = max(_SHORT, int(first * _BEYOND))
    return wanted if last is None or wanted <= last else (first + last + 1) // 2


def _serves(pool: Pool, operation: Operation) -> bool:
    return pool.operations is None or operation in pool.operations


def _priority(wish: SampleRequest) -> Mapping[str, str]:
    return {} if wish.priority is None else {"x-din-priority": wish.priority.value}


def _body(operation: Operation, name: str, words: int, *, stream: bool) -> bytes:
    """A request that costs its node as little as can be: the answer is one token."""
    text = "Say OK. " + "echo " * words
    asked: dict[str, object] = {"model": name}
    match operation:
        case Operation.CHAT | Operation.MESSAGES:
            asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        case Operation.RESPONSES:
            asked |= {"input": text, "max_output_tokens": 1}
        case Operation.COMPLETIONS:
            asked |= {"prompt": text, "max_tokens": 1}
        case Operation.RERANK:
            asked |= {"query": "OK", "documents": [text]}
        case _:
            asked |= {"input": text}
    if stream:
        asked["stream"] = True
    return msgspec.json.encode(asked)
