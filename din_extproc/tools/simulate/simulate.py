"""The role `simulate`: a configuration over modelled nodes and clients in virtual time, once or in several variants.

Rule: the same files, options and seed give the same figures on every machine; how long it took to work them out is not among them.
"""

import gc
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import Node, Pool
from din_extproc.domain.progress import ShareDone, ignore_progress, part_of
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.health.registry import select_strictest
from din_extproc.roles.serve.decision_view import half_lives_s, make_view
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from din_extproc.tools.engine_model.engine import EngineSpec
from din_extproc.tools.replay.replay import ReplayRefused, owner_finder, recorded
from din_extproc.tools.replay.rerun import ReplayedRequest, head_of, tenant_averages
from din_extproc.tools.simulate.network import SimulatedNetwork
from din_extproc.tools.simulate.plan import NodeProfile, ProbePlan, SimulationPlan
from din_extproc.tools.simulate.slo import fewest
from din_extproc.tools.simulate.stats import Outcomes, SimulationStats
from din_extproc.tools.simulate.traffic import Arrival, generate_traffic
from din_extproc.tools.simulate.workload import KindSection, Workload, load_workload, node_ids

_DAY = datetime(2027, 3, 1, tzinfo=UTC)
"""Virtual time begins on a day like any other."""
_HOUR_S = 3600
_KV_TOKENS = 131_072
_WORKLOAD = "workload."

__all__ = ["ReplayRefused", "SimulateOptions", "Simulated", "SimulationRefused", "VariantResult", "simulate"]


class SimulationRefused(Exception):  # noqa: N818 - it says what the network is
    """The plan can't be simulated; the message says why."""


