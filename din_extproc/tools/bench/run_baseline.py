"""The role `bench baseline`: the same prompts straight to one node and through the network, in turn (R44).

Rule: the tenant's key goes to the gateway only; the gateway is asked where the time went, and where it does not tell, that is said.
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
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.timing import GatewayTimes
from din_extproc.domain.verdict import Refusal
from din_extproc.edge.registry.forms import MemberForm
from din_extproc.measure.answer import TimedAnswer
from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_page, fetch_rows
from din_extproc.roles.serve.decision_view import make_view
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline import BOTTLENECK, BaselineFailed, BaselineLoad, BaselineRound, figures, reason, shares, spread
from din_extproc.tools.bench.history import BaselineComparison
from din_extproc.tools.bench.prompts import prompt
from din_extproc.tools.bench.timed_client import TimedClient, TimedQuestion, chat
from din_extproc.tools.explain.explain import explain
from din_extproc.tools.explain.explanation import Explanation
from din_extproc.tools.http_client import OutsideClient

_TOLD_WITHIN_S = 5.0
_POLL_S = 0.1


class BaselineOptions(Struct, frozen=True, kw_only=True):
    """What to ask, and whom."""

    url: str
    """Envoy, as clients reach it."""
    key: str
    """A tenant's."""
    model: str = ""
    """A name that the tenant may use; "": the first whose pool chats."""
    node: str = ""
    """Its id; "": the one that would be asked first."""
    load: BaselineLoad = BaselineLoad()
    timeout_s: float = 120.0
    """Of one answer."""


class BaselineTarget(Struct, frozen=True):
    """Where the prompts go."""

    model: str
    """As clients name it."""
    pool: Pool
    node: str
    endpoint: Endpoint
    """The node's."""


class GatewayReport(Struct, frozen=True):
    """What the gateway has told of itself at one moment."""

    configuration: str
    hits: int
    misses: int


def compare(settings: Settings, options: BaselineOptions) -> BaselineComparison:
    """Ask both sides in turn, and compare.

    Args:
        settings: What the deployment runs with: its pools, its tenants, where its admin port is.
        options: What to ask, and whom.

    Raises:
        Unmeasurable: there is no node to compare with, or it does not answer.
    """
    return asyncio.run(_compare(settings, options))


def aim_at(settings: Settings, key: str, model: str, node: str) -> BaselineTarget:
    """The pool that this tenant's chats go to, and one of its nodes.

    Args:
        settings: What the deployment runs with.
        key: The tenant's.
        model: A name that it may use; "": the first whose pool chats.
        node: An id; "": the one that would be asked first.

    Raises:
        Unmeasurable: there is none.
    """
    who = KeyRing(settings.keys).authenticate(f"Bearer {key}", "", time.time())
    if isinstance(who, Refusal):
        raise BaselineFailed(who.message)
    try:
        known: tuple[MemberForm, ...] | None = fetch_rows(settings)
    except SidecarUnreachable:
        known = None
    name, explained = _explained(settings, who.tenant, model, known)
    pool = next(pool for pool in settings.pools if pool.name == explained.pool)
    endpoints = {each.id: each.endpoint for each in pool.nodes}
    endpoints |= {row.node.id: row.node.registration().node.endpoint for row in known or () if pool.name in row.pools}
    chosen = node or explained.nodes[0]
    if chosen not in endpoints:
        raise BaselineFailed(f"{chosen} is no node of pool {pool.name}, where {name} goes: {', '.join(endpoints)}")
    return BaselineTarget(name, pool, chosen, endpoints[chosen])


def told(settings: Settings, trace: str, count: int) -> list[GatewayTimes]:
    """What the gateway says of the exchanges whose trace id begins so. Waits a little until it knows so many: its access log is batched.

    Raises:
        Unanswered: the admin port does not answer.
    """
    deadline = time.monotonic() + _TOLD_WITHIN_S
    while True:
        found = msgspec.convert(fetch_page(settings, f"exchanges?trace={trace}")["exchanges"], list[GatewayTimes])
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_S)


def keep(file: Path, compared: BaselineComparison) -> None:
    """Add a comparison to those that are kept.

    Raises:
        OSError: the file can't be written.
    """
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(compared) + b"\n")


def kept(file: Path) -> tuple[BaselineComparison, ...]:
    """All comparisons, oldest first.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is no comparison; the message says which.
    """
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=BaselineComparison))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number} is no comparison: {error}") from error
    return tuple(found)


class _Measured(Struct, frozen=True):
    """Everything that was asked."""

    aim: BaselineTarget
    before: GatewayReport | None
    direct: list[BaselineRound]
    through: list[BaselineRound]
    answers: dict[str, TimedAnswer]
    """Through the network, by trace id."""
    times: list[GatewayTimes]
    """What the gateway says of these."""
    notes: list[str]


