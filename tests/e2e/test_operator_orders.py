"""An operator drains and quarantines nodes: at once, in every replica, for good, with a key, and on record."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.operating import READER, Operator, admin_keys
from tests.support.servers import EngineSim, RedisServer, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    with together({name: EngineSim(model="m", decode_rate=50.0) for name in ("a", "b")}) as running:
        yield running


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def config(engines: dict[str, EngineSim], **sections) -> dict:
    pool = {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": [node(name, engines[name].address) for name in engines]}
    return {"pools": {"p": pool}, "tenants": [tenant("acme")], **sections}


@pytest.fixture(scope="module")
def replicas(engines, redis, tmp_path_factory) -> Iterator[tuple[Stack, Stack]]:
    key = tmp_path_factory.mktemp("audit") / "audit.key"
    key.write_text("0" * 64)
    audit = {"audit": {"folder": str(key.parent / "log"), "replica": "one", "keys": {"k": {"file": str(key)}}}}
    admin = {"workers": 2}
    with (
        Stack(config(engines, **audit), server=redis, gateway=admin, admin_keys=admin_keys()) as one,
        Stack(config(engines), server=redis, admin_keys=admin_keys()) as two,
    ):
        yield one, two


@pytest.fixture(autouse=True)
def _released(replicas) -> Iterator[None]:
    yield
    one, two = replicas
    for name in ("a", "b"):
        assert Operator(one).post(f"/nodes/{name}/undrain").status_code == 200
    two.eventually(lambda: Operator(two).states() == {"a": "ready", "b": "ready"}, "both nodes are back")


def answering(stack: Stack, requests: int = 8) -> set[str]:
    return {stack.chat(max_tokens=1).headers["x-din-node-id"] for _ in range(requests)}


def test_a_drained_node_ends_what_it_has_and_gets_nothing_new_in_any_replica_until_it_is_undrained(replicas, engines):
    one, two = replicas
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with one.client() as client:
        streams = [client.send(client.build_request("POST", "/v1/chat/completions", json=body), stream=True) for _ in range(8)]
        assert {each.headers["x-din-node-id"] for each in streams} == {"a", "b"}
        done = Operator(one).run("nodes", "drain", "a", "--reason", "new driver")
        assert (done.returncode, done.stdout.strip()) == (0, "a: drain is in force"), done.stderr
        assert answering(one) == {"b"}
        two.eventually(lambda: Operator(two).states()["a"] == "draining", "the other replica has the order")
        assert answering(two) == {"b"}
        assert all(each.read().endswith(b"data: [DONE]\n\n") for each in streams), "running streams end in their own time"
    drained = next(row for row in Operator(two).get("/nodes").json()["nodes"] if row["node"]["id"] == "a")
    assert drained["reasons"][-1] == "drained by ops: new driver"
    assert "draining" in Operator(two).run("nodes").stdout
    assert Operator(one).run("nodes", "undrain", "a").returncode == 0
    one.eventually(lambda: answering(one) == {"a", "b"}, "it has requests again")


def test_an_order_holds_after_the_sidecar_was_restarted_and_after_redis_lost_it(replicas, redis):
    one, two = replicas
    assert Operator(one).post("/nodes/b/quarantine", {"reason": "wrong answers"}).json() == {
        "node": "b",
        "order": "quarantine",
        "problem": "",
    }
    two.sidecar.terminate()
    two.sidecar.wait(20)
    two.start_sidecar()
    assert Operator(two).states() == {"a": "ready", "b": "quarantined"}
    assert answering(two) == {"a"}
    redis.restart()
    one.eventually(lambda: one.redis_keys("holds") != [], "it is written again")
    assert Operator(one).states()["b"] == "quarantined"
    assert Operator(one).run("nodes", "release", "b").returncode == 0


def test_with_every_node_drained_a_request_is_refused_and_availability_says_so(replicas):
    one, _ = replicas
    operator = Operator(one)
    assert operator.get("/availability").status_code == 200
    for name in ("a", "b"):
        operator.post(f"/nodes/{name}/drain")
    refused = one.chat()
    assert (refused.status_code, refused.json()["code"]) == (503, "no_healthy_node")
    reply = operator.get("/availability?model=m")
    (model,) = reply.json()["models"]
    assert (reply.status_code, model["state"], model["available"], model["nodes"]) == (503, "unavailable", 0, 2)
    assert {each["reason"] for each in model["unavailable"]} == {"drained by ops"}
    assert operator.get("/availability?model=nothing").status_code == 404
    assert operator.get("/readyz").status_code == 200, "the sidecar itself is ready"
    findings = {each["what"]: each for each in json.loads(operator.run("doctor", "--json").stdout)}
    assert findings["model m"]["said"] == "0 of 2 nodes take requests, 0% of the capacity"
    assert operator.run("doctor").returncode == 1
    assert "a is draining" in findings["nodes"]["said"]


def test_only_a_key_that_may_operate_gives_orders_and_nonsense_is_refused(replicas):
    one, _ = replicas
    assert [Operator(one, key).post("/nodes/a/drain").status_code for key in ("", READER)] == [401, 401]
    refused = Operator(one, READER).run("nodes", "drain", "a")
    assert refused.returncode == 1
    assert "a key of gateway.admin.keys that has `operate: true`" in refused.stderr
    operator = Operator(one)
    nonsense = (("/nodes/x/drain", {}), ("/nodes/a/dance", {}), ("/nodes/a/drain", {"why": 1}))
    assert [operator.post(page, body).status_code for page, body in nonsense] == [404, 400, 400]
    assert "no node is called 'x'" in operator.run("nodes", "drain", "x").stderr
    assert operator.states() == {"a": "ready", "b": "ready"}


def test_orders_are_on_record(replicas):
    one, _ = replicas
    Operator(one).post("/nodes/a/drain", {"reason": "for the record"})
    folder = Path(yaml.safe_load(one.config_file.read_text())["audit"]["folder"])

    def recorded() -> list[dict]:
        lines = [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
        return [line for line in lines if line.get("kind") == "order" and line.get("reason") == "for the record"]

    one.eventually(lambda: bool(recorded()), "the order is recorded")
    assert {key: recorded()[0][key] for key in ("node_id", "order", "operator")} == {"node_id": "a", "order": "drain", "operator": "ops"}


def test_without_an_admin_key_that_may_operate_nobody_gives_orders(engines):
    with Stack(config(engines)) as open_stack:
        assert Operator(open_stack, "").get("/nodes").status_code == 200
        assert Operator(open_stack, "").post("/nodes/a/drain").status_code == 401
