import re

import pytest

from din_extproc.control.topology import HealthCheck, Outlier, Retry, SocketAddress, Timeouts, Topology, UnixSocket
from din_extproc.domain.node import Pool

WORKER = UnixSocket("/run/din/ext_proc.sock")


def pool(name: str) -> Pool:
    return Pool(name, "m", "m", "vllm", "round_robin", ())


def topology(**changes):
    return Topology(**{"ext_proc": (WORKER,), "access_log": WORKER, **changes})


@pytest.mark.parametrize(("host", "port"), [("", 80), ("host", 0), ("host", 65536), ("host", -1)])
def test_an_address_without_a_host_or_a_valid_port_is_refused(host, port):
    with pytest.raises(ValueError, match=r"."):
        SocketAddress(host, port)


def test_a_unix_socket_has_an_absolute_path():
    with pytest.raises(ValueError, match="absolute path"):
        UnixSocket("relative.sock")


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
