"""A workload file for `simulate`: node speeds, requests, incidents and service level objectives.

Rule: as with the configuration: everything that is wrong is said at once, with its line; names that nothing declares are errors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from pydantic import BeforeValidator, Field, model_validator

from din_extproc.admit.keys import Authenticated
from din_extproc.domain.node import Pool
from din_extproc.domain.request import Metering, Operation, Priority
from din_extproc.domain.tenant import ApiKey
from din_extproc.route.flaw import did_you_mean
from din_extproc.settings.changes import put_all
from din_extproc.settings.document import Document
from din_extproc.settings.load import read_document
from din_extproc.settings.problems import ConfigRejected, in_order
from din_extproc.settings.section import AsTuple, Name, Positive, Section, Text
from din_extproc.settings.settings import Settings
from din_extproc.settings.shape import validated
from din_extproc.tools.simulate.plan import NodeIncident, PlannedFailure
from din_extproc.tools.simulate.slo import Slo
from din_extproc.tools.simulate.traffic import Lengths, Prefixes, Rhythm, TrafficSource

_Number = Annotated[float, Field(strict=False, gt=0, le=1e9)]
_Seconds = Annotated[float, Field(strict=False, ge=0, le=1e8)]
_Share = Annotated[float, Field(strict=False, ge=0, le=1)]
_Hour = Annotated[float, Field(strict=False, ge=0, lt=24)]
_Count = Annotated[int, Field(ge=1, le=100_000)]
_Chosen = Field(strict=False)
_DEFAULT_SECONDS = 600.0
_WARM_UP = 0.1


def _read_several(value: Any) -> Any:
    """Read one kind as a list of one."""
    return (value,) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def _read_median(value: Any) -> Any:
    """A number alone is the length of all."""
    return {"median": value} if isinstance(value, int) and not isinstance(value, bool) else value


class KindSection(Section):
    """How large and how quick some nodes of a pool are."""

    count: _Count | None = None
    """So many nodes; None: those of the configuration that are left."""
    prefill_rate: _Number = 8000.0
    decode_rate: _Number = 60.0
    batch_slowdown: Annotated[float, Field(strict=False, ge=0, le=10)] = 0.02
    kv_tokens: Positive | None = None
    """None: 131072, or one sequence of the largest length."""
    max_num_seqs: Positive | None = None
    """None: the node's max_concurrency."""
    max_num_batched_tokens: Positive = 2048
    max_seq_len: Positive | None = None
    """None: the node's own."""
    max_concurrency: Positive | None = None
    """None: the node's own."""
    prefixes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Beginnings of prompts that its memory keeps."""


class LengthSection(Section):
    """How long something is, in tokens."""

    median: Positive
    spread: Annotated[float, Field(strict=False, ge=0, le=3)] = 0.0
    least: Positive = 1
    most: Positive = 1_000_000

    @model_validator(mode="after")
    def _check_order(self) -> "LengthSection":
        if not self.least <= self.median <= self.most:
            raise ValueError("the median lies between least and most")
        return self

    def lengths(self) -> Lengths:
        """The same for the simulation."""
        return Lengths(self.median, self.spread, self.most, self.least)


class PrefixSection(Section):
    """Beginnings that prompts share."""

    number: Annotated[int, Field(ge=1, le=100_000)]
    tokens: Annotated[tuple[Positive, Positive], AsTuple]

    @model_validator(mode="after")
    def _check_order(self) -> "PrefixSection":
        if self.tokens[0] > self.tokens[1]:
            raise ValueError("tokens: the least first, then the most")
        return self


class RhythmSection(Section):
    """How a rate changes with time."""

    burst: _Number = 1.0
    burst_every_s: _Number = 60.0
    burst_s: _Seconds = 0.0
    night: Annotated[float, Field(strict=False, ge=0, le=1)] = 1.0
    peak_hour: _Hour = 14.0

    @model_validator(mode="after")
    def _check_possible(self) -> "RhythmSection":
        if self.burst_s >= self.burst_every_s:
            raise ValueError("burst_s is less than burst_every_s")
        if self.burst < 1:
            raise ValueError("burst is at least 1: so many times the rate between bursts")
        return self


Length = Annotated[LengthSection, BeforeValidator(_read_median)]


class RequestSection(Section):
    """Requests of one sort."""

    name: Name | None = None
    rate: _Number
    tenant: Text | None = None
    """None: the first of the configuration."""
    tenants: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """So many, each with the limits of that one."""
    model: Text | None = None
    """None: the first name that the tenant may ask for."""
    operation: Annotated[Operation, _Chosen] = Operation.CHAT
    prompt_tokens: Length
    output_tokens: Length = LengthSection(median=200)
    max_tokens: Positive | None = None
    stream: bool = True
    headers: dict[str, str] = Field(default_factory=dict)
    task_tier: str = ""
    version: str = ""
    priority: Annotated[Priority | None, _Chosen] = None
    prefixes: Name | None = None
    patience_s: _Number | None = None
    rhythm: RhythmSection = RhythmSection()


class FailureSection(Section):
    """Trouble of one node."""

    node: Text
    kind: Annotated[NodeIncident, _Chosen]
    at_s: _Seconds
    for_s: _Number
    factor: Annotated[float, Field(strict=False, ge=1, le=1e6)] = 4.0
    share: _Share = 1.0
    retry_after_s: Annotated[int, Field(ge=1)] = 1


class SloSection(Section):
    """The objectives. Times in seconds."""

    first_token_p99_s: _Number | None = None
    per_token_p99_s: _Number | None = None
    p99_s: _Number | None = None
    errors: _Share | None = None


class WorkloadYaml(Section):
    """The file."""

    seconds: _Number | None = None
    """None: ten minutes, or as long as the record is."""
    warm_up_s: _Seconds | None = None
    """None: a tenth."""
    seed: int = 1
    gateways: Annotated[int, Field(ge=1, le=64)] = 1
    start_hour: _Hour = 9.0
    overhead_ms: Annotated[float, Field(strict=False, ge=0, le=60_000)] = 3.0
    nodes: dict[str, Annotated[tuple[KindSection, ...], BeforeValidator(_read_several)]] = Field(default_factory=dict)
    prefixes: dict[Name, PrefixSection] = Field(default_factory=dict)
    requests: Annotated[tuple[RequestSection, ...], AsTuple] = ()
    failures: Annotated[tuple[FailureSection, ...], AsTuple] = ()
    slo: SloSection = SloSection()


class Workload(Struct, frozen=True, kw_only=True):
    """A workload in use. Times in seconds."""

    seconds: float
    warm_up_s: float
    seed: int
    gateways: int
    start_hour: float
    overhead_s: float
    kinds: Mapping[str, tuple[KindSection, ...]]
    """By pool; of the others, nodes are what is usual."""
    sources: tuple[TrafficSource, ...]
    failures: tuple[PlannedFailure, ...]
    slo: Slo


def load_workload(
    path: Path | None, env: Mapping[str, str], given: Mapping[str, Any], settings: Settings, *, recorded_s: float | None = None
) -> Workload | ConfigRejected:
    """Read a workload.

    Args:
        path: The file; None: there is none, and what is given is all.
        env: What `${NAME}` inside it stands for.
        given: Values by path, which stand before those of the file.
        settings: The configuration whose pools, tenants and models it names.
        recorded_s: How long the record is that requests are taken from; None: they are those of the workload.
    """
    document = Document("the command line")
    document.data = {}
    if path is not None:
        opened = read_document(path, env)
        if isinstance(opened, ConfigRejected):
            return opened
        _, document = opened
    put_all(document, given)
    config = validated(WorkloadYaml, document)
    if config is None or document.problems:
        return ConfigRejected(in_order(document.problems))
    if recorded_s is None and not config.requests:
        document.report(("requests",), "no requests", "describe some here, or give --rate and --prompt, or --record FOLDER")
    sources = tuple(_make_sources(config, settings, document)) if recorded_s is None else ()
    _check_names(config, settings, document)
    seconds = config.seconds or recorded_s or _DEFAULT_SECONDS
    warm_up_s = seconds * _WARM_UP if config.warm_up_s is None else config.warm_up_s
    if warm_up_s >= seconds:
        document.report(("warm_up_s",), f"the warm-up is as long as the whole run ({seconds:g} s)")
    if document.problems:
        return ConfigRejected(in_order(document.problems))
    return Workload(
        seconds=seconds,
        warm_up_s=warm_up_s,
        seed=config.seed,
        gateways=config.gateways,
        start_hour=config.start_hour,
        overhead_s=config.overhead_ms / 1000,
        kinds=config.nodes,
        sources=sources,
        failures=tuple(
            PlannedFailure(
                node=each.node,
                kind=each.kind,
                at_s=each.at_s,
                for_s=each.for_s,
                factor=each.factor,
                share=each.share,
                retry_after_s=each.retry_after_s,
            )
            for each in config.failures
        ),
        slo=Slo(**config.slo.model_dump()),
    )


def _make_sources(config: WorkloadYaml, settings: Settings, document: Document) -> Iterable[TrafficSource]:
    owners = {tenant.id: Authenticated(tenant, keys[0] if keys else ApiKey("", b"", b"")) for tenant, keys in settings.keys}
    names = [section.name or f"requests[{index}]" for index, section in enumerate(config.requests)]
    for index, (name, section) in enumerate(zip(names, config.requests, strict=True)):
        place = ("requests", index)
        if names.index(name) != index:
            document.report((*place, "name"), f"{name!r} is there twice")
        who = owners.get(section.tenant or next(iter(owners), ""))
        if who is None:
            document.report(
                (*place, "tenant"), f"the configuration has no tenant {section.tenant!r}", _suggest_names(section.tenant or "", owners)
            )
            continue
        offered = [listed.name for listed in settings.routes.models_for(who.tenant)]
        model = section.model or next(iter(offered), "")
        if not settings.routes.rules_for(model):
            document.report((*place, "model"), f"{model!r} is neither an alias nor a model", _suggest_names(model, offered))
        shared = config.prefixes.get(section.prefixes or "")
        if section.prefixes is not None and shared is None:
            document.report(
                (*place, "prefixes"), f"no prefixes are called {section.prefixes!r}", _suggest_names(section.prefixes, config.prefixes)
            )
        yield TrafficSource(
            name=name,
            rate=section.rate,
            who=who,
            tenants=section.tenants,
            model=model,
            operation=section.operation,
            prompt=section.prompt_tokens.lengths(),
            output=Lengths(0, least=0) if _is_pooled(section.operation) else section.output_tokens.lengths(),
            max_tokens=section.max_tokens,
            stream=section.stream,
            headers={header.lower(): value for header, value in section.headers.items()},
            task_tier=section.task_tier,
            version=section.version,
            priority=section.priority,
            prefixes=None if shared is None else Prefixes(section.prefixes or "", shared.number, *shared.tokens),
            client_timeout_s=section.patience_s,
            rhythm=Rhythm(**section.rhythm.model_dump()),
        )


def _check_names(config: WorkloadYaml, settings: Settings, document: Document) -> None:
    """Pools and nodes that there are."""
    pools = {pool.name: pool for pool in settings.pools}
    for name, kinds in config.nodes.items():
        pool = pools.get(name)
        if pool is None:
            document.report(("nodes", name), f"the configuration has no pool {name!r}", _suggest_names(name, pools), at_key=True)
        elif not pool.nodes:
            document.report(("nodes", name), f"pool {name!r} lists no node to be like", at_key=True)
        elif any(kind.count is None for kind in kinds[:-1]):
            document.report(("nodes", name), "only the last kind can do without a count")
    nodes = [node_id for pool in settings.pools for node_id in node_ids(pool, config.nodes.get(pool.name, ()))]
    for index, failure in enumerate(config.failures):
        if failure.node not in nodes:
            document.report(("failures", index, "node"), f"there is no node {failure.node!r}", _suggest_names(failure.node, nodes))


def node_ids(pool: Pool, kinds: tuple[KindSection, ...]) -> list[str]:
    """The ids of the nodes that are simulated: those of the configuration, then `ID~2`, `ID~3`... of its nodes in turn."""
    counts = [kind.count for kind in kinds]
    total = len(pool.nodes) if not counts or counts[-1] is None else 0
    total = max(total, sum(count or 0 for count in counts))
    listed = [node.id for node in pool.nodes]
    return [listed[at] if at < len(listed) else f"{listed[at % len(listed)]}~{at // len(listed) + 1}" for at in range(total)]


def _is_pooled(operation: Operation) -> bool:
    return operation.spec.metering is not Metering.TOKENS


def _suggest_names(name: str, known: Iterable[str]) -> str:
    listed = list(known)
    return did_you_mean(name, listed) or (f"there are: {', '.join(listed[:10])}" if listed else "")