class SimulateOptions(Struct, frozen=True, kw_only=True):
    """The options of the command."""

    config: Path
    workload: Path | None = None
    given: Mapping[str, Any] = {}
    """Values by path that override those of the workload file."""
    record: tuple[Path, ...] = ()
    """Folders with audit logs that requests are taken from."""
    speed: float = 1.0
    """So many times as fast as they were recorded."""
    tries: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Paths, each with the values to try: every combination is a variant."""
    size: str = ""
    """The pool whose least number of nodes is wanted."""
    most: int = 256
    """Nodes that it may have."""


class VariantResult(Struct, frozen=True):
    """One variant."""

    variant: dict[str, Any]
    """The values that replace those of the files."""
    outcomes: Outcomes
    slo_broken: tuple[str, ...]
    nodes: int | None = None
    """The least number of nodes that keeps the promise; None: it was not asked for, or not even the most do."""


class Simulated(Struct, frozen=True):
    """Everything."""

    seconds: float
    """Virtual ones, of each run."""
    seed: int
    skipped: int
    """Recorded requests that say too little to be sent again, or whose key the configuration does not know."""
    slo: dict[str, float]
    sized: str
    """The pool whose number of nodes was looked for, "" when none was."""
    rows: tuple[VariantResult, ...]

    @property
    def kept(self) -> bool:
        """Whether a variant keeps what is promised."""
        return any(not row.slo_broken for row in self.rows)


def simulate(options: SimulateOptions, env: Mapping[str, str], progress: ShareDone = ignore_progress) -> Simulated | ConfigRejected:
    """Run every variant. Rejected: a file is not sound, or a variant would not be.

    Raises:
        ReplayRefused: a record can't be read.
        SimulationRefused: the options contradict each other, or a node can't be.
    """
    record = recorded(options.record) if options.record else None
    rows, first, last = [], None, None
    variants = list(product(*(values for _, values in options.tries)))
    for number, values in enumerate(variants):
        part = part_of(progress, number, len(variants))
        variant = dict(zip((path for path, _ in options.tries), values, strict=True))
        scene = _make_scene(options, variant, env, record)
        if isinstance(scene, ConfigRejected):
            return scene
        first, last = first or scene, scene
        row = _find_size(options, variant, env, record) if options.size else _run_variant(variant, scene, part)
        if isinstance(row, ConfigRejected):
            return row
        rows.append(row)
    if first is None or last is None:
        raise SimulationRefused("there is no variant to simulate")
    workload = first.workload
    return Simulated(
        seconds=workload.seconds, seed=workload.seed, skipped=last.skipped, slo=workload.slo.promised, sized=options.size, rows=tuple(rows)
    )


class _Scene(Struct, frozen=True):
    """A variant, ready to run."""

    settings: Settings
    workload: Workload
    record: list[ReplayedRequest] | None
    speed: float

    @property
    def skipped(self) -> int:
        """Recorded requests that can't be sent again."""
        return 0 if self.record is None else len(self.record) - sum(1 for _ in _repeat_traffic(self.record, self.settings, self.speed))

    def run_scene(self, progress: ShareDone = ignore_progress) -> Outcomes:
        """Once."""
        workload, plan = self.workload, self.make_plan()
        hour = plan.start_ms / 1000 / _HOUR_S % 24
        if self.record is None:
            arrivals = generate_traffic(workload.sources, workload.seconds, hour, self._make_random)
        else:
            arrivals = _repeat_traffic(self.record, self.settings, self.speed)
        stats = SimulationStats(plan.pools, workload.seconds, workload.warm_up_s)
        network = SimulatedNetwork(
            plan=plan,
            arrivals=arrivals,
            failures=workload.failures,
            seconds=workload.seconds,
            stats=stats,
            chance=self._make_random("failures"),
        )
        collects = gc.isenabled()
        gc.disable()  # nothing here goes in circles; looking for circles takes a fifth of the time
        try:
            network.run(progress)
        finally:
            if collects:
                gc.enable()
        return stats.compute_outcomes()

    def make_plan(self) -> SimulationPlan:
        """The network."""
        settings, workload, health = self.settings, self.workload, self.settings.health
        pools, kinds = _make_nodes(settings, workload)
        policies: dict[str, list[Any]] = {}
        for pool in pools:
            for node in pool.nodes:
                policies.setdefault(node.id, []).append(health.node_policy(pool.traffic))
        registry, start_ms = settings.gateway.registry, int((_DAY.timestamp() + workload.start_hour * _HOUR_S) * 1000)
        return SimulationPlan(
            view=make_view(settings, {}),
            pools=pools,
            kinds=kinds,
            node_policies={node_id: select_strictest(found) for node_id, found in policies.items()},
            pool_policies={pool.name: health.pool_policy(pool) for pool in pools},
            longest_open_s=health.longest_open_s,
            breaker=health.breaker,
            probes=None if health.probe is None else ProbePlan(health.probe.every_s, health.probe.timeout_s),
            half_lives_s=half_lives_s(settings),
            shared=settings.has_several_tenants,
            retried=settings.envoy.retry.statuses,
            retries=settings.envoy.retry.attempts,
            moves=settings.in_flight,
            replicas=workload.gateways,
            beat_s=settings.gateway.scrape_s if registry is None else registry.heartbeat_s,
            overhead_s=workload.overhead_s,
            start_ms=start_ms if not self.record else self.record[0].began_ms,
        )

    def _make_random(self, name: str) -> Random:
        return Random(f"{self.workload.seed} {name}")  # noqa: S311 - not for secrets


def _make_scene(
    options: SimulateOptions,
    variant: Mapping[str, Any],
    env: Mapping[str, str],
    record: list[ReplayedRequest] | None,
    nodes: int | None = None,
) -> _Scene | ConfigRejected:
    """One variant; `nodes`: of the pool whose size is looked for."""
    changes = {path: value for path, value in variant.items() if not path.startswith(_WORKLOAD)}
    settings = load(options.config, env, None, changes)
    if isinstance(settings, ConfigRejected):
        return settings
    given = dict(options.given) | {path.removeprefix(_WORKLOAD): value for path, value in variant.items() if path not in changes}
    if nodes is not None:
        given[f"nodes.{options.size}.count"] = nodes
    recorded_s = None if record is None else _measure_record_s(record, options.speed)
    workload = load_workload(options.workload, env, given, settings, recorded_s=recorded_s)
    if isinstance(workload, ConfigRejected):
        return workload
    return _Scene(settings, workload, record, options.speed)


def _run_variant(variant: dict[str, Any], scene: _Scene, progress: ShareDone = ignore_progress) -> VariantResult:
    outcomes = scene.run_scene(progress)
    return VariantResult(variant, outcomes, scene.workload.slo.broken(outcomes))


