"""The door of the whole gateway: spellings of paths, methods, requests without a body, browsers, headers that nobody may send."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, key_of, node, raw_request, tenant

pytestmark = pytest.mark.e2e

PATH = "/v1/chat/completions"
ORIGIN = "https://app.example"
SLASHED = "hf.co/unsloth/Qwen3:Q4_K_M"
INSIDE = {
    "x-din-target": "10.0.0.5:22",
    "x-din-tenant": "admin",
    "X-DIN-Route": "second",
    "x-din-cluster": "second",
    "x-din-endpoint": "10.0.0.5:22",
    "x-gateway-destination-endpoint": "10.0.0.5:22",
    "x-envoy-original-dst-host": "10.0.0.5:22",
    "x-envoy-upstream-rq-timeout-ms": "0",
    "x-envoy-retry-on": "5xx",
    "x-envoy-max-retries": "9",
    "x-bxagent-degraded": "true",
    "x-request-id": "junk-of-the-client",
}
"""What steers the gateway from inside, as a client would forge it."""


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    made = {name: EngineSim(model=name, decode_rate=5000.0, prefill_rate=1e6) for name in ("first", "second")}
    with together(made) as running:
        yield running


@pytest.fixture(scope="module")
def stack(sims) -> Iterator[Stack]:
    pools = {name: {"model": name, "engine": "vllm", "nodes": [node(f"node-{name}", sim.address)]} for name, sim in sims.items()}
    config = {
        "aliases": {"m": {"model": "first"}, "fast": {"model": "second"}, SLASHED: {"model": "first"}},
        "pools": pools,
        "rules": [{"id": name, "when": {"model": name}, "pool": name} for name in pools],
        "tenants": [tenant("acme"), tenant("trial", rpm=1), tenant("other", models=("first",))],
        "envoy": {"cors": {"allow_origins": [ORIGIN]}},
    }
    with Stack(config) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack) -> Iterator[httpx.Client]:
    with stack.client() as made:
        yield made


@pytest.fixture(autouse=True)
def fresh(sims) -> None:
    for sim in sims.values():
        sim.forget()


def seen(sims: dict[str, EngineSim]) -> list[dict]:
    return [request for sim in sims.values() for request in sim.seen()[1]]


def ask(model: str = "m") -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def raw(stack: Stack, start: str, *lines: str, body: str = "") -> bytes:
    """A request as spelled, with acme's key, on a connection of its own."""
    head = [start, "host: gateway", f"authorization: Bearer {key_of('acme')}", "connection: close", *lines]
    return raw_request(stack.port, "\r\n".join([*head, "", body]).encode())


# Paths


def test_a_slash_or_a_query_is_the_same_path_and_metered(client, sims):
    left = []
    for path in (PATH, PATH + "/", PATH + "?api-version=1", PATH + "/?a=b"):
        reply = client.post(path, json=ask())
        assert reply.status_code == 200, reply.text
        left.append(int(reply.headers["x-ratelimit-remaining-requests"]))
    assert left == list(range(left[0], left[0] - 4, -1))
    assert [request["path"] for request in seen(sims)] == [PATH] * 4


@pytest.mark.parametrize(
    "path",
    ["//v1/chat/completions", "/v1/chat%2Fcompletions", "/V1/chat/completions", "/v1/chat/completions#x", "/v1/chat/completions//",
     "/v1/../v1/chat/completions", "/v1/chat/completions;x", "/v1/%63hat/completions", "/v1/chat/completions.", "/v1/chat/completions..",
     "/./v1/chat/completions", "/v1/chat/..%2fchat/completions", "/v1%5cchat/completions", "/v1/chat\\completions",
     "/", "/v1", "/metrics", "/_seen", "/version"],
)  # fmt: skip
def test_any_other_spelling_is_a_404_and_reaches_no_node(stack, sims, path):
    body = json.dumps(ask())
    reply = raw(stack, f"POST {path} HTTP/1.1", "content-type: application/json", f"content-length: {len(body)}", body=body)
    assert reply.startswith(b"HTTP/1.1 404 "), reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "path_not_found"
    assert seen(sims) == []


@pytest.mark.parametrize("host", ["gateway", "10.0.0.5:22", "user:pass@gateway", "gateway:99999"])
def test_a_whole_url_as_target_is_its_path_and_goes_nowhere_else(stack, sims, host):
    body = json.dumps(ask())
    lines = ("content-type: application/json", f"content-length: {len(body)}")
    reply = raw(stack, f"POST http://{host}{PATH} HTTP/1.1", *lines, body=body)
    assert not reply or reply.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ")), reply
    assert [request["path"] for request in seen(sims)] == [PATH] * reply.startswith(b"HTTP/1.1 200 ")
    assert host == "gateway" or host.encode() not in reply
    elsewhere = raw(stack, f"POST http://{host}/_seen HTTP/1.1", *lines, body=body)
    assert not elsewhere or elsewhere.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), elsewhere


