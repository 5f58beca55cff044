"""Judges a running gateway by what its parts report. Pure: the caller fetches the reports.

Rule: a finding that is not `ok` says what to change.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field

from din_extproc.control.supported import NEWEST_TESTED, OLDEST, describe_unsupported, parse_minor
from din_extproc.control.topology import EXT_PROC_CLUSTER, UnixSocket
from din_extproc.domain.health import NO_CREDIT_REASON
from din_extproc.domain.node import in_flight_cluster
from din_extproc.settings.settings import Settings

OLDEST_REDIS = (6, 2)
_SKEW_S = 1.0
_FAR_S = 5.0
_EDIT_ROOM = 1 << 16
_FEWEST_FILES = 4096
_MANY_FAILED = 20
"""Failed ext_proc streams; fewer may be the requests that a gateway received while its sidecar started."""
_ON_FULL = {
    "drop_with_alarm": ": requests are served without a record",
    "block": ": requests wait, then get 503",
    "refuse": ": every request gets 503",
}
"""The effect of `audit.on_full` on clients."""


class Diagnosis(Struct, frozen=True):
    """One checked property."""

    what: str
    verdict: Literal["ok", "warn", "fail"]
    finding: str = field(name="said")
    change: str = ""
    """The remedy; "" when the verdict is `ok`."""


def of_redis(info: Mapping[str, str], took_ms: float, skew_s: float, settings: Settings) -> Iterator[Diagnosis]:
    """Judge Redis by its INFO, its response time, and how far its clock is ahead of ours."""
    version = info.get("redis_version", "")
    if _numbers(version) < OLDEST_REDIS:
        yield Diagnosis("redis version", "fail", version, "the scripts need Redis 6.2 or Valkey")
    else:
        yield Diagnosis("redis version", "ok", version)
    limit = settings.store.timeout_ms
    if took_ms > limit / 2:
        change = f"move Redis closer, or raise store.timeout_ms ({limit}); beyond it `on_error: {settings.store.on_error}` applies"
        yield Diagnosis("redis latency", "warn" if took_ms < limit else "fail", f"{took_ms:.1f} ms", change)
    else:
        yield Diagnosis("redis latency", "ok", f"{took_ms:.1f} ms of {limit}")
    if abs(skew_s) > _SKEW_S:
        change = "synchronise the clocks: key expiry and heartbeats use this machine's clock, limits use Redis'"
        yield Diagnosis("clock", "fail" if abs(skew_s) > _FAR_S else "warn", f"Redis is {skew_s:+.1f} s from this machine", change)
    else:
        yield Diagnosis("clock", "ok", f"Redis is {skew_s:+.3f} s from this machine")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", "0") != "0":
        yield Diagnosis("redis memory", "fail", f"maxmemory-policy {policy}", "set noeviction: an evicted key resets a limit")
    if settings.budgets is not None and info.get("aof_enabled", "0") != "1":
        change = (
            "set appendonly yes: a restart of Redis loses what budgets have counted since the last snapshot, and tenants can spend it again"
        )
        yield Diagnosis("redis persistence", "warn", "no append-only file, and budgets are configured", change)


def of_envoy(info: Mapping[str, Any], dump: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """Judge Envoy by its server info and configuration dump."""
    version = str(info.get("version", "")).split("/")[1:2]
    running = version[0] if version else "?"
    refused = describe_unsupported(running)
    if refused is not None:
        yield Diagnosis("envoy version", "fail", running, refused)
    elif (parse_minor(running) or OLDEST) > NEWEST_TESTED:
        yield Diagnosis("envoy version", "warn", running, "newer than the newest tested version (1.40): watch ext_proc's counters")
    else:
        yield Diagnosis("envoy version", "ok", running)
    if info.get("state") != "LIVE":
        yield Diagnosis(
            "envoy state", "fail", str(info.get("state")), "Envoy is starting or draining and takes no new requests: wait, or restart it"
        )
    yield from _as_rendered(dump, settings)


def _as_rendered(dump: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """Judge whether Envoy runs with the settings of din.yaml."""
    again = "render envoy.yaml again and reload Envoy"
    held = _first(dump, "per_connection_buffer_limit_bytes")
    wanted = settings.body_limit + _EDIT_ROOM
    yield _same("buffer limit", held, wanted, "bytes", again if isinstance(held, int) else f"{again}: Envoy's own default is 1 MiB")
    yield _same("message timeout", _seconds(_first(dump, "message_timeout")), settings.envoy.timeouts.message_ms / 1000, "s", again)
    yield _same(
        "stream idle timeout", _seconds(_first(dump, "stream_idle_timeout")), settings.envoy.timeouts.stream_idle_ms / 1000, "s", again
    )
    yield from _sockets(dump, settings, again)
    known = {cluster.get("name") for cluster in _all(dump, "cluster") if isinstance(cluster, Mapping)}
    wanted_clusters = [*(pool.name for pool in settings.pools), *(in_flight_cluster(*pair) for pair in settings.may_move_in_flight)]
    missing = [name for name in wanted_clusters if name not in known]
    if missing:
        yield Diagnosis("pools", "fail", f"Envoy has no {', '.join(missing)}", again)
    else:
        yield Diagnosis("pools", "ok", f"{len(settings.pools)} known to Envoy")


def _sockets(dump: Mapping[str, Any], settings: Settings, again: str) -> Iterator[Diagnosis]:
    """Judge whether Envoy's ext_proc cluster has the sidecar's addresses. A foreign Envoy has no cluster of this name."""
    ours = next((each for each in _all(dump, "cluster") if isinstance(each, Mapping) and each.get("name") == EXT_PROC_CLUSTER), None)
    if ours is None:
        return
    addresses = [each for each in _all(ours, "address") if isinstance(each, Mapping)]
    connects = sorted(
        each["pipe"]["path"] if "pipe" in each else f"{each['socket_address']['address']}:{each['socket_address']['port_value']}"
        for each in addresses
    )
    listens = sorted(each.path if isinstance(each, UnixSocket) else f"{each.host}:{each.port}" for each in settings.worker_addresses)
    if connects == listens:
        yield Diagnosis("workers' addresses", "ok", f"{len(listens)} as rendered")
    else:
        yield Diagnosis(
            "workers' addresses", "fail", f"Envoy connects to {', '.join(connects)}; the sidecar listens on {', '.join(listens)}", again
        )


def _same(what: str, has: float | None, wanted: float, unit: str, change: str) -> Diagnosis:
    if has == wanted:
        return Diagnosis(what, "ok", f"{wanted:g} {unit}")
    return Diagnosis(what, "fail", f"Envoy has {'none' if has is None else f'{has:g} {unit}'}, din.yaml says {wanted:g}", change)


def of_endpoints(unknown: Sequence[str]) -> Diagnosis:
    """From the listed nodes that Envoy does not have."""
    if unknown:
        return Diagnosis(
            "nodes in Envoy", "fail", f"Envoy does not know {'; '.join(unknown[:5])}", "render envoy.yaml again and reload Envoy"
        )
    return Diagnosis("nodes in Envoy", "ok", "it knows all that din.yaml lists")


def of_exchanges(stats: Mapping[str, int]) -> Iterator[Diagnosis]:
    """Judge ext_proc by Envoy's counters."""
    counted: Counter[str] = Counter()  # over the listener's filter and those of attempts
    for name, value in stats.items():
        if ".ext_proc." in name:
            counted[name.rpartition(".")[2]] += value
    started = counted["streams_started"]
    for name, change in (
        ("message_timeouts", "the sidecar answered too late: check its CPU and Redis, or raise envoy.timeouts.message_ms"),
        ("rejected_header_mutations", "Envoy rejects the sidecar's headers: render envoy.yaml with the version of the running sidecar"),
        ("clear_route_cache_ignored", "requests ignore the routing decision: render envoy.yaml again"),
        ("spurious_msgs_received", "Envoy and envoy.yaml expect other messages: render envoy.yaml with the version of the running sidecar"),
    ):
        if counted[name]:
            yield Diagnosis(f"ext_proc {name}", "fail", f"{counted[name]} in {started} exchanges", change)
    workers = stats.get(f"cluster.{EXT_PROC_CLUSTER}.membership_healthy", 0)
    if not workers:
        change = "start the sidecar; if it runs, render envoy.yaml again (addresses) and check that Envoy's user may open its socket"
        yield Diagnosis("workers", "fail", "Envoy reaches no worker", change)
    failed = counted["streams_failed"]  # Envoy's count includes streams that it could not open
    if failed:
        change = "requests came while a worker was starting or had been killed; if more than a few per cent fail, see the sidecar's log"
        if failed >= started:
            change = "render envoy.yaml again if workers have moved; if they were down, see the sidecar's log"
        has_worked = counted["stream_msgs_received"] > 0
        is_failing = failed * 20 > started + failed and (failed >= _MANY_FAILED or not has_worked)
        verdict: Literal["warn", "fail"] = "fail" if is_failing else "warn"
        yield Diagnosis("ext_proc streams", verdict, f"{failed} failed, {started} began", change)
    else:
        yield Diagnosis("ext_proc streams", "ok", f"{started}, none failed")
    dropped = sum(value for name, value in stats.items() if name.endswith("logs_dropped"))
    if dropped:
        yield Diagnosis("access log", "fail", f"{dropped} entries lost", "their requests are not settled: give the sidecar more CPU")


