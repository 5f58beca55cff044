"""Nodes that come and go while two sidecars share one Redis: both route accordingly, whichever got the registration."""

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from din_extproc.admit.keys import ENTROPY_BYTES, make_node_token
from tests.support import peer
from tests.support.servers import RedisServer, free_port
from tests.support.stack import Stack, key_of, raw_request, tenant

pytestmark = pytest.mark.e2e

SHA = "a" * 64
DEAD_AFTER_S = 3.0
CATALOGUE = {"models": [{"model_name": "m", "model_version": "1.0.0", "dtype": "bf16", "max_seq_len": 8192, "sha256": SHA}]}
NODES = ("gpu-1", "gpu-2", "gpu-3")
BEATER = """
import json, sys, time, urllib.request
url, token, lease, first = sys.argv[1:]
for sequence in range(int(first), 10**9):
    body = json.dumps({"lease": lease, "sequence": sequence, "waiting": 1}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"authorization": "Bearer " + token})).read()
    if sequence == int(first):
        print("beating", flush=True)
    time.sleep(0.2)
"""


def token(name: str):
    return make_node_token(name, bytes([len(name)]) * ENTROPY_BYTES)


class Replica(Stack):
    """A sidecar whose registry is open. `start_sidecar` starts it without an Envoy. `gateway`: more of that section."""

    def __init__(self, redis: RedisServer, *, workers: int = 1, gateway=None, **sections) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.resting = threading.Event()
        self.threads: list[threading.Thread] = []
        registry = {
            "address": f"127.0.0.1:{self.grpc_port}",
            "http_address": f"127.0.0.1:{self.http_port}",
            "node_tokens_file": "tokens.yaml",
            "heartbeat_s": 0.3,
            "dead_after_s": DEAD_AFTER_S,
        }
        config = {
            "catalog": {"source": "models.json"},
            "pools": {"chat": {"model": "m", "engine": "vllm", "scheduler": "round_robin"}},
            "tenants": [tenant("acme")],
        }
        super().__init__({**config, **sections}, server=redis, gateway={"registry": registry, "workers": workers, **(gateway or {})})
        (self.folder / "models.json").write_text(json.dumps(CATALOGUE))
        held = "".join(f'{name}: {{ hash: "{token(name).hash}", addresses: [10.0.0.0/8, "127.0.0.0/8"] }}\n' for name in NODES)
        (self.folder / "tokens.yaml").write_text(held)

    def say(self, method: str, path: str, body: dict | None = None, name: str = "gpu-1", bearer: str | None = None):
        """Status and JSON of one message to the registry's HTTP port."""
        headers = {"authorization": f"Bearer {token(name).text if bearer is None else bearer}"}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def register(self, name: str, port: int = 8000, **fields):
        node = {"id": name, "address": f"10.0.0.{NODES.index(name) + 1}:{port}", "model": "m", "version": "1.0.0", "dtype": "bf16"}
        form = {**node, "engine": "vllm", "max_seq_len": 8192, "weights_sha256": SHA, "epoch": time.time_ns() // 1_000_000, **fields}
        return self.say("POST", "/v1/nodes", form, name)

    def join(self, name: str) -> str:
        """Register, be ready, and beat until `rest`. Returns the lease."""
        status, reply_body = self.register(name)
        assert status == 200, reply_body
        path, beat = f"/v1/nodes/{name}/heartbeat", {"lease": reply_body["lease"], "sequence": 1}
        assert self.say("POST", path, beat, name) == (200, {"drain": False})
        resting = self.resting

        def beats() -> None:
            sequence = 1000
            while not resting.wait(0.3):
                sequence += 1
                self.say("POST", path, {**beat, "sequence": sequence}, name)

        self.threads.append(threading.Thread(target=beats))
        self.threads[-1].start()
        return reply_body["lease"]

    def rest(self) -> None:
        """No more heartbeats."""
        self.resting.set()
        for thread in self.threads:
            thread.join()
        self.resting, self.threads = threading.Event(), []

    def nodes(self) -> dict[str, dict]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/nodes", timeout=5) as reply:
            return {row["node"]["id"]: row for row in json.loads(reply.read())["nodes"]}

    def picked(self, socket: str = "ext_proc.sock") -> str:
        """Where one request goes: an address, or the code of the refusal."""
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
        headers = {":method": "POST", ":path": "/v1/chat/completions", "authorization": f"Bearer {key_of('acme')}"}
        answered = threading.Event()

        def asked() -> Iterator[bytes]:
            yield peer.message("request_headers", headers)
            yield peer.message("request_body", body=body, end=True)
            answered.wait(20)  # the end of the stream is the end of the exchange

        with grpc.insecure_channel(f"unix:{self.folder / socket}") as channel:
            for data in channel.stream_stream(peer.PROCESS)(asked(), timeout=20):
                reply = ProcessingResponse.FromString(data)
                set_headers = reply.request_body.response.header_mutation.set_headers
                changed = {each.header.key: each.header.raw_value.decode() for each in set_headers}
                if reply.HasField("immediate_response"):
                    changed["x-din-endpoint"] = json.loads(reply.immediate_response.body)["code"]
                if "x-din-endpoint" in changed:
                    answered.set()
                    return changed["x-din-endpoint"].partition(",")[0]
        raise AssertionError("no decision")

    def targets(self, requests: int = 6) -> set[str]:
        return {self.picked() for _ in range(requests)}


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Replica, Replica]]:
    with RedisServer() as redis:
        one, two = Replica(redis), Replica(redis)
        try:
            one.start_sidecar()
            two.start_sidecar()
            yield one, two
        finally:
            one.stop()
            two.stop()


