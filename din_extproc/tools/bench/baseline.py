"""The role of `bench baseline`: sends the same prompts to one node directly and through the gateway, in turn.

Rule: the tenant's key is sent to the gateway only. Times inside the gateway come from its admin port; missing ones are reported as such.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from din_extproc import __version__
from din_extproc.admit.keys import KeyRing
from din_extproc.domain.node import Endpoint, Pool
from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.timing import GatewayTimes
from din_extproc.domain.verdict import Refusal
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.measure.answer import TimedAnswer
from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_page, fetch_rows
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline_figures import (
    BOTTLENECK,
    BaselineFailed,
    BaselineLoad,
    BaselineRound,
    find_reason,
    make_figures,
    ratio_range,
    time_shares,
)
from din_extproc.tools.bench.history import BaselineComparison
from din_extproc.tools.bench.prompts import make_prompt
from din_extproc.tools.bench.timed_client import TimedClient, TimedQuestion, chat_body
from din_extproc.tools.explain.explain import explain
from din_extproc.tools.explain.explanation import Explanation
from din_extproc.tools.http_client import OutsideClient

_REPORT_DEADLINE_S = 5.0
_POLL_S = 0.1


class BaselineOptions(Struct, frozen=True, kw_only=True):
    """The options of `bench baseline`."""

    url: str
    """Envoy's URL, as clients reach it."""
    key: str
    """The API key of a tenant."""
    model: str = ""
    """A model that the tenant may use; "": the first one whose pool serves chats."""
    node: str = ""
    """The node's id; "": the one that the scheduler picks first."""
    load: BaselineLoad = BaselineLoad()
    timeout_s: float = 120.0
    """Time limit of one answer, in seconds."""


class BaselineTarget(Struct, frozen=True):
    """The target of the prompts."""

    model: str
    """The model's name as clients use it."""
    pool: Pool
    node: str
    endpoint: Endpoint
    """The endpoint of the node."""


class GatewayReport(Struct, frozen=True):
    """The gateway's state at one moment."""

    configuration: str
    hits: int
    misses: int


def compare(settings: Settings, options: BaselineOptions, progress: ShareDone = ignore_progress) -> BaselineComparison:
    """Measure both sides in turn and compare them.

    Args:
        settings: The configuration of the deployment: its pools, tenants and admin port.
        options: The target and the load.
        progress: Takes the share done.

    Raises:
        BaselineFailed: there is no node to compare with, or it does not answer.
    """
    return asyncio.run(_compare(settings, options, progress))


def find_target(settings: Settings, key: str, model: str, node: str) -> BaselineTarget:
    """Return the pool that the tenant's chats are routed to, and one of its nodes.

    Args:
        settings: The configuration of the deployment: its pools, tenants and admin port.
        key: The API key of a tenant.
        model: A model that the tenant may use; "": the first one whose pool serves chats.
        node: A node's id; "": the one that the scheduler picks first.

    Raises:
        BaselineFailed: there is none.
    """
    who = KeyRing(settings.keys).authenticate(f"Bearer {key}", "", time.time())
    if isinstance(who, Refusal):
        raise BaselineFailed(who.message)
    try:
        known: tuple[MemberForm, ...] | None = fetch_rows(settings)
    except SidecarUnreachable:
        known = None
    name, explained = _resolve_model(settings, who.tenant, model, known)
    pool = next(pool for pool in settings.pools if pool.name == explained.pool)
    endpoints = {each.id: each.endpoint for each in pool.nodes}
    endpoints |= {row.node.id: row.node.to_registration().node.endpoint for row in known or () if pool.name in row.pools}
    chosen = node or explained.nodes[0]
    if chosen not in endpoints:
        raise BaselineFailed(f"{chosen} is not a node of pool {pool.name}, which serves {name}: {', '.join(endpoints)}")
    return BaselineTarget(name, pool, chosen, endpoints[chosen])


def fetch_reports(settings: Settings, trace: str, count: int) -> list[GatewayTimes]:
    """Return the gateway's records of exchanges whose trace id has this prefix. Waits shortly for `count`: its access log is batched.

    Raises:
        SidecarUnreachable: the admin port does not answer.
    """
    deadline = time.monotonic() + _REPORT_DEADLINE_S
    while True:
        found = msgspec.convert(fetch_page(settings, f"exchanges?trace={trace}")["exchanges"], list[GatewayTimes])
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_S)


def append_result(file: Path, compared: BaselineComparison) -> None:
    """Append a comparison to the history.

    Raises:
        OSError: the file can't be written.
    """
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(compared) + b"\n")


def read_history(file: Path) -> tuple[BaselineComparison, ...]:
    """Return all stored comparisons, oldest first.

    Raises:
        OSError: the file can't be read.
        ValueError: a line can't be read; the message says which.
    """
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=BaselineComparison))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number} can't be read: {error}") from error
    return tuple(found)


class _Measured(Struct, frozen=True):
    """All measurements."""

    aim: BaselineTarget
    before: GatewayReport | None
    direct: list[BaselineRound]
    through: list[BaselineRound]
    answers: dict[str, TimedAnswer]
    """Answers through the gateway, by trace id."""
    times: list[GatewayTimes]
    """The gateway's records of these answers."""
    notes: list[str]


