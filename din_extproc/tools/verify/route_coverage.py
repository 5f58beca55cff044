"""Every entry of the route table with a request that reaches it.

Rule: each request is checked with the parser and router that serve requests. An entry without a request is listed with the reason.

An entry is a requested name, a rule (or the pool that is used when no rule matches), a segment of prompt lengths in which neither the
matching rules nor the fitting nodes change, and an operation of the pool.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec
from msgspec import Struct

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.request import BodyKind, Operation, Priority, RequestHead
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.node_selector import RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import DecisionView, get_model_facts
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.route.table import CompiledRule, Routed
from din_extproc.schedule.pick import filter_shapes, group_by_shape
from din_extproc.tools.verify.sample_body import build_body, content_type
from din_extproc.tools.verify.sample_request import SampleRequest, find_samples, invertible, variants

_SHORT = 24
"""Prompt tokens where no rule needs more."""
_BEYOND = 1.3
"""Factor over a segment's lower bound, so that an inexact estimate still lies inside."""
_ATTEMPTS = 6
_PRIORITIES = tuple(reversed(Priority))


class RouteEntry(Struct, frozen=True):
    """One entry of the route table."""

    name: str
    """The alias or physical model that is requested."""
    rule: str
    """The rule's name; "" for the pool that is used when no rule matches."""
    pool: Pool
    operation: Operation
    tokens: int
    """Estimated prompt tokens."""
    head: RequestHead
    """The request head, without a key."""
    body: bytes
    nodes: tuple[Node, ...]
    """Nodes of the pool that can serve the request; one of them has to answer."""
    first: bool = True
    """Whether it is the first operation of its segment, which has to reach every node."""
    why: str = ""
    """Why no request reaches the entry; "" if one does."""
    idle: bool = False
    """Whether provably no request of this tenant reaches the entry."""


class Miss(Struct, frozen=True):
    """Why a sample request does not reach an entry."""

    why: str
    idle: bool
    """Whether no other request would reach it either."""