@pytest.fixture
def pair(replicas) -> Iterator[tuple[Replica, Replica]]:
    """Two replicas that know no node."""
    yield replicas
    one, two = replicas
    one.rest()
    two.rest()
    for name in NODES:
        one.say("DELETE", f"/v1/nodes/{name}", {"reason": "the test is over"}, name)
    two.eventually(lambda: not one.nodes() and not two.nodes(), "no node is left")


def test_a_node_that_joins_one_replica_is_used_by_both_and_no_more_once_it_drains(pair):
    one, two = pair
    assert one.picked() == "no_healthy_node"
    one.join("gpu-1")
    two.join("gpu-2")
    for each in pair:
        each.eventually(lambda each=each: each.targets() == {"10.0.0.1:8000", "10.0.0.2:8000"}, "both nodes are used")
    assert two.say("POST", "/v1/nodes/gpu-1/drain", {"reason": "maintenance"}) == (200, {})
    for each in pair:
        each.eventually(lambda each=each: each.nodes()["gpu-1"]["state"] == "draining", "the drain is known")
        each.eventually(lambda each=each: each.targets() == {"10.0.0.2:8000"}, "it gets no more requests")
    assert one.say("DELETE", "/v1/nodes/gpu-2", {"reason": "done"}, "gpu-2") == (200, {})
    two.eventually(lambda: two.picked() == "no_healthy_node", "the other is gone")


def test_a_node_that_is_killed_is_given_up_in_time_and_used_again_when_it_is_back(pair):
    one, two = pair
    one.join("gpu-2")
    victim = beating(one, "gpu-1", one.register("gpu-1")[1]["lease"])
    try:
        for each in pair:
            each.eventually(lambda each=each: each.targets() == {"10.0.0.1:8000", "10.0.0.2:8000"}, "both are used")
        victim.kill()
        two.eventually(lambda: two.nodes()["gpu-1"]["state"] == "dead", "it is given up")
        one.eventually(lambda: one.nodes()["gpu-1"]["state"] == "dead", "it is given up here, too")
        assert "not heard of" in two.nodes()["gpu-1"]["reasons"][-1]
        for each in pair:
            each.eventually(lambda each=each: each.targets() == {"10.0.0.2:8000"}, "it gets no more requests")
        two.join("gpu-1")
        one.eventually(lambda: one.targets() == {"10.0.0.1:8000", "10.0.0.2:8000"}, "it is used again")
    finally:
        victim.kill()
        victim.wait()


