"""The role of `verify`: sends a request through every entry of a deployment's route table, as a client of one tenant.

Rule: answers are compared with the configuration; the only internal source is the list of registered nodes.

Every request has false values in headers that only the gateway may set, and its own trace id: an answer that adopts the former or
loses the other is wrong. Nodes can't be named by clients: an entry is asked several times, at once and again, until each of its nodes
has answered or the scheduler clearly prefers others.
"""

import asyncio
import secrets
import time
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.admit.keys import KeyRing
from din_extproc.domain.node import Node
from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.measure.provenance import NODE, STATED_NODE, TRACE, Provenance
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explain import members_of
from din_extproc.tools.http_client import OutsideClient, OutsideResponse
from din_extproc.tools.verify.report import IDLE, NOT_ASKED, OK, PARTLY, UNREACHABLE, WRONG, NodeAnswers, VerifiedEntry, VerifyReport
from din_extproc.tools.verify.route_coverage import RouteCoverage, RouteEntry

_LIE = "verify-says-so"
_LIES = {"x-din-node-id": _LIE, "x-din-cluster": _LIE, "x-din-endpoint": "127.0.0.1:1", "x-din-model": _LIE, "x-din-tenant": _LIE}
_WAVES = 3


_LIMITS = frozenset(
    code.code
    for code in (
        RefusalCode.REQUEST_EXCEEDS_LIMIT,
        RefusalCode.RATE_LIMIT_EXCEEDED,
        RefusalCode.CONCURRENCY_LIMIT_EXCEEDED,
        RefusalCode.QUEUE_FULL,
    )
)


class _Problem(Struct):
    """The fields of an error body that are read."""

    code: str = ""
    detail: str = ""


class VerifyRefused(Exception):  # noqa: N818 - the name says what happened
    """The key belongs to no tenant of this configuration."""


class VerifyOptions(Struct, frozen=True):
    """The options of `verify`."""

    url: str
    key: str
    longest: int | None = None
    """Longest prompt to send, in tokens; None: as long as an entry needs."""
    timeout_s: float = 60.0
    """Time limit of one answer, in seconds."""
    wait_s: float = 120.0
    """Maximum wait per entry in seconds, while the tenant's limits refuse requests."""


def verify(
    settings: Settings, options: VerifyOptions, rows: tuple[MemberForm, ...] = (), progress: ShareDone = ignore_progress
) -> VerifyReport:
    """Verify the route table.

    Args:
        settings: The configuration of the deployment.
        options: The target and the limits.
        rows: Registered nodes, as the sidecar knows them.
        progress: Takes the share of entries done.

    Raises:
        VerifyRefused: the key belongs to no tenant of the configuration.
    """
    return asyncio.run(_verify(settings, options, rows, progress))


async def _verify(settings: Settings, options: VerifyOptions, rows: tuple[MemberForm, ...], progress: ShareDone) -> VerifyReport:
    who = KeyRing(settings.keys).authenticate(f"Bearer {options.key}", "", time.time())
    if isinstance(who, Refusal):
        raise VerifyRefused(who.message)
    coverage = RouteCoverage(make_view(settings, {}), _members(settings, rows), who.tenant, datetime.now(UTC).hour)
    async with OutsideClient(options.url, options.key, options.timeout_s) as client:
        entries, done = list(coverage.entries()), []
        for number, entry in enumerate(entries):
            progress(number / len(entries))
            done.append(await _verified(entry, client, options))
    return VerifyReport(options.url, who.tenant.id, tuple(done))


def _members(settings: Settings, rows: tuple[MemberForm, ...]) -> PoolMembership:
    """Return the configured nodes; for pools without any, the registered ones."""
    registered = members_of(rows)
    return PoolMembership({pool.name: pool.nodes or registered.get_nodes(pool.name) for pool in settings.pools}, {})