class RouteCoverage:
    """The entries that one tenant's requests can take.

    Args:
        view: The configuration.
        members: The nodes of every pool.
        tenant: The tenant that sends the requests.
        hour_utc: 0-23, for rules that depend on the time of day.
    """

    def __init__(self, view: DecisionView, members: PoolMembership, tenant: Tenant, hour_utc: int) -> None:
        self._view = view
        self._members = members
        self._tenant = tenant
        self._hour_utc = hour_utc
        self._gauges = TokenCalibrators(view.table.preferred_model)
        self._operations = tuple(each for each in dict.fromkeys(view.operations.values()) if each.spec.body is not BodyKind.NONE)
        """In the order in which they are tried."""

    def entries(self) -> Iterator[RouteEntry]:
        """Yield all entries: names sorted, aliases first; then rules in order, segments by length, and operations."""
        for listed in self._view.table.models_for(self._tenant):
            for rule in self._view.table.rules_for(listed.name):
                yield from self._entries(listed.name, rule)

    def _entries(self, name: str, rule: CompiledRule) -> Iterator[RouteEntry]:
        found = False
        misses: list[Miss] = []
        for lowest, end in pairwise((0, *get_model_facts(self._view, rule.pool.model).boundaries, None)):
            reached, missed = self._segment(name, rule, lowest or 0, None if end is None else end - 1)
            found = found or bool(reached)
            misses += missed
            yield from reached
        unknown = next((miss for miss in misses if not miss.idle), None)
        if not found or unknown is not None:
            miss = unknown or next(iter(misses), Miss("no request meets its condition", idle=True))
            head = RequestHead("POST", Operation.CHAT.value, {})
            yield RouteEntry(
                name=name,
                rule=rule.id,
                pool=rule.pool,
                operation=Operation.CHAT,
                tokens=0,
                head=head,
                body=b"",
                nodes=(),
                why=miss.why,
                idle=miss.idle,
            )

    def _segment(self, name: str, rule: CompiledRule, lowest: int, highest: int | None) -> tuple[list[RouteEntry], list[Miss]]:
        """Yield an entry for each operation that reaches the segment; for the others the reason."""
        reached: list[RouteEntry] = []
        misses: list[Miss] = []
        for operation in self._operations:
            if not rule.pool.serves(operation):
                continue
            tried = [
                made for sample in find_samples(rule.condition) for made in self._tried(name, rule, sample, operation, (lowest, highest))
            ]
            entry = next((made for made in tried if isinstance(made, RouteEntry)), None)
            if entry is not None:
                reached.append(msgspec.structs.replace(entry, first=not reached))
            else:
                misses += [made for made in tried if isinstance(made, Miss)]
        return reached, misses

    def _tried(
        self, name: str, rule: CompiledRule, sample: SampleRequest, operation: Operation, segment: tuple[int, int | None]
    ) -> Iterator[RouteEntry | Miss]:
        """Try sample requests for one operation and segment until one reaches the entry."""
        lowest, highest = segment
        first = max(sample.lowest, lowest)
        last = min((bound for bound in (sample.highest, highest) if bound is not None), default=None)
        if (last is not None and last < first) or (sample.operations and operation not in sample.operations):
            return
        if first > _SHORT and not operation.spec.prompt:  # its requests are as long as they are
            return
        for each in variants(sample, _PRIORITIES):
            made = self._made(name, rule, each, operation, (first, _inside(first, last), last))
            yield made
            if isinstance(made, RouteEntry):
                return

    def _made(
        self, name: str, rule: CompiledRule, sample: SampleRequest, operation: Operation, size: tuple[int, int, int | None]
    ) -> RouteEntry | Miss:
        """Return the entry with its request, or why the request goes elsewhere."""
        headers = {"content-type": content_type(operation), **sample.headers, **_priority(sample)}
        head = RequestHead(operation.spec.method, operation.value, headers)
        body, reading = self._sized(name, head, operation, size, stream=bool(sample.stream))
        if isinstance(reading, Refusal):
            return Miss(reading.message, idle=False)
        routed = self._view.table.route(reading.intent, self._tenant, head, self._hour_utc, self._members.get_versions)
        if isinstance(routed, Refusal):
            return Miss(routed.message, idle=False)
        if (routed.rule, routed.pool.name) != (rule.id, rule.pool.name):
            winner = f"rule {routed.rule}" if routed.rule else f"pool {routed.pool.name}"
            known = invertible(rule.condition)
            return Miss(
                f"{winner} takes its requests" if known else f"no request could be made that meets its condition; {winner} took it", known
            )
        nodes = self._nodes(routed, reading)
        if isinstance(nodes, Refusal):
            return Miss(nodes.message, idle=nodes.code is RefusalCode.CONTEXT_LENGTH_EXCEEDED)
        return RouteEntry(
            name=name,
            rule=rule.id,
            pool=rule.pool,
            operation=operation,
            tokens=reading.intent.estimate.tokens,
            head=head,
            body=body,
            nodes=nodes,
        )

    def _sized(
        self, name: str, head: RequestHead, operation: Operation, size: tuple[int, int, int | None], *, stream: bool
    ) -> tuple[bytes, ParsedRequest | Refusal]:
        """Return a body with a prompt of about this estimated length within the bounds, and its parsed request."""
        first, wanted, last = size
        words = max(1, wanted)
        for _ in range(_ATTEMPTS):
            body = build_body(operation, name, words, stream=stream)
            reading = parse_request(head, body, self._gauges.for_name, self._view.body_limit, self._view.operations)
            if isinstance(reading, Refusal):
                break
            estimated = reading.intent.prompt_tokens
            if first <= estimated <= (2 * wanted if last is None else min(last, 2 * wanted)) or not operation.spec.prompt:
                break
            words = max(1, round(words * wanted / max(1, estimated)))
        return body, reading

    def _nodes(self, routed: Routed, reading: ParsedRequest) -> tuple[Node, ...] | Refusal:
        """Return the nodes that certainly can serve the request, even if the estimate is too high."""
        size = RequestSize.of(msgspec.structs.replace(reading.intent, truncates=False), band=0.0)
        shapes = group_by_shape(self._members.get_nodes(routed.pool.name))
        fit = filter_shapes(shapes, size.to_demand(routed.versions))
        return fit if isinstance(fit, Refusal) else tuple(node for shape in fit for node in shapes[shape])


def _inside(first: int, last: int | None) -> int:
    """Return a prompt length well inside a segment."""
    wanted = max(_SHORT, int(first * _BEYOND))
    return wanted if last is None or wanted <= last else (first + last + 1) // 2


def _priority(sample: SampleRequest) -> Mapping[str, str]:
    return {} if sample.priority is None else {"x-din-priority": sample.priority.value}