def test_models_whose_names_have_slashes_are_found_one_by_one(client):
    found = client.get(f"/v1/models/{SLASHED}")
    assert found.json()["id"] == SLASHED
    assert client.get("/v1/models/hf.co%2Funsloth%2FQwen3%3AQ4_K_M").json() == found.json()
    missing = client.get("/v1/models/missing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


@pytest.mark.parametrize("name", ["fast", "second", "second@>=1", "fast@2025.*"])
def test_no_other_name_opens_a_model_that_is_not_allowed(stack, sims, name):
    reply = stack.chat(ask(name), tenant_name="other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "model_not_allowed")
    assert seen(sims) == []


# Methods, and requests without a body


def test_a_head_has_the_headers_of_the_get_and_no_body(client):
    get, head = client.get("/v1/models"), client.head("/v1/models")
    assert (get.status_code, head.status_code, head.content) == (200, 200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


def test_what_has_no_body_is_answered_without_waiting_for_one(stack, client, sims):
    empty = client.post(PATH, headers={"content-type": "application/json", "content-length": "0"})
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid_request")
    assert raw(stack, f"POST {PATH} HTTP/1.1", "transfer-encoding: chunked", body="0\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(stack, "GET /v1/models HTTP/1.1", "expect: 100-continue").startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 100 "))
    expecting = raw(stack, "GET /v1/models HTTP/1.1", "expect: 100-continue", "content-length: 0")
    assert b'"object":"list"' in expecting
    wrong = client.get(PATH)
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["error"]["code"]) == (405, "POST", "method_not_allowed")
    assert seen(sims) == []


def test_a_body_that_waits_for_100_continue_is_asked_for(stack):
    body = json.dumps(ask())
    lines = ("content-type: application/json", f"content-length: {len(body)}", "expect: 100-continue")
    reply = raw(stack, f"POST {PATH} HTTP/1.1", *lines, body=body)
    assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


def test_the_same_over_http2(stack):
    with stack.client(http1=False, http2=True) as client:
        assert client.get("/v1/models").http_version == "HTTP/2"
        assert client.head("/v1/models").content == b""
        assert client.post(PATH).status_code == 400
        assert client.post(PATH, json=ask()).status_code == 200


def test_options_without_cors_says_what_may_be_asked(client, sims):
    reply = client.request("OPTIONS", PATH)
    assert (reply.status_code, reply.content) == (204, b"")
    assert "POST" in reply.headers["allow"]
    assert seen(sims) == []


# Browsers


def test_a_preflight_costs_nothing_and_needs_no_key(stack):
    before = stack.status()["counts"]
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with stack.client(None) as client:
        reply = client.request("OPTIONS", PATH, headers=asked)
    assert (reply.status_code, reply.content, reply.headers["access-control-allow-origin"]) == (204, b"", ORIGIN)
    assert {"authorization", "content-type"} <= set(reply.headers["access-control-allow-headers"].split(","))
    after = stack.status()["counts"]
    assert (after["sent"], after["refused"]) == (before["sent"], before["refused"])


def test_a_browser_can_read_answers_and_refusals(stack):
    from_page = {"origin": ORIGIN}
    replies = [stack.chat(ask(), tenant_name="trial", headers=from_page) for _ in range(2)]
    with stack.client(None) as client:
        replies += [client.post(PATH, json=ask(), headers=from_page)]
    assert [reply.status_code for reply in replies] == [200, 429, 401]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert {"retry-after", "x-ratelimit-remaining-requests", "x-din-trace-id"} <= set(
            reply.headers["access-control-expose-headers"].split(",")
        )
    assert int(replies[1].headers["retry-after"]) >= 1
    assert "access-control-allow-origin" not in stack.chat(ask(), headers={"origin": "https://evil.example"}).headers


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime"])
def test_a_websocket_handshake_gets_a_426_in_our_shape_and_a_plain_get_a_405_or_404(stack, sims, path):
    handshake = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")
    reply = raw(stack, f"GET {path} HTTP/1.1", *handshake)
    assert reply.startswith(b"HTTP/1.1 426 "), reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "upgrade_required"
    assert raw(stack, f"GET {path} HTTP/1.1").startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 404 "))
    assert seen(sims) == []


def test_the_health_path_is_open_without_a_key_and_counts_as_nothing(stack):
    before = stack.status()["counts"]
    with stack.client(None) as client:
        assert {client.get(path).status_code for path in ("/healthz", "/health", "/healthz")} == {200}
    after = stack.status()["counts"]
    assert (after["sent"], after["refused"]) == (before["sent"], before["refused"])


# Headers from outside


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [("POST", PATH, {"messages": []}, 400), ("GET", "/v1/models", None, 200), ("OPTIONS", PATH, None, 204), ("POST", PATH, ask(), 200)],
)
def test_forged_headers_change_nothing_reach_nobody_and_are_not_echoed(client, sims, method, path, body, status):
    reply = client.request(method, path, json=body, headers=INSIDE)
    assert reply.status_code == status, reply.text
    assert not {name.lower() for name in INSIDE} - {"x-request-id"} & reply.headers.keys()
    assert reply.headers["x-request-id"] == reply.headers["x-din-trace-id"] != INSIDE["x-request-id"]
    arrived = seen(sims)
    assert len(arrived) == (status == 200 and method == "POST")
    for request in arrived:
        assert not set(INSIDE.values()) - {"true", "0", "9"} & {value for _, value in request["headers"]}
        assert not {name.lower() for name in INSIDE} - {"x-request-id"} & {name for name, _ in request["headers"]}


