import re

import pytest

from din_extproc.control.topology import HealthCheck, Outlier, Retry, SocketAddress, Timeouts, Topology, UnixSocket, parse_address
from din_extproc.domain.node import Pool

WORKER = UnixSocket("/run/din/ext_proc.sock")


def pool(name: str) -> Pool:
    return Pool(name, "m", "m", "vllm", "round_robin", ())


def topology(**changes):
    return Topology(**{"ext_proc": (WORKER,), "access_log": WORKER, **changes})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", SocketAddress("127.0.0.1", 50051)),
        ("sidecar.internal:1", SocketAddress("sidecar.internal", 1)),
        ("[fd00::10]:65535", SocketAddress("fd00::10", 65535)),
        ("/run/a.sock", UnixSocket("/run/a.sock")),
        ("unix:/run/a:b.sock", UnixSocket("/run/a:b.sock")),
    ],
)
def test_an_address_is_a_host_with_a_port_or_a_unix_socket(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:8\uff10", "fd00::10:80", "unix:relative.sock"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_address(text)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ext_proc": ()}, "ext_proc"),
        ({"admin": SocketAddress("0.0.0.0", 9901)}, "admin"),
        ({"admin": SocketAddress("10.0.0.1", 9901)}, "admin"),
        ({"listener": SocketAddress("gateway.internal", 10000)}, "listener"),
        ({"body_limit_bytes": 0}, "body_limit_bytes"),
        ({"body_limit_bytes": 1 << 40}, "body_limit_bytes"),
        ({"access_log_flush_ms": 0}, "access_log_flush_ms"),
        ({"max_connections": 0}, "max_connections"),
        ({"pools": (pool("a"), pool("a"))}, "pools"),
        ({"pools": (pool("din_ext_proc"),)}, "pools"),
        ({"pools": (pool(""),)}, "pools"),
        ({"pools": (pool("a"),), "fail_open_pool": "b"}, "fail_open_pool"),
    ],
)
def test_a_topology_that_can_not_be_rendered_can_not_be_built(changes, field):
    with pytest.raises(ValueError, match=f"^{field}"):
        topology(**changes)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Timeouts(message_ms=0), "timeouts.message_ms"),
        (lambda: Timeouts(connect_ms=-1), "timeouts.connect_ms"),
        (lambda: Timeouts(total_ms=-1), "timeouts.total_ms"),
        (lambda: Timeouts(message_ms=10, max_message_ms=9), "timeouts.max_message_ms"),
        (lambda: Retry(attempts=-1), "retry.attempts"),
        (lambda: Retry(jitter_ms=0), "retry.jitter_ms"),
        (lambda: Retry(statuses=(200,)), "retry.statuses"),
        (lambda: Outlier(consecutive_connect_failures=0), "outlier.consecutive_connect_failures"),
        (lambda: Outlier(max_ejection_percent=101), "outlier.max_ejection_percent"),
        (lambda: HealthCheck(interval_ms=0), "health_check.interval_ms"),
        (lambda: HealthCheck(path="health"), "health_check"),
        (lambda: HealthCheck(engine_paths={"triton": "v2"}), "health_check"),
    ],
)
def test_a_refusal_names_the_field(build, field):
    with pytest.raises(ValueError, match="^" + re.escape(field)):
        build()


def test_only_loopback_is_loopback():
    assert [SocketAddress(host, 1).is_loopback for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [SocketAddress(host, 1).is_loopback for host in ("0.0.0.0", "::", "10.0.0.1", "gateway")] == [False] * 4
