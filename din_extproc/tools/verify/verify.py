"""The role `verify`: asks a deployment through every entry of its route table, as a client of one tenant (R42, R37, R38).

Rule: the configuration says what is right, the answers say what is; nothing inside the deployment is asked but which nodes registered.

Every request tells lies in headers that only the gateway may set, and brings a trace id of its own: an answer that believes the one or
loses the other is wrong. Nodes can't be named by clients: an entry is asked several times, at once and again, until each of its nodes
has answered or the scheduler clearly prefers others.
"""

import asyncio
import secrets
import time
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.keys import KeyRing
from din_extproc.domain.node import Node
from din_extproc.domain.verdict import Refusal
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.measure.provenance import TRACE, Provenance
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explain import members_of
from din_extproc.tools.http_client import OutsideClient, OutsideResponse
from din_extproc.tools.verify.report import NOT_ASKED, OK, PARTLY, UNREACHABLE, WRONG, NodeAnswers, VerifiedEntry, VerifyReport
from din_extproc.tools.verify.route_coverage import RouteCoverage, RouteEntry

_LIE = "verify-says-so"
_LIES = {"x-din-node-id": _LIE, "x-din-cluster": _LIE, "x-din-endpoint": "127.0.0.1:1", "x-din-model": _LIE, "x-din-tenant": _LIE}
_WAVES = 3


class VerifyRefused(Exception):  # noqa: N818 - it says what the deployment is
    """There is nobody to ask as: the key is none of this configuration's."""


class VerifyOptions(Struct, frozen=True):
    """What to ask, and how."""

    url: str
    key: str
    longest: int = 20_000
    """The most prompt tokens to ask with."""
    timeout_s: float = 60.0


def verify(settings: Settings, options: VerifyOptions, rows: tuple[MemberForm, ...] = ()) -> VerifyReport:
    """Walk the table.

    Args:
        settings: What the deployment should do.
        options: Whom to ask, and how.
        rows: Nodes that registered, as the sidecar knows them.

    Raises:
        Unverifiable: the key is none of the configuration's.
    """
    return asyncio.run(_verify(settings, options, rows))


async def _verify(settings: Settings, options: VerifyOptions, rows: tuple[MemberForm, ...]) -> VerifyReport:
    who = KeyRing(settings.keys).authenticate(f"Bearer {options.key}", "", time.time())
    if isinstance(who, Refusal):
        raise VerifyRefused(who.message)
    walk = RouteCoverage(make_view(settings, {}), _members(settings, rows), who.tenant, datetime.now(UTC).hour)
    async with OutsideClient(options.url, options.key, options.timeout_s) as client:
        entries = [await _verified(entry, client, options.longest) for entry in walk.entries()]
    return VerifyReport(options.url, who.tenant.id, tuple(entries))


def _members(settings: Settings, rows: tuple[MemberForm, ...]) -> PoolMembership:
    """Listed nodes as the configuration has them; of pools without any, those that registered."""
    registered = members_of(rows)
    return PoolMembership({pool.name: pool.nodes or registered.nodes(pool.name) for pool in settings.pools}, {})


async def _verified(entry: RouteEntry, client: OutsideClient, longest: int) -> VerifiedEntry:
    why = entry.why or (f"its prompt of {entry.tokens} tokens is longer than the {longest} to ask with" if entry.tokens > longest else "")
    found = VerifiedEntry(
        verdict=NOT_ASKED,
        name=entry.name,
        rule=entry.rule,
        pool=entry.pool.name,
        operation=entry.operation.value,
        tokens=entry.tokens,
        why=why,
    )
    if why:
        return found
    expected = {node.id: node for node in entry.nodes}
    answers: dict[str, list[tuple[str, ...]]] = {}
    failures: list[str] = []
    for _ in range(_WAVES):
        for trace_id, outcome in await _wave(entry, client, 2 * len(expected)):
            if not outcome.good:
                failures.append(outcome.trouble)
            else:
                answers.setdefault(outcome.headers.get("x-din-node-id", ""), []).append(_problems(outcome, trace_id, expected))
        if expected.keys() <= answers.keys() or failures:
            break
    return _judged(found, expected, answers, failures)


async def _wave(entry: RouteEntry, client: OutsideClient, count: int) -> list[tuple[str, OutsideResponse]]:
    """So many requests at once, each with its trace id."""
    ids = [f"verify-{secrets.token_hex(8)}" for _ in range(count)]
    requests = [
        client.ask(entry.head.method, entry.head.path, {**entry.head.headers, **_LIES, "x-din-trace-id": each}, entry.body) for each in ids
    ]
    return list(zip(ids, await asyncio.gather(*requests), strict=True))


def _problems(outcome: OutsideResponse, trace_id: str, expected: dict[str, Node]) -> tuple[str, ...]:
    """What is wrong with a good answer."""
    told = Provenance.of(outcome.headers)
    node = expected.get(told.node_id)
    found = [f"the answer has no {name}" for name in told.missing if name != TRACE]
    if told.node_id == _LIE:
        found.append("a client's own x-din-node-id came through")
    elif told.node_id and node is None:
        found.append(f"{told.node_id} answered, which is no node of the pool that can take it: {', '.join(expected)}")
    if told.model_version and node is not None and told.model_version != node.version:
        found.append(f"{told.node_id} answered as version {told.model_version}, configured is {node.version}")
    if told.trace_id != trace_id:
        found.append(f"the trace id {trace_id} came back as {told.trace_id or 'nothing'}")
    if told.degraded:
        found.append(f"a fallback answered: {told.degraded_reason or 'no reason given'}")
    return tuple(found)


def _judged(
    found: VerifiedEntry, expected: dict[str, Node], answers: dict[str, list[tuple[str, ...]]], failures: list[str]
) -> VerifiedEntry:
    problems = dict.fromkeys(problem for each in answers.values() for answer in each for problem in answer)
    problems |= dict.fromkeys(failures)
    silent = tuple(node_id for node_id in expected if node_id not in answers)
    if not answers:
        verdict = UNREACHABLE
    elif problems:
        verdict = WRONG
    else:
        verdict = PARTLY if silent else OK
    answered = tuple(
        NodeAnswers(node_id or "(unnamed)", len(each), tuple(dict.fromkeys(problem for answer in each for problem in answer)))
        for node_id, each in answers.items()
    )
    return replace(found, verdict=verdict, answered=answered, silent=silent, problems=tuple(problems))