def test_forged_headers_behind_the_body_or_on_an_upgraded_connection_reach_nobody(stack, sims):
    body = json.dumps(ask())
    forged = "x-din-cluster: second\r\nx-din-endpoint: 10.0.0.5:22\r\nx-din-tenant: admin\r\nauthorization: Bearer forged\r\n"
    behind = f"{len(body):x}\r\n{body}\r\n0\r\n{forged}\r\n"
    start, json_type = f"POST {PATH} HTTP/1.1", "content-type: application/json"
    replies = [
        raw(stack, start, json_type, "transfer-encoding: chunked", "trailer: x-din-cluster, authorization", body=behind),
        raw(
            stack, start, json_type, f"content-length: {len(body)}", "connection: x-din-trace-id, content-length, authorization", body=body
        ),
        raw(stack, start, json_type, f"content-length: {len(body)}", "upgrade: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA", body=body),
        raw(stack, start, json_type, f"content-length: {len(body)}", "upgrade: websocket", "sec-websocket-key: eA==", body=body),
        raw(stack, "CONNECT 10.0.0.5:22 HTTP/1.1", *forged.splitlines()),
        raw(stack, "CONNECT gateway:80 HTTP/1.1"),
    ]
    assert not any(reply.startswith(b"HTTP/1.1 101 ") for reply in replies), replies
    assert replies[0].startswith(b"HTTP/1.1 200 "), replies[0]
    assert not any(reply.startswith(b"HTTP/1.1 200 ") for reply in replies[4:]), replies
    for request in seen(sims):
        assert request["path"] == PATH
        assert not {"x-din-cluster", "x-din-endpoint", "x-din-tenant", "authorization", "upgrade"} & {
            name for name, _ in request["headers"]
        }
    assert sims["second"].seen()[1] == []


def test_over_http2_too_forged_headers_reach_nobody(stack, sims):
    with stack.client(http1=False, http2=True) as client:
        lowered = {name.lower(): value for name, value in INSIDE.items()}
        for method, path, content in (("POST", PATH, ask()), ("GET", "/v1/models", None), ("OPTIONS", PATH, None), ("POST", "/no", None)):
            reply = client.request(method, path, json=content, headers=lowered)
            assert not lowered.keys() - {"x-request-id"} & reply.headers.keys()
            assert reply.headers["x-request-id"] != lowered["x-request-id"]
            assert "10.0.0.5" not in reply.text + str(reply.headers)
    [request] = seen(sims)
    assert not lowered.keys() - {"x-request-id"} & {name for name, _ in request["headers"]}


def test_every_request_lands_where_it_was_decided_whatever_the_route_was_before(stack, client, sims):
    for number in range(40):
        model = ("first", "second")[number % 2]
        reply = client.post(PATH, json=ask(model), headers={"x-din-cluster": "second", "x-din-endpoint": "127.0.0.1:1"})
        assert reply.headers["x-din-node-id"] == f"node-{model}"
    assert [len(sim.seen()[1]) for sim in sims.values()] == [20, 20]
    assert stack.envoy_stats("clear_route_cache_ignored") == {"http.din.ext_proc.clear_route_cache_ignored": 0}


def test_of_a_header_that_we_set_there_is_one_value_and_it_is_ours(stack, sims):
    good = raw_chat(stack, "x-din-trace-id: trace-of-client-1", "x-din-trace-id: trace-of-client-2", "x-din-cluster: second")
    assert good.startswith(b"HTTP/1.1 200 ")
    [request] = seen(sims)
    traces = [value for name, value in request["headers"] if name == "x-din-trace-id"]
    assert len(traces) == 1
    assert b"x-din-trace-id: " + traces[0].encode() + b"\r\n" in good
    assert stack.envoy_stats("rejected_header_mutations") == {"http.din.ext_proc.rejected_header_mutations": 0}


@pytest.mark.parametrize("trace", ["a b c d e f g h", "x" * 129, "ü" * 20, "<script>alert()", "'; drop table", "x" * 20_000])
def test_a_trace_id_that_is_no_token_is_replaced(stack, sims, trace):
    reply = raw_chat(stack, f"x-din-trace-id: {trace}")
    assert reply.startswith(b"HTTP/1.1 200 ")
    [request] = seen(sims)
    assert len(dict(request["headers"])["x-din-trace-id"]) == 32
    assert trace.encode() not in reply


def raw_chat(stack: Stack, *lines: str) -> bytes:
    body = json.dumps(ask())
    return raw(stack, f"POST {PATH} HTTP/1.1", "content-type: application/json", f"content-length: {len(body)}", *lines, body=body)
