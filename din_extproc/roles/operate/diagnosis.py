"""What is wrong with a running gateway, judged from what its parts say of themselves. Pure: whoever asks them hands over the answers.

Rule: a finding that is not fine says what to change.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from din_extproc.control.supported import NEWEST_TESTED, OLDEST, minor, unsupported
from din_extproc.control.topology import EXT_PROC_CLUSTER, UnixSocket
from din_extproc.domain.node import in_flight_cluster
from din_extproc.settings.settings import Settings

OLDEST_REDIS = (6, 2)
_SKEW_S = 1.0
_FAR_S = 5.0
_EDIT_ROOM = 1 << 16
_FEWEST_FILES = 4096
_ON_FULL = {
    "drop_with_alarm": ": requests go on, unrecorded",
    "block": ": requests wait, and are refused with 503",
    "refuse": ": every request is refused with 503",
}
"""What `audit.on_full` means for clients."""


class Diagnosis(Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    verdict: Literal["fine", "doubtful", "wrong"]
    said: str
    change: str = ""
    """What to do about it; "" when it is fine."""


def of_redis(info: Mapping[str, str], took_ms: float, skew_s: float, settings: Settings) -> Iterator[Diagnosis]:
    """From the server's own INFO, how long it took to answer, and how far its clock is ahead of ours."""
    version = info.get("redis_version", "")
    if _numbers(version) < OLDEST_REDIS:
        yield Diagnosis("redis version", "wrong", version, "the scripts need Redis 6.2 or Valkey")
    else:
        yield Diagnosis("redis version", "fine", version)
    limit = settings.store.timeout_ms
    if took_ms > limit / 2:
        change = f"bring it nearer, or raise store.timeout_ms ({limit}); beyond it limits follow `on_error: {settings.store.on_error}`"
        yield Diagnosis("redis latency", "doubtful" if took_ms < limit else "wrong", f"{took_ms:.1f} ms", change)
    else:
        yield Diagnosis("redis latency", "fine", f"{took_ms:.1f} ms of {limit}")
    if abs(skew_s) > _SKEW_S:
        change = "synchronise the clocks: keys expire and heartbeats are told by ours, limits by Redis'"
        yield Diagnosis("clock", "wrong" if abs(skew_s) > _FAR_S else "doubtful", f"Redis is {skew_s:+.1f} s from this machine", change)
    else:
        yield Diagnosis("clock", "fine", f"Redis is {skew_s:+.3f} s from this machine")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", "0") != "0":
        yield Diagnosis("redis memory", "wrong", f"maxmemory-policy {policy}", "set noeviction: an evicted key is a limit forgotten")