def _find_size(
    options: SimulateOptions, variant: dict[str, Any], env: Mapping[str, str], record: list[ReplayedRequest] | None
) -> VariantResult | ConfigRejected:
    """The variant with the fewest nodes that keep the promise."""
    runs: dict[int, VariantResult] = {}

    def keeps(nodes: int) -> bool:
        scene = _make_scene(options, variant, env, record, nodes)
        if isinstance(scene, ConfigRejected):
            raise _Unsound(scene)
        if not scene.workload.slo.promised:
            raise SimulationRefused(
                "--size looks for the fewest nodes that keep a promise: give one under `slo` in the workload file, or --slo"
            )
        runs[nodes] = _run_variant(variant, scene)
        return not runs[nodes].slo_broken

    try:
        found = fewest(keeps, options.most)
    except _Unsound as unsound:
        return unsound.rejected
    return replace(runs[found or options.most], nodes=found)


class _Unsound(Exception):  # noqa: N818 - carries a refusal out of a search
    def __init__(self, rejected: ConfigRejected) -> None:
        super().__init__()
        self.rejected = rejected


def _make_nodes(settings: Settings, workload: Workload) -> tuple[tuple[Pool, ...], dict[str, NodeProfile]]:
    """The pools with the nodes that are simulated, and what kind each node is."""
    pools, kinds = [], {}
    for pool in settings.pools:
        sections = workload.kinds.get(pool.name, ()) or (KindSection(),)
        nodes = []
        ids = node_ids(pool, sections)
        for at, node_id in enumerate(ids):
            section = _find_section(sections, at)
            like = pool.nodes[at % len(pool.nodes)]
            node = replace(
                like,
                id=node_id,
                max_seq_len=section.max_seq_len or like.max_seq_len,
                max_concurrency=section.max_concurrency or like.max_concurrency,
            )
            nodes.append(node)
            kinds[node_id] = NodeProfile(_make_spec(pool, node, section), section.prefixes)
        pools.append(replace(pool, nodes=tuple(nodes)))
    return tuple(pools), kinds


def _find_section(sections: tuple[KindSection, ...], at: int) -> KindSection:
    for section in sections:
        if section.count is None or at < section.count:
            return section
        at -= section.count
    return sections[-1]


def _make_spec(pool: Pool, node: Node, section: KindSection) -> EngineSpec:
    try:
        return EngineSpec(
            max_model_len=node.max_seq_len,
            max_num_seqs=section.max_num_seqs or node.max_concurrency,
            max_num_batched_tokens=section.max_num_batched_tokens,
            prefill_rate=section.prefill_rate,
            decode_rate=section.decode_rate,
            batch_slowdown=section.batch_slowdown,
            kv_tokens=section.kv_tokens or max(_KV_TOKENS, 2 * node.max_seq_len),
        )
    except ValueError as error:
        raise SimulationRefused(f"nodes of pool {pool.name}: {error}") from error


def _measure_record_s(record: list[ReplayedRequest], speed: float) -> float:
    if not record:
        raise SimulationRefused("the record holds no request")
    return (record[-1].began_ms - record[0].began_ms) / 1000 / speed + 1.0


def _repeat_traffic(record: list[ReplayedRequest], settings: Settings, speed: float) -> Iterator[Arrival]:
    """The recorded requests, those that say enough; of what was refused then, the answer is as long as its tenant's usually are."""
    find_owner, get_versions, mean = owner_finder(settings), PoolMembership.from_pools(settings.pools).get_versions, tenant_averages(record)
    for past in record:
        who, intent = find_owner(past), past.intent
        if intent is None or who is None:
            continue
        answered = past.usage.completion_tokens or mean.get(past.tenant, (0, 0, 0))[2] or 1
        prompt = past.usage.total_tokens - past.usage.completion_tokens or intent.prompt_tokens or 1
        head = head_of(past, intent, who, settings.routes, get_versions)
        at = (past.began_ms - record[0].began_ms) / 1000 / speed
        yield Arrival(
            at=at,
            source=intent.model,
            tenant=past.tenant,
            who=who,
            intent=intent,
            head=head,
            prompt_tokens=max(1, prompt),
            output_tokens=answered,
        )
