"""What is told of requests afterwards, through a real Envoy and several workers: metrics."""

import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from din_extproc.observe import instruments as of
from tests.servers import EngineSim
from tests.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSim]:
    with EngineSim(model="m", decode_rate=500.0, max_num_seqs=256, kv_tokens=1_000_000, auto_tool_choice=True) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engine) -> Iterator[Stack]:
    config = {
        "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
        "tenants": [tenant("acme"), tenant("trial", rpm=1)],
    }
    with Stack(config, gateway={"workers": 2, "scrape_s": 0.2}) as running:
        yield running


def scrape(stack: Stack) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The metrics page by sample name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.admin_port}/metrics", timeout=10) as reply:
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = reply.read().decode()
    read: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            read.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return read


def total(read, name: str, **labels: str) -> float:
    """The sum of all samples of the name with these labels."""
    return sum(value for told, value in read.get(name, {}).items() if set(labels.items()) <= told)


def test_one_scrape_shows_what_all_workers_did(stack):
    replies = [stack.chat() for _ in range(8)]
    assert {reply.status_code for reply in replies} == {200}
    assert [stack.chat(tenant_name="trial").status_code for _ in range(3)] == [200, 429, 429]
    assert stack.chat(model="nobody").status_code == 404
    stack.settled(12)
    stack.eventually(lambda: total(scrape(stack), "din_decisions_total") == 12, "both workers report")
    read = scrape(stack)
    used = sum(reply.json()["usage"]["total_tokens"] for reply in replies)
    assert total(read, "din_tokens_total", din_tenant_id="acme") == used
    assert total(read, "din_requests_total", din_outcome="completed") == 9
    assert total(read, "din_requests_total", din_tenant_id="trial", din_outcome="refused") == 2
    assert total(read, "din_refusals_total", din_refusal_code="rate_limit_exceeded") == 2
    assert total(read, "din_refusals_total", din_refusal_code="model_not_found") == 1
    assert total(read, "din_decision_duration_seconds_count") == 12
    assert total(read, "gen_ai_server_request_duration_seconds_count", gen_ai_operation_name="chat") == 9
    assert total(read, "din_ready") == total(read, "din_redis_up") == total(read, "din_limits_shared") == 1
    assert total(read, "din_workers") == 2
    assert total(read, "din_nodes", din_state="ready") == 1
    assert total(read, "din_request_queue_duration_seconds_count") == 9


def test_i09_names_that_clients_make_up_are_no_labels(stack):
    before = sum(len(samples) for samples in scrape(stack).values())
    with stack.client() as client:
        for at in range(40):
            body = {"model": f"made-up-{at}", "messages": [], "user": f"u{at}"}
            client.post("/v1/chat/completions", json=body, headers={"x-din-trace-id": f"trace-{at:08d}", "x-task-tier": f"t{at}"})
    read = scrape(stack)
    assert sum(len(samples) for samples in read.values()) < before + 20
    assert "made-up" not in str(read)
    assert {name for name in read if name.startswith("din_") and not name.endswith(("_bucket", "_count", "_sum"))} <= {
        each.prometheus for each in of.ALL
    }


def test_what_a_worker_counted_outlives_it(stack):
    stack.eventually(lambda: total(scrape(stack), "din_exchanges_open") == 0, "all is quiet")
    before = total(scrape(stack), "din_decisions_total")
    (victim, *_) = [child for child in psutil.Process(stack.sidecar.pid).children() if "--worker" in child.cmdline()]
    victim.kill()
    stack.eventually(lambda: total(scrape(stack), "din_worker_restarts_total") == 1, "a new worker", 30)
    assert total(scrape(stack), "din_decisions_total") == before
