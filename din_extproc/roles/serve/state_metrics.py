"""The state of the sidecar as metrics: the counters of the request planes, and the values of `/status` and `/nodes`.

Rule: nothing is measured here; the admin port shows the same values.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from din_extproc.domain.health import BreakerState
from din_extproc.domain.membership import Heartbeat, NodeState
from din_extproc.edge.registry.forms import HealthForm, MemberForm
from din_extproc.observe import instruments as of
from din_extproc.observe.families import Distribution, Family, make_family, make_labelled_family

_ROWS = 16
"""Nodes per slice: a tenth of a millisecond."""
_MONOTONIC = ("counts", "route_cache")
"""Parts of a worker's report that only grow: they are kept after the worker has ended."""


def lasting_counters(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of a report that outlive its worker; a falling counter would read as a restart."""
    return {name: report[name] for name in _MONOTONIC if name in report}


def sum_numbers(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Add nested numbers of several processes."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                total[name] = sum_numbers(total.get(name, {}), value)
            elif isinstance(value, list):
                before = total.get(name, [0] * len(value))
                total[name] = [one + other for one, other in zip(before, value, strict=True)]
            else:
                total[name] = total.get(name, 0) + value
    return total


def request_families(numbers: Mapping[str, Any]) -> Iterator[Family]:
    """Yield the metrics of decisions, from the sum over all processes."""
    counts, cache = numbers["counts"], numbers.get("route_cache", {})
    refused: Mapping[str, int] = counts["refused"]
    yield Family(of.DECISION, (((), _make_decision_families(counts)),))
    yield make_labelled_family(of.DECISIONS, (("sent", counts["sent"]), ("refused", sum(refused.values()))))
    yield make_labelled_family(of.REFUSALS, refused.items())
    yield Family(
        of.SENSITIVE, [((policy, kind), number) for policy, kinds in counts["sensitive"].items() for kind, number in kinds.items()]
    )
    yield make_labelled_family(of.WOULD_REFUSE, counts.get("would_refuse", {}).items())
    yield make_family(of.WAITING, numbers.get("queue", {}).get("waiting", 0))
    yield make_family(of.FAULTS, counts["faults"])
    yield make_family(of.CACHE_HITS, cache.get("hits", 0))
    yield make_family(of.CACHE_MISSES, cache.get("misses", 0))
    yield make_labelled_family(of.NODE_TAKEN, ((node, load["tokens_in_use"]) for node, load in numbers.get("nodes", {}).items()))


def state_families(status: Mapping[str, Any], *, ready: bool) -> Iterator[Family]:
    """Yield the metrics of the sidecar's own state, from `/status`."""
    exchanges = status["exchanges"]
    yield make_family(of.READY, float(ready))
    yield make_family(of.OPEN, exchanges.get("open", 0))
    yield make_family(of.UNSETTLED, exchanges["unsettled"])
    yield make_family(of.GIVEN_UP, exchanges["given_up"])
    yield make_family(of.UNKNOWN, exchanges["unknown"])
    yield make_family(of.LOGS_UNREADABLE, status["access_logs"]["unreadable"])
    yield make_family(of.LOGS_DROPPED, status["access_logs"]["dropped"])
    yield make_labelled_family(of.MIXED_DTYPE, status["mixed_dtype_share"].items())
    yield make_labelled_family(of.MIXED_CAPABILITY, status["mixed_capability_share"].items())
    yield make_family(of.REDIS_UP, float(status["redis"].up))
    yield make_family(of.LIMITS_SHARED, float(status["limits"].shared))
    yield make_family(of.REPLICAS, status["limits"].replicas)
    yield make_family(of.CONFIG_SOUND, float(not status["configuration"]["rejected_successor"]))
    workers = status.get("workers", {"configured": 1, "restarts": 0})
    yield make_family(of.WORKERS, workers["configured"])
    yield make_family(of.WORKER_RESTARTS, workers["restarts"])
    pools = status.get("breakers", {}).get("pools", {})
    yield make_labelled_family(of.POOL_SHARE, ((name, form.share) for name, form in pools.items()))
    sources = status.get("discovery", {})
    yield make_labelled_family(of.DISCOVERY_FAILING, ((pool, float(bool(source.problem))) for pool, source in sources.items()))
    yield make_labelled_family(of.DISCOVERY_REFUSED, ((pool, len(source.refused)) for pool, source in sources.items()))
    xds = status.get("xds", {"envoys": (), "served": ()})
    refused = Counter(name for envoy in xds["envoys"] for name, each in envoy.types.items() if each.refusal)
    yield make_family(of.XDS_ENVOYS, len(xds["envoys"]))
    yield make_labelled_family(of.XDS_REFUSED, ((name, refused[name]) for name in xds["served"]))


def node_families(rows: Iterable[MemberForm], *, stale: bool) -> Iterator[Family | None]:
    """Yield the metrics of nodes; None lets other tasks run. `rows` is consumed lazily."""
    trusted: list[tuple[str, float]] = []
    silent: list[tuple[str, float]] = []
    forms: list[tuple[str, HealthForm]] = []
    beats: list[tuple[str, Heartbeat]] = []
    states: Counter[NodeState] = Counter()
    breakers: Counter[BreakerState] = Counter()
    for at, row in enumerate(rows):
        name = row.node.id
        states[row.state] += 1
        trusted.append((name, row.trust))
        if row.beat_age_s is not None:
            silent.append((name, row.beat_age_s))
        if row.health is not None:
            forms.append((name, row.health))
            breakers[row.health.state] += 1
        if row.beat is not None:
            beats.append((name, row.beat))
        if at % _ROWS == 0:
            yield None
    yield make_family(of.TABLE_STALE, float(stale))
    yield make_labelled_family(of.NODES, ((state.value, states[state]) for state in NodeState))
    yield make_labelled_family(of.NODE_TRUST, trusted)
    yield make_labelled_family(of.NODE_SILENCE, silent)
    yield make_labelled_family(of.BREAKERS, ((state.value, breakers[state]) for state in BreakerState))
    yield make_labelled_family(of.NODE_SHARE, ((node, form.share) for node, form in forms))
    yield make_labelled_family(of.NODE_NO_CREDIT, ((node, 1.0) for node, form in forms if form.has_no_credit))
    yield make_labelled_family(of.NODE_PROBE, ((node, None if form.ttft_ms is None else form.ttft_ms / 1000) for node, form in forms))
    yield make_labelled_family(of.NODE_WAITING, ((node, beat.waiting) for node, beat in beats))
    yield make_labelled_family(of.NODE_RUNNING, ((node, beat.running) for node, beat in beats))
    yield make_labelled_family(of.NODE_KV, ((node, beat.kv_cache_usage) for node, beat in beats))


def audit_families(status: Mapping[str, Any]) -> Iterator[Family]:
    """Yield the metrics of the audit log."""
    yield make_family(of.AUDIT_RECORDS, status["written"])
    yield make_family(of.AUDIT_WAITING, status["waiting"])
    yield make_family(of.AUDIT_DROPPED, status["dropped"])
    yield make_family(of.AUDIT_FAILING, float(bool(status["failing"])))


def _make_decision_families(counts: Mapping[str, Any]) -> Distribution:
    by_us: Mapping[Any, int] = counts["decisions_by_us"]
    return Distribution([by_us.get(bound, 0) for bound in (*of.DECISION_US, "more")], counts["decision_s"])