def of_envoy(info: Mapping[str, Any], dump: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """From what Envoy says of itself and of its configuration."""
    version = str(info.get("version", "")).split("/")[1:2]
    told = version[0] if version else "?"
    refused = unsupported(told)
    if refused is not None:
        yield Diagnosis("envoy version", "wrong", told, refused)
    elif (minor(told) or OLDEST) > NEWEST_TESTED:
        yield Diagnosis("envoy version", "doubtful", told, "newer than what was tested (1.40): watch ext_proc's counters")
    else:
        yield Diagnosis("envoy version", "fine", told)
    if info.get("state") != "LIVE":
        yield Diagnosis("envoy state", "wrong", str(info.get("state")), "it is starting or draining: it takes no new requests")
    yield from _as_rendered(dump, settings)


def _as_rendered(dump: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """Whether it runs with what din.yaml says now."""
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
    wanted_clusters = [*(pool.name for pool in settings.pools), *(in_flight_cluster(*pair) for pair in settings.moves)]
    missing = [name for name in wanted_clusters if name not in known]
    if missing:
        yield Diagnosis("pools", "wrong", f"Envoy has no {', '.join(missing)}", again)
    else:
        yield Diagnosis("pools", "fine", f"{len(settings.pools)} known to Envoy")


def _sockets(dump: Mapping[str, Any], settings: Settings, again: str) -> Iterator[Diagnosis]:
    """Whether it asks where the sidecar listens. An Envoy that others have configured has no cluster of this name."""
    ours = next((each for each in _all(dump, "cluster") if isinstance(each, Mapping) and each.get("name") == EXT_PROC_CLUSTER), None)
    if ours is None:
        return
    addresses = [each for each in _all(ours, "address") if isinstance(each, Mapping)]
    asks = sorted(
        each["pipe"]["path"] if "pipe" in each else f"{each['socket_address']['address']}:{each['socket_address']['port_value']}"
        for each in addresses
    )
    listens = sorted(each.path if isinstance(each, UnixSocket) else f"{each.host}:{each.port}" for each in settings.worker_addresses)
    if asks == listens:
        yield Diagnosis("workers' addresses", "fine", f"{len(listens)} as rendered")
    else:
        yield Diagnosis("workers' addresses", "wrong", f"Envoy asks {', '.join(asks)}; the sidecar is at {', '.join(listens)}", again)


def _same(what: str, has: float | None, wanted: float, unit: str, change: str) -> Diagnosis:
    if has == wanted:
        return Diagnosis(what, "fine", f"{wanted:g} {unit}")
    return Diagnosis(what, "wrong", f"Envoy has {'none' if has is None else f'{has:g} {unit}'}, din.yaml says {wanted:g}", change)


def of_exchanges(stats: Mapping[str, int]) -> Iterator[Diagnosis]:
    """From Envoy's own counts of how the sidecar answered."""
    counted = {name.rpartition(".")[2]: value for name, value in stats.items() if ".ext_proc." in name}
    asked = counted.get("streams_started", 0)
    for name, change in (
        ("message_timeouts", "the sidecar answered too late: look at its CPU and at Redis, or raise envoy.timeouts.message_ms"),
        ("rejected_header_mutations", "Envoy refuses headers of ours: render envoy.yaml with the version of the sidecar that runs"),
        ("clear_route_cache_ignored", "requests go where they stood before the decision: render envoy.yaml again"),
        ("spurious_msgs_received", "the sidecar answers what was not asked: both must be of one version"),
    ):
        if counted.get(name):
            yield Diagnosis(f"ext_proc {name}", "wrong", f"{counted[name]} in {asked} exchanges", change)
    workers = stats.get(f"cluster.{EXT_PROC_CLUSTER}.membership_healthy", 0)
    if not workers:
        change = "start the sidecar; if it runs, render envoy.yaml again (other addresses?); may Envoy's user use its socket?"
        yield Diagnosis("workers", "wrong", "Envoy reaches none", change)
    failed = counted.get("streams_failed", 0)  # Envoy counts among those that began no stream that it could not open
    if failed:
        change = "workers were restarted or killed; more than a few in a hundred: see the sidecar's log"
        if failed >= asked:
            change = (
                "Envoy was rendered for another address or number of workers (render envoy.yaml again), or workers were away: see their log"
            )
        verdict: Literal["doubtful", "wrong"] = "wrong" if failed * 20 > asked + failed else "doubtful"
        yield Diagnosis("ext_proc streams", verdict, f"{failed} failed, {asked} began", change)
    else:
        yield Diagnosis("ext_proc streams", "fine", f"{asked}, none failed")
    dropped = sum(value for name, value in stats.items() if name.endswith("logs_dropped"))
    if dropped:
        yield Diagnosis("access log", "wrong", f"{dropped} entries lost", "what they cost is not settled: give the sidecar more CPU")


def of_sidecar(status: Mapping[str, Any], settings: Settings) -> Iterator[Diagnosis]:
    """From the sidecar's `/status`."""
    configuration = status["configuration"]
    if configuration["rejected_successor"]:
        yield Diagnosis("configuration", "wrong", "the file as it is now is not in use", configuration["rejected_successor"])
    elif configuration["fingerprint"] != settings.fingerprint:
        yield Diagnosis(
            "configuration", "doubtful", "the sidecar uses another one", "a change is taken over within a second: is it this file?"
        )
    else:
        yield Diagnosis("configuration", "fine", f"{settings.fingerprint} is in use")
    if not status["limits"]["shared"]:
        yield Diagnosis("limits", "wrong", status["limits"]["reason"], "bring Redis back: until then `store.on_error` decides")
    if "audit" in status:
        yield _of_audit(status["audit"], settings)
    unsettled = status["exchanges"]["unsettled"] + status["exchanges"]["given_up"]
    if unsettled:
        yield Diagnosis(
            "settlement", "doubtful", f"{unsettled} exchanges are not settled", "Redis was away or slow; those given up stay reserved"
        )
    silent = [member for member in status["membership"]["nodes"] if member["state"] != "ready"]
    if silent:
        said = ", ".join(f"{member['node']['id']} is {member['state']}" for member in silent[:5])
        yield Diagnosis("nodes", "doubtful", said, "`din-extproc nodes` says why")
    else:
        yield Diagnosis("nodes", "fine", f"{len(status['membership']['nodes'])} ready")


def _of_audit(log: Mapping[str, Any], settings: Settings) -> Diagnosis:
    if log["failing"]:
        policy = "" if settings.audit is None else _ON_FULL[settings.audit.section.on_full]
        return Diagnosis(
            "audit log", "wrong", f"{log['failing']}{policy}", "make room, or let the sidecar's user write its folder: it goes on by itself"
        )
    if log["dropped"]:
        return Diagnosis(
            "audit log", "doubtful", f"{log['dropped']} events lost since the start", "the log says where; watch the room of its disk"
        )
    return Diagnosis("audit log", "fine", f"{log['records']} records")


def of_machine(open_files: int | None) -> Iterator[Diagnosis]:
    """From the limits under which this process runs, as the sidecar started by the same user does. None: there is no limit."""
    if open_files is None:
        yield Diagnosis("open files", "fine", "no limit")
    elif open_files < _FEWEST_FILES:
        yield Diagnosis("open files", "doubtful", str(open_files), "raise the limit (LimitNOFILE): each client and node takes one or two")
    else:
        yield Diagnosis("open files", "fine", str(open_files))


def of_timeouts(settings: Settings) -> Iterator[Diagnosis]:
    """From `din.yaml` alone: who has to give up first."""
    redis, message = settings.store.timeout_ms, settings.envoy.timeouts.message_ms
    if redis * 2 > message:
        change = "raise envoy.timeouts.message_ms to twice store.timeout_ms: the sidecar must answer before Envoy gives up"
        yield Diagnosis("timeouts", "wrong", f"Redis {redis} ms, Envoy {message} ms", change)
    else:
        yield Diagnosis("timeouts", "fine", f"Redis {redis} ms, Envoy {message} ms")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _seconds(duration: object) -> float | None:
    return float(duration[:-1]) if isinstance(duration, str) and duration.endswith("s") else None


def _first(value: object, name: str) -> Any:
    return next(iter(_all(value, name)), None)


def _all(value: object, name: str) -> Iterable[Any]:
    """Everything that stands under this name, at whatever depth."""
    if isinstance(value, Mapping):
        if name in value:
            yield value[name]
        for inner in value.values():
            yield from _all(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _all(inner, name)