async def _compare(settings: Settings, options: BaselineOptions) -> BaselineComparison:
    aim = await asyncio.to_thread(aim_at, settings, options.key, options.model, options.node)
    if aim.pool.api != "openai":
        raise BaselineFailed(
            f"the nodes of pool {aim.pool.name} are spoken to in their engine's own words: no client could ask them directly"
        )
    load, trace = options.load, f"bench-{secrets.token_hex(6)}-"
    node = OutsideClient(f"http://{aim.endpoint}", "", options.timeout_s)
    async with node as to_node, OutsideClient(options.url, options.key, options.timeout_s) as to_all:
        askers = TimedClient(to_node, aim.pool.served_model), TimedClient(to_all, aim.model)
        await _warm(askers, load, (f"node {aim.node} at {aim.endpoint}", options.url))
        found = _Measured(aim=aim, before=await asyncio.to_thread(_status, settings), direct=[], through=[], answers={}, times=[], notes=[])
        for number in range(load.rounds):
            for through in (False, True) if number % 2 == 0 else (True, False):
                questions = _questions(load, trace if through else f"direct-{trace}", number)
                seconds, answers = await askers[through].ask_all(questions, load.at_once)
                (found.through if through else found.direct).append(BaselineRound(seconds, tuple(answers.values())))
                if through:
                    found.answers.update(answers)
                    await asyncio.to_thread(_hear, settings, f"{trace}{number}-", found)
    return await asyncio.to_thread(_judged, settings, options, found)


async def _warm(askers: tuple[TimedClient, TimedClient], load: BaselineLoad, names: tuple[str, str]) -> None:
    """One round that is not counted: connections, caches, pages of memory. It also shows whether there is anybody."""
    for asker, name in zip(askers, names, strict=True):
        _, answers = await asker.ask_all(_questions(load, f"warm-{secrets.token_hex(6)}-", 0), load.at_once)
        if all(answer.trouble for answer in answers.values()):
            raise BaselineFailed(f"{name} gives no answer: {next(iter(answers.values())).trouble}")


def _questions(load: BaselineLoad, trace: str, number: int) -> Iterator[TimedQuestion]:
    return (TimedQuestion(f"{trace}{number}-{each}", prompt(each), load.tokens) for each in range(load.prompts))


def _judged(settings: Settings, options: BaselineOptions, found: _Measured) -> BaselineComparison:
    aim, before = found.aim, found.before
    direct, network = figures(found.direct), figures(found.through)
    if min(each.tokens_per_s for each in found.direct) == 0:
        why = ", ".join(f"{count} x {code}" for code, count in direct.errors.items())
        raise BaselineFailed(f"node {aim.node} gave no token in a whole round: {why or 'its answers are empty'}")
    notes = list(dict.fromkeys(found.notes))
    if not notes and len(found.times) < len(found.answers):
        notes.append(f"the sidecar that was asked knows {len(found.times)} of {len(found.answers)} requests")
    after = _status(settings)
    if after is not None and after.configuration != settings.fingerprint:
        notes.append(f"the sidecar runs with configuration {after.configuration[:12]}, the one given is {settings.fingerprint[:12]}")
    hits = None if before is None or after is None else _share(after.hits - before.hits, after.misses - before.misses)
    ratio = network.tokens_per_s / direct.tokens_per_s
    split = shares(found.answers, found.times)
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
        spread=spread(found.direct, found.through),
        shares=split,
        cache_hits=hits,
        reason=None if ratio >= BOTTLENECK else reason(direct, network, split, hits),
        notes=tuple(notes),
    )


def _hear(settings: Settings, trace: str, found: _Measured) -> None:
    """What the gateway says of one round, asked at once: it forgets, and other requests pass as well."""
    good = sum(not answer.trouble for trace_id, answer in found.answers.items() if trace_id.startswith(trace))
    try:
        found.times.extend(told(settings, trace, good))
    except SidecarUnreachable as error:
        found.notes.append(f"the admin port does not tell where the time goes: {getattr(error.__cause__, 'reason', error)}")


def _status(settings: Settings) -> GatewayReport | None:
    """None: the admin port does not answer."""
    try:
        status = fetch_page(settings, "status")
    except SidecarUnreachable:
        return None
    cache = status.get("route_cache", {})
    return GatewayReport(status["configuration"]["fingerprint"], cache.get("hits", 0), cache.get("misses", 0))


def _share(hits: int, misses: int) -> float | None:
    return round(hits / (hits + misses), 4) if hits + misses > 0 else None


def _explained(settings: Settings, tenant: Tenant, model: str, known: tuple[MemberForm, ...] | None) -> tuple[str, Explanation]:
    """The name, and where its chats go."""
    names = [model] if model else [listed.name for listed in make_view(settings, {}).table.models_for(tenant)]
    why = f"tenant {tenant.id} may use no model"
    for name in names:
        explained = explain(settings, tenant.id, chat(name, prompt(0), 1), known)
        if explained.sent:
            return name, explained
        why = f"a chat with {name} would be refused: {explained.message or explained.refusal}"
    raise BaselineFailed(why)
