"""Every metric has a value on the page of a running sidecar, once what it counts has happened: one network, one of everything."""

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from din_extproc.observe import instruments as of
from tests.support.collector import Collector
from tests.support.promql import sample_names
from tests.support.servers import EngineSim, free_port, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e
UNUSED_ADDRESS = "127.0.0.1:9"
BAD_EVENT = "data: {no json\\n\\n"
HEALTH = {"probe": {"every_s": 1, "timeout_s": 1.0}, "least_answers": 1}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together(
        {name: EngineSim(model="dead" if name == "c" else "m", decode_rate=500.0, kv_tokens=1_000_000) for name in "abcd"}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines) -> Iterator[Stack]:
    door, xds = {"http_address": f"127.0.0.1:{free_port()}", "node_tokens_file": "tokens.yaml"}, {"address": f"127.0.0.1:{free_port()}"}
    with Collector() as collector:
        stack = Stack({}, gateway={"scrape_s": 0.2, "registry": door, "xds": xds})
        (stack.folder / "audit.key").write_text("an audit key of these tests, long enough")
        (stack.folder / "tokens.yaml").write_text("{}\n")
        lost = {"dns": "gone.local:8000", "server": UNUSED_ADDRESS, "version": "1", "dtype": "bf16", "max_seq_len": 8192}
        live = [node(name, engines[name].address) for name in "ab"]
        stack.write(
            {
                "pools": {
                    "p": {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": live},
                    "gone": {"model": "m", "engine": "vllm", "nodes": [node("gone", UNUSED_ADDRESS)], "discover": lost},
                    "other": {"model": "m", "engine": "vllm", "nodes": [node("d", engines["d"].address, dtype="fp8")]},
                    "dead": {"model": "dead", "engine": "vllm", "nodes": [node("c", engines["c"].address)]},
                },
                "rules": [
                    {"id": "long", "when": {"header": {"x-task-tier": "analysis"}}, "pool": "gone", "fallback": "other"},
                    {"id": "rest", "when": {"model": "m"}, "pool": "p"},
                ],
                "tenants": [
                    {**tenant("acme"), "sensitive_data": "flag"},
                    tenant("second"),
                    tenant("trial", rpm=1),
                    {**tenant("other", rpm=1), "limits": {"rpm": 1, "enforce": False}},
                ],
                "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 20},
                "telemetry": {"endpoint": collector.endpoint, "sample": 1, "flush_s": 0.1},
                "verification": {"share": 1.0, "tokens_per_minute": 1_000_000},
                "health": HEALTH,
                "prices": {
                    "currency": "EUR",
                    "models": {"m": {"input": 1, "output": 2}, "dead": {"input": 3, "output": 6}},
                },
                "budgets": {"limits": [{"name": "few", "period": "month", "tokens": 1, "soft": True, "tenant": "trial"}]},
            }
        )
        with stack as running:
            yield running


def scrape(stack: Stack) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by sample name and label values, in the order of the labels' names."""
    with urllib.request.urlopen(f"{stack.admin_url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    read: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            read.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return read


def all_seen(stack: Stack, missing: set[str]) -> bool:
    """Whether each has had a value by now: some have one only while a request is under way."""
    read = scrape(stack)
    missing -= {each.name for each in of.ALL if set(sample_names(each)) <= read.keys()}
    return not missing


def much_happens(stack: Stack, engines: dict[str, EngineSim]) -> None:
    """Of everything that is counted, something."""
    engines["c"].fail("oom")
    for number in range(6):  # one tenant, or one request, opens no pool's breaker
        assert stack.chat(model="dead", seed=number, tenant_name=("acme", "second")[number % 2]).status_code >= 500
        time.sleep(0.15)  # what fails within a tenth of a second is one failure
    for _ in range(4):
        assert stack.chat(stream=True, max_tokens=12, temperature=0).status_code == 200
    assert stack.chat(messages=[{"role": "user", "content": "write to alice@example.com"}]).status_code == 200
    assert [stack.chat(tenant_name="trial").status_code for _ in range(2)] == [200, 429]
    assert [stack.chat(tenant_name="other").status_code for _ in range(2)] == [200, 200]
    degraded = stack.chat(headers={"x-task-tier": "analysis"})
    assert (degraded.status_code, degraded.headers["x-bxagent-degraded"]) == (200, "true")
    engines["a"].fail("unavailable")
    engines["b"].fail(f"insert:body={BAD_EVENT},after=2")
    for _ in range(4):
        stack.chat(stream=True, max_tokens=12)
    for name in "ab":
        engines[name].fail("")


SEEN_ELSEWHERE = {of.NODE_MISIDENTIFIED.name, of.MIXED_CAPABILITY.name, of.NODE_NO_CREDIT.name, of.LEFT_SITE.name, of.LEFT_SITE_TOKENS.name}
"""They need nodes with an Envoy of their own, that register, or that are hosted: see `test_node_identity.py`,
`test_compute_capability.py`, `test_remote_apis.py` and `test_cloud_overflow.py`."""


def test_every_metric_has_a_value_once_what_it_counts_has_happened(stack, engines):
    much_happens(stack, engines)
    missing = {each.name for each in of.ALL} - SEEN_ELSEWHERE
    under_way = threading.Thread(target=lambda: stack.chat(stream=True, max_tokens=3000, ignore_eos=True))
    under_way.start()
    try:
        with contextlib.suppress(AssertionError):
            stack.eventually(lambda: all_seen(stack, missing), "all have one")
    finally:
        under_way.join()
    assert missing == set()
    read = scrape(stack)
    assert read["din_refusals_total"][("rate_limit_exceeded",)] == 1
    assert read["din_discovery_failing"][("gone",)] == 1
    assert read["din_would_refuse_total"][("rpm",)] == 1
    assert read["din_sensitive_findings_total"] == {("flag", "email"): 1}
    assert read["din_requests_degraded_total"] == {("long", "acme", "m"): 1}
    assert sum(read["din_requests_retries_total"].values()) >= 1
    assert read["din_pool_share_ratio"][("dead",)] < 1
    assert read["din_breakers"][("open",)] >= 1
    assert set(read["din_node_probe_time_to_first_token_seconds"]) >= {("a",), ("b",)}
    assert read["din_xds_envoys"][()] == 1
    assert 0 < read["din_mixed_dtype_share_ratio"][("m",)] <= 0.5