def beating(replica: Replica, name: str, lease: str) -> subprocess.Popen[bytes]:
    """A process that beats for the node until it is killed."""
    url = f"http://127.0.0.1:{replica.http_port}/v1/nodes/{name}/heartbeat"
    child = subprocess.Popen([sys.executable, "-c", BEATER, url, token(name).text, lease, "1"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"beating\n"
    return child


@pytest.mark.parametrize(
    ("fields", "status", "code", "reason"),
    [
        ({"weights_sha256": SHA[:-1] + "b"}, 422, "untrue", "sha256"),
        ({"version": "9.9.9"}, 422, "untrue", "versions 1.0.0"),
        ({"model": "other"}, 422, "untrue", "no model 'other'"),
        ({"max_seq_len": 9000}, 422, "untrue", "8192"),
        ({"dtype": "fp8"}, 422, "untrue", "bf16"),
        ({"network": "batch"}, 422, "untrue", "network"),
        ({"address": "[fe80::1%eth0]:8000"}, 400, "invalid_request", "scoped"),
        ({"address": "fd00::10:8000"}, 400, "invalid_request", "brackets"),
        ({"address": "host:8000"}, 400, "invalid_request", "not an IP address"),
        ({"address": "10.0.0.1:99999"}, 400, "invalid_request", "port"),
        ({"version": "nightly"}, 400, "invalid_request", "version"),
        ({"max_seq_len": "many"}, 400, "invalid_request", "max_seq_len"),
        *(
            ({name: number}, 400, "invalid_request", name)
            for name, number in (
                ("max_seq_len", 10**30),
                ("max_seq_len", 1 << 63),
                ("max_concurrency", 10**30),
                ("tp_world_size", 1 << 70),
                ("free_memory_bytes", 10**30),
                ("free_memory_bytes", -5),
            )
        ),
        ({"shoe_size": 43}, 400, "invalid_request", "shoe_size"),
        ({"id": "gpu-2"}, 403, "forbidden", "gpu-1"),
        ({"address": "192.0.2.1:8000"}, 403, "forbidden", "does not hold for the address 192.0.2.1:8000"),
    ],
)
def test_a_registration_that_is_not_true_or_not_sound_is_refused_with_the_reason(pair, fields, status, code, reason):
    answered, body = pair[0].register("gpu-1", **fields)
    assert (answered, body["code"]) == (status, code), body
    assert reason in body["detail"]


def test_without_a_sound_token_nobody_gets_in_or_sees_anything(pair):
    one, _ = pair
    for bearer in ("", "din_gpu-1_wrong", token("gpu-9").text, "x" * 5000, token("gpu-1").text[:-1]):
        for method, path in (("GET", "/v1/nodes"), ("POST", "/v1/nodes/gpu-1/heartbeat"), ("DELETE", "/v1/nodes/gpu-1")):
            status, body = one.say(method, path, {"lease": "x", "sequence": 1} if method != "GET" else None, bearer=bearer)
            assert (status, body["code"]) == (401, "unauthenticated")
    assert one.say("GET", "/v1/nodes") == (200, {"nodes": [], "stale": False})


def test_what_is_refused_before_anybody_reads_it_is_refused_in_json_too(pair):
    one, _ = pair
    for method, path, body, status, code in (
        ("POST", "/v1/nodes", b"x" * 70_000, 413, "request_too_large"),
        ("GET", "/nowhere", None, 404, "path_not_found"),
        ("PUT", "/v1/nodes", b"", 405, "method_not_allowed"),
        ("GET", f"/v1/nodes?{'x' * 9000}", None, 400, "invalid_request"),
    ):
        answered, error_body = one.say(method, path, body)
        assert (answered, error_body["code"], error_body["status"]) == (status, code, status), error_body
        assert error_body["type"] == f"urn:din-extproc:http:{code}"
    headers = raw_request(one.http_port, b"GET /v1/nodes HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n")
    assert b" 400 " in headers[:20]
    assert b"application/problem+json" in headers


def test_garbage_in_heartbeats_is_refused_and_harms_nobody(pair):
    one, two = pair
    lease = one.join("gpu-1")
    beat = {"lease": lease, "sequence": 10**9}
    for garbage, status in [
        (b"\x00\xff", 400),
        (b"[" * 5000, 400),
        ({**beat, "kv_cache_usage": 3.5}, 400),
        ({**beat, "waiting": -1}, 400),
        ({**beat, "waiting": 10**30}, 400),
        ({**beat, "free_memory_bytes": -5}, 400),
        ({**beat, "tokens_in_use": 1 << 63}, 400),
        ({**beat, "state": "dead"}, 400),
        ({**beat, "decode_rate": 0.0}, 400),
        ({**beat, "sequence": 1 << 60}, 400),
        ({**beat, "sequence": 1}, 409),
        ({**beat, "lease": "another"}, 404),
    ]:
        answered, body = one.say("POST", "/v1/nodes/gpu-1/heartbeat", garbage)
        assert answered == status, (garbage, body)
        assert body["detail"]
    assert one.say("POST", "/v1/nodes/gpu-1/heartbeat", beat)[0] == 200
    two.eventually(lambda: two.picked() == "10.0.0.1:8000", "it is still used")
    assert one.nodes()["gpu-1"]["trust"] < 1
    assert "refused" in one.nodes()["gpu-1"]["reasons"][-1]


def test_a_late_replica_and_the_workers_of_another_have_the_full_view_from_their_first_request(pair):
    one, _ = pair
    one.join("gpu-1")
    late = Replica(one.redis, workers=2)
    try:
        late.start_sidecar()
        for socket in ("ext_proc.sock.0", "ext_proc.sock.1"):
            assert late.picked(socket) == "10.0.0.1:8000"
        one.say("POST", "/v1/nodes/gpu-1/drain", {})
        for socket in ("ext_proc.sock.0", "ext_proc.sock.1"):
            late.eventually(lambda socket=socket: late.picked(socket) == "no_healthy_node", "the workers know")
    finally:
        late.stop()


def test_while_redis_is_paused_the_last_view_routes_on_and_is_called_stale(pair):
    one, two = pair
    one.join("gpu-1")
    two.eventually(lambda: two.picked() == "10.0.0.1:8000", "it is used")
    with one.redis.paused():
        for each in pair:
            each.eventually(lambda each=each: each.nodes()["gpu-1"]["stale"], "it is called stale")
        time.sleep(DEAD_AFTER_S)
        assert [each.nodes()["gpu-1"]["state"] for each in pair] == ["ready", "ready"]
    for each in pair:
        each.eventually(lambda each=each: not each.nodes()["gpu-1"]["stale"], "it is shared again")
        each.eventually(lambda each=each: each.picked() == "10.0.0.1:8000", "it is used")


def test_grpc_says_the_same_as_http_and_tells_every_change(pair):
    one, two = pair
    mine = (("authorization", f"Bearer {token('gpu-1').text}"),)
    node = pb.Node(id="gpu-1", address="10.0.0.1:8000", model="m", version="1.0.0", dtype="bf16", engine="vllm", max_seq_len=8192)
    with grpc.insecure_channel(f"127.0.0.1:{one.grpc_port}") as first, grpc.insecure_channel(f"127.0.0.1:{two.grpc_port}") as second:

        def ask(channel, method, request, response, metadata=mine):
            call = channel.unary_unary(f"/din.v1.NodeRegistry/{method}", type(request).SerializeToString, response.FromString)
            return call(request, metadata=metadata, timeout=10)

        watch = second.unary_stream("/din.v1.NodeRegistry/Watch", pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString)(
            pb.WatchRequest(), metadata=mine, timeout=60
        )
        assert next(watch).complete
        for request, status in (
            (pb.RegisterRequest(node=node), grpc.StatusCode.FAILED_PRECONDITION),
            (pb.RegisterRequest(), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                ask(first, "Register", request, pb.RegisterResponse)
            assert refused.value.code() is status
        with pytest.raises(grpc.RpcError) as refused:
            ask(first, "Register", pb.RegisterRequest(node=node), pb.RegisterResponse, ())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        node.max_seq_len = (1 << 32) - 1
        with pytest.raises(grpc.RpcError, match="max_seq_len") as refused:
            ask(first, "Register", pb.RegisterRequest(node=node), pb.RegisterResponse)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        node.max_seq_len, node.weights_sha256 = 8192, SHA
        node.instances.add(model="adapter", max_concurrency=4)
        lease = ask(first, "Register", pb.RegisterRequest(node=node), pb.RegisterResponse).lease
        beat = pb.Beat(state=pb.NODE_STATE_READY, sequence=1, waiting=0, kv_cache_usage=0.25)
        beat.instances.add(model="adapter", waiting=0)
        assert not ask(second, "Heartbeat", pb.HeartbeatRequest(node_id="gpu-1", lease=lease, beat=beat), pb.HeartbeatResponse).drain
        seen = [next(watch).nodes[0] for _ in range(2)]
        assert [status.state for status in seen] == [pb.NODE_STATE_LOADING, pb.NODE_STATE_READY]
        assert [(each.model, each.max_concurrency) for each in seen[1].node.instances] == [("adapter", 4)]
        assert [(each.model, each.waiting, each.HasField("running")) for each in seen[1].beat.instances] == [("adapter", 0, False)]
        assert seen[1].beat == beat
        assert seen[1].node.max_concurrency == 64
        ask(first, "Drain", pb.DrainRequest(node_id="gpu-1", lease=lease, reason="r"), pb.DrainResponse)
        assert next(watch).nodes[0].reasons == ["drained: r"]
        ask(second, "Deregister", pb.DeregisterRequest(node_id="gpu-1", lease=lease), pb.DeregisterResponse)
        assert next(watch).nodes[0].state == pb.NODE_STATE_DEAD
        with pytest.raises(grpc.RpcError) as refused:
            ask(first, "Heartbeat", pb.HeartbeatRequest(node_id="gpu-1", lease=lease, beat=beat), pb.HeartbeatResponse)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_nodes_command_shows_them(pair):
    one, _ = pair
    one.join("gpu-1")
    command = [sys.executable, "-m", "din_extproc", "nodes", "--config", str(one.config_file)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "PATH": ""})
    assert "gpu-1" in listed.stdout
    assert "ready" in listed.stdout or "recovering" in listed.stdout, "it may have been away in an earlier test"
    rows = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)["nodes"]
    assert rows[0]["pools"] == ["chat"]
    assert one.status()["membership"]["nodes"][0]["node"]["id"] == "gpu-1"


def test_no_node_registers_where_the_gateway_itself_listens(pair):
    one, _ = pair
    for port in (one.port, one.envoy_admin_port, one.admin_port, one.access_log_port, one.grpc_port, one.http_port):
        status, reply_body = one.register("gpu-1", address=f"127.0.0.1:{port}")
        assert (status, reply_body["code"]) == (403, "forbidden")
        assert f"the gateway itself listens at 127.0.0.1:{port}" in reply_body["detail"]