async def _verified(entry: RouteEntry, client: OutsideClient, options: VerifyOptions) -> VerifiedEntry:
    why = entry.why
    if options.longest is not None and entry.tokens > options.longest:
        why = f"its prompt of {entry.tokens} tokens is longer than the {options.longest} to ask with (--longest)"
    verdict = IDLE if entry.idle else NOT_ASKED
    found = VerifiedEntry(
        verdict=verdict,
        name=entry.name,
        rule=entry.rule,
        pool=entry.pool.name,
        leaves_site=entry.pool.is_remote,
        operation=entry.operation.value,
        tokens=entry.tokens,
        why=why,
    )
    if why:
        return found
    expected = {node.id: node for node in entry.nodes}
    answers: dict[str, list[tuple[str, ...]]] = {}
    failures: list[str] = []
    stated: set[str] = set()
    for _ in range(_WAVES if entry.first else 1):
        for trace_id, outcome in await _wave(entry, client, 2 * len(expected) if entry.first and len(expected) > 1 else 1, options.wait_s):
            refusal = _refused_by_limits(outcome)
            if refusal:
                return replace(found, verdict=NOT_ASKED, why=refusal)
            if not outcome.good:
                failures.append(outcome.trouble)
            else:
                if outcome.headers.get(STATED_NODE):
                    stated.add(outcome.headers.get(NODE, ""))
                answers.setdefault(outcome.headers.get("x-din-node-id", ""), []).append(_problems(outcome, trace_id, expected))
        if expected.keys() <= answers.keys() or failures:
            break
    if not entry.first:
        expected = {node_id: node for node_id, node in expected.items() if node_id in answers}
    return _check_answers(found, expected, answers, stated, failures)


async def _wave(entry: RouteEntry, client: OutsideClient, count: int, wait_s: float) -> list[tuple[str, OutsideResponse]]:
    """Send `count` requests at once, each with its own trace id."""
    ids = [f"verify-{secrets.token_hex(8)}" for _ in range(count)]
    return list(zip(ids, await asyncio.gather(*(_send(entry, client, each, wait_s) for each in ids)), strict=True))


async def _send(entry: RouteEntry, client: OutsideClient, trace_id: str, wait_s: float) -> OutsideResponse:
    """Send a request, and again while the tenant's limits refuse it."""
    head = entry.head
    while True:
        outcome = await client.send(head.method, head.path, {**head.headers, **_LIES, "x-din-trace-id": trace_id}, entry.body)
        later = outcome.headers.get("retry-after", "")
        if outcome.status != HTTPStatus.TOO_MANY_REQUESTS or not later.isdigit() or int(later) > wait_s:
            return outcome
        wait_s -= max(1, int(later))
        await asyncio.sleep(max(1, int(later)))


def _refused_by_limits(outcome: OutsideResponse) -> str:
    """Return why the tenant's limits refused the request; "" if they did not."""
    if outcome.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.TOO_MANY_REQUESTS):
        return ""
    try:
        problem = msgspec.json.decode(outcome.body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f"the tenant's limits refuse it: {problem.detail}" if problem.code in _LIMITS else ""


def _problems(outcome: OutsideResponse, trace_id: str, expected: dict[str, Node]) -> tuple[str, ...]:
    """Return what is wrong with a successful answer."""
    proof = Provenance.of(outcome.headers)
    node = expected.get(proof.node_id)
    found = [f"the answer has no {name}" for name in proof.missing if name != TRACE]
    if proof.node_id == _LIE:
        found.append("a client's own x-din-node-id came through")
    elif proof.node_id and node is None:
        found.append(f"{proof.node_id} answered, which is no node of the pool that can take it: {', '.join(expected)}")
    if proof.model_version and node is not None and proof.model_version != node.version:
        found.append(f"{proof.node_id} answered as version {proof.model_version}, configured is {node.version}")
    if proof.stated_node and proof.stated_node != proof.node_id:
        found.append(f"the node that the gateway calls {proof.node_id} says that it is {proof.stated_node}")
    if proof.stated_version and proof.stated_version != proof.model_version:
        found.append(f"{proof.node_id} says that it serves version {proof.stated_version}, the gateway says {proof.model_version}")
    if proof.trace_id != trace_id:
        found.append(f"the trace id {trace_id} came back as {proof.trace_id or 'nothing'}")
    if proof.degraded:
        found.append(f"a fallback answered: {proof.degraded_reason or 'no reason given'}")
    return tuple(found)


def _check_answers(
    found: VerifiedEntry, expected: dict[str, Node], answers: dict[str, list[tuple[str, ...]]], stated: set[str], failures: list[str]
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
        NodeAnswers(
            node=node_id or "(unnamed)",
            answers=len(each),
            problems=tuple(dict.fromkeys(problem for answer in each for problem in answer)),
            stated=node_id in stated,
        )
        for node_id, each in answers.items()
    )
    return replace(found, verdict=verdict, answered=answered, silent=silent, problems=tuple(problems))