def of_sidecar(status: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """Judge the sidecar by its `/status`."""
    configuration = status["configuration"]
    if configuration["rejected_successor"]:
        yield Diagnosis("configuration", "fail", "the current file is rejected and not in use", configuration["rejected_successor"])
    elif configuration["fingerprint"] != settings.fingerprint:
        yield Diagnosis(
            "configuration",
            "warn",
            "the sidecar uses another configuration",
            "a change is applied within a second: check that the sidecar reads this file",
        )
    else:
        yield Diagnosis("configuration", "ok", f"{settings.fingerprint} is in use")
    if not status["limits"]["shared"]:
        yield Diagnosis("limits", "fail", status["limits"]["reason"], "restore Redis: until then `store.on_error` applies")
    if "audit" in status:
        yield _of_audit(status["audit"], settings)
    unsettled = status["exchanges"]["unsettled"] + status["exchanges"]["given_up"]
    if unsettled:
        yield Diagnosis(
            "settlement",
            "warn",
            f"{unsettled} exchanges are not settled",
            "Redis was down or slow: they are retried; those given up stay reserved until they expire",
        )
    for pool, source in status.get("discovery", {}).items():
        refused = [f"{address} is refused: {reason}" for address, reason in source["refused"].items()]
        if source["problem"]:
            yield Diagnosis(f"discovery of {pool}", "fail" if not source["nodes"] else "warn", source["problem"], source["remedy"])
        elif refused:
            yield Diagnosis(f"discovery of {pool}", "warn", "; ".join(refused), f"correct what {source['source']} says, or the pool")
        else:
            yield Diagnosis(f"discovery of {pool}", "ok", f"{source['nodes']} nodes at {source['source']}")
    yield from _of_nodes(status)


def _of_nodes(status: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """From the state of nodes and breakers: what takes requests now."""
    members = status["membership"]["nodes"]
    silent = [f"{member['node']['id']} is {member['state']}" for member in members if member["state"] != "ready"]
    ejected = [
        f"the breaker of {member['node']['id']} is {member['health']['state']}"
        for member in members
        if member["state"] == "ready" and (member.get("health") or {"state": "closed"})["state"] != "closed"
    ]
    if silent or ejected:
        yield Diagnosis("nodes", "warn", ", ".join([*silent, *ejected][:5]), "`din-extproc nodes` says why")
    else:
        yield Diagnosis("nodes", "ok", f"{len(members)} ready")
    poor = [member["node"]["id"] for member in members if (member.get("health") or {}).get("reason") == NO_CREDIT_REASON]
    if poor:
        yield Diagnosis("accounts", "fail", f"no credit: {', '.join(poor[:5])}", "add credit at the provider, or remove the node")
    models = status["membership"]["models"]
    for model in models:
        if model["state"] != "available":
            summary = f"{model['available']} of {model['nodes']} nodes take requests, {model['share']:.0%} of the capacity"
            verdict: Literal["warn", "fail"] = "fail" if model["state"] == "unavailable" else "warn"
            why = "; ".join(f"{each['node_id']}: {each['reason']}" for each in model["unavailable"][:3]) or "no node has joined its pools"
            yield Diagnosis(f"model {model['model']}", verdict, summary, why)
    if all(model["state"] == "available" for model in models):
        yield Diagnosis("models", "ok", f"{len(models)} available")


def _of_audit(log: Mapping[str, Any], settings: Settings) -> Diagnosis:
    if log["failing"]:
        policy = "" if settings.audit is None else _ON_FULL[settings.audit.section.on_full]
        return Diagnosis(
            "audit log",
            "fail",
            f"{log['failing']}{policy}",
            "free disk space, or let the sidecar's user write the folder: the log continues by itself",
        )
    if log["dropped"]:
        return Diagnosis(
            "audit log", "warn", f"{log['dropped']} events lost since the start", "the sidecar's log says when; monitor free disk space"
        )
    return Diagnosis("audit log", "ok", f"{log['records']} records")


def of_machine(open_files: int | None) -> Iterator[Diagnosis]:
    """Judge the limit of open files, which the sidecar shares if the same user starts it. None: no limit."""
    if open_files is None:
        yield Diagnosis("open files", "ok", "no limit")
    elif open_files < _FEWEST_FILES:
        yield Diagnosis("open files", "warn", str(open_files), "raise the limit (LimitNOFILE): each client and node takes one or two")
    else:
        yield Diagnosis("open files", "ok", str(open_files))


def of_timeouts(settings: Settings) -> Iterator[Diagnosis]:
    """Judge the order of timeouts in `din.yaml`."""
    redis, message = settings.store.timeout_ms, settings.envoy.timeouts.message_ms
    if redis * 2 > message:
        change = "raise envoy.timeouts.message_ms to twice store.timeout_ms: the sidecar must answer before Envoy gives up"
        yield Diagnosis("timeouts", "fail", f"Redis {redis} ms, Envoy {message} ms", change)
    else:
        yield Diagnosis("timeouts", "ok", f"Redis {redis} ms, Envoy {message} ms")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _seconds(duration: object) -> float | None:
    return float(duration[:-1]) if isinstance(duration, str) and duration.endswith("s") else None


def _first(value: object, name: str) -> Any:
    return next(iter(_all(value, name)), None)


def _all(value: object, name: str) -> Iterable[Any]:
    """Yield all values under this name, at any depth."""
    if isinstance(value, Mapping):
        if name in value:
            yield value[name]
        for inner in value.values():
            yield from _all(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _all(inner, name)