async def _compare(settings: Settings, options: BaselineOptions, progress: ShareDone) -> BaselineComparison:
    aim = await asyncio.to_thread(find_target, settings, options.key, options.model, options.node)
    if aim.pool.api != "openai":
        raise BaselineFailed(f"the nodes of pool {aim.pool.name} have another API than OpenAI's: they can't be measured directly")
    load, trace = options.load, f"bench-{secrets.token_hex(6)}-"
    node = OutsideClient(f"http://{aim.endpoint}", "", options.timeout_s)
    async with node as to_node, OutsideClient(options.url, options.key, options.timeout_s) as to_all:
        clients = TimedClient(to_node, aim.pool.served_model), TimedClient(to_all, aim.model)
        await _warm(clients, load, (f"node {aim.node} at {aim.endpoint}", options.url))
        found = _Measured(
            aim=aim, before=await asyncio.to_thread(_fetch_status, settings), direct=[], through=[], answers={}, times=[], notes=[]
        )
        for number in range(load.rounds):
            progress(number / load.rounds)
            for through in (False, True) if number % 2 == 0 else (True, False):
                questions = _make_questions(load, trace if through else f"direct-{trace}", number)
                seconds, answers = await clients[through].send_all(questions, load.at_once)
                (found.through if through else found.direct).append(BaselineRound(seconds, tuple(answers.values())))
                if through:
                    found.answers.update(answers)
                    await asyncio.to_thread(_add_report, settings, f"{trace}{number}-", found)
    return await asyncio.to_thread(_find_verdict, settings, options, found)


async def _warm(clients: tuple[TimedClient, TimedClient], load: BaselineLoad, names: tuple[str, str]) -> None:
    """Run one warm-up round, which fills connections and caches and shows whether the target answers."""
    for client, name in zip(clients, names, strict=True):
        _, answers = await client.send_all(_make_questions(load, f"warm-{secrets.token_hex(6)}-", 0), load.at_once)
        if all(answer.trouble for answer in answers.values()):
            raise BaselineFailed(f"{name} does not answer: {next(iter(answers.values())).trouble}")


def _make_questions(load: BaselineLoad, trace: str, number: int) -> Iterator[TimedQuestion]:
    return (TimedQuestion(f"{trace}{number}-{each}", make_prompt(each), load.tokens) for each in range(load.prompts))


def _find_verdict(settings: Settings, options: BaselineOptions, found: _Measured) -> BaselineComparison:
    aim, before = found.aim, found.before
    direct, network = make_figures(found.direct), make_figures(found.through)
    if min(each.tokens_per_s for each in found.direct) == 0:
        why = ", ".join(f"{count} x {code}" for code, count in direct.errors.items())
        raise BaselineFailed(f"node {aim.node} gave no token in a whole round: {why or 'its answers are empty'}")
    notes = list(dict.fromkeys(found.notes))
    if not notes and len(found.times) < len(found.answers):
        notes.append(f"the sidecar that was asked knows {len(found.times)} of {len(found.answers)} requests")
    after = _fetch_status(settings)
    if after is not None and after.configuration != settings.fingerprint:
        notes.append(f"the sidecar runs with configuration {after.configuration[:12]}, the one given is {settings.fingerprint[:12]}")
    hits = None if before is None or after is None else _compute_share(after.hits - before.hits, after.misses - before.misses)
    ratio = network.tokens_per_s / direct.tokens_per_s
    split = time_shares(found.answers, found.times)
    return BaselineComparison(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        release=__version__,
        configuration=settings.fingerprint if after is None else after.configuration,
        url=options.url,
        model=aim.model,
        pool=aim.pool.name,
        node=aim.node,
        load=options.load,
        direct=direct,
        through=network,
        ratio=round(ratio, 4),
        spread=ratio_range(found.direct, found.through),
        shares=split,
        cache_hits=hits,
        reason=None if ratio >= BOTTLENECK else find_reason(direct, network, split, hits),
        notes=tuple(notes),
    )


def _add_report(settings: Settings, trace: str, found: _Measured) -> None:
    """Fetch the gateway's records of one round at once, because it keeps only recent ones."""
    good = sum(not answer.trouble for trace_id, answer in found.answers.items() if trace_id.startswith(trace))
    try:
        found.times.extend(fetch_reports(settings, trace, good))
    except SidecarUnreachable as error:
        found.notes.append(f"times inside the gateway are unknown, the admin port failed: {getattr(error.__cause__, 'reason', error)}")


def _fetch_status(settings: Settings) -> GatewayReport | None:
    """Return the status page; None: the admin port does not answer."""
    try:
        status = fetch_page(settings, "status")
    except SidecarUnreachable:
        return None
    cache = status.get("route_cache", {})
    return GatewayReport(status["configuration"]["fingerprint"], cache.get("hits", 0), cache.get("misses", 0))


def _compute_share(hits: int, misses: int) -> float | None:
    return round(hits / (hits + misses), 4) if hits + misses > 0 else None


def _resolve_model(settings: Settings, tenant: Tenant, model: str, known: tuple[MemberForm, ...] | None) -> tuple[str, Explanation]:
    """Return the model and where its chats are routed."""
    names = [model] if model else [listed.name for listed in make_view(settings, {}).table.models_for(tenant)]
    why = f"tenant {tenant.id} may use no model"
    for name in names:
        explained = explain(settings, tenant.id, chat_body(name, make_prompt(0), 1), known)
        if explained.sent:
            return name, explained
        why = f"a chat with {name} would be refused: {explained.message or explained.refusal}"
    raise BaselineFailed(why)
