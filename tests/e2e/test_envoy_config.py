"""The rendered configuration in a real Envoy: where requests land, what is taken off them, and what Envoy answers by itself."""

import asyncio
import json
import random
import socket
import string
import time

import httpx
import pytest
from aiohttp import web

from din_extproc.control.listener import EDIT_ROOM_BYTES
from din_extproc.control.topology import HealthCheck, Outlier, Retry, Timeouts
from din_extproc.domain.verdict import RefusalCode, error_body
from tests.support.rig import Answer, Reply, Rig, Route, fetch, rig
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

FORBIDDEN = {
    "x-din-cluster": "pool",
    "x-din-endpoint": "10.0.0.5:22",
    "x-din-target": "10.0.0.5:22",
    "x-din-tenant": "admin",
    "X-DIN-Route": "elsewhere",
    "x-din-": "nameless",
    "x-din-trace-ids": "longer than an allowed name",
    "x-din-trace-i": "shorter than an allowed name",
    "x-gateway-destination-endpoint": "10.0.0.5:22",
    "x-envoy-original-dst-host": "10.0.0.5:22",
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-retry-on": "5xx",
    "x-envoy-max-retries": "9",
    "x-bxagent-degraded": "true",
    "x_din_cluster": "pool",
    "x-request-id": "junk",
    "din-kept-x-din-cluster": "pool",
}
INTENT = {
    "x-din-model-version": ">=2025.3,<2026",
    "x-din-timeout-ms": "7700",
    "x-din-priority": "batch",
    "x-din-trace-id": "abc",
    "x-task-tier": "e",
}


def refuse(_headers, _body):
    return Answer(404, b'{"own":true}', {"content-type": "application/json"})


def leaked(headers: dict[str, str]) -> set[str]:
    """Names of forbidden headers that arrived with the client's value."""
    return {name for name, value in FORBIDDEN.items() if headers.get(name.lower()) == value}


async def until_stat(gateway: Rig, name: str, value: int) -> None:
    """Wait until one of Envoy's figures has this value."""
    deadline = time.monotonic() + 10
    while await gateway.envoy.stat(name) != value:
        assert time.monotonic() < deadline, f"{name} is not {value}"


def assert_error(reply: Reply, code: RefusalCode, status: int | None = None) -> dict:
    """The reply is the gateway's error body, to the last key."""
    body = reply.json()
    message = body["detail"]
    assert reply.status == body["status"] == (status or code.status)
    assert reply["content-type"] == "application/json"
    assert body == {
        **httpx.Response(200, content=error_body(code, message, trace_id=body["trace_id"], instance=body["instance"])).json(),
        "status": reply.status,
    }
    assert message
    return body


async def sleepy(_request):
    await asyncio.sleep(30)


async def busy(_request):
    return web.json_response({"error": "busy"}, status=503)


async def resetting(request):
    request.transport.abort()
    return web.Response()


# What a client may not send


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("OPTIONS", "/v1/models"), ("HEAD", "/x")]
)
async def test_internal_headers_of_a_client_are_gone_before_the_sidecar_sees_the_request(method, path):
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        reply = await gateway.fetch(method, path, {**FORBIDDEN, **INTENT}, b"{}" if method == "POST" else None)
        assert reply.status == 200
        [head], [seen] = gateway.sidecar.heads, gateway.nodes[0].seen
        for headers in (head, seen.headers, {name.lower(): value for name, value in reply.headers}):
            assert leaked(headers) == set()
        assert INTENT.items() <= head.items()
        assert INTENT.items() <= seen.headers.items()
        assert {name for name in head if name.startswith("x-din-")} == {name for name in INTENT if name.startswith("x-din-")}


async def test_internal_headers_do_not_choose_a_route_when_the_sidecar_is_down():
    async with rig(2, sidecar=False, fail_open_pool="pool") as gateway:
        assert (await gateway.chat({**FORBIDDEN, **INTENT})).status == 200
        [seen] = gateway.nodes[0].seen + gateway.nodes[1].seen
        assert leaked(seen.headers) == set()
        assert_error(await gateway.fetch("GET", "/elsewhere", FORBIDDEN), RefusalCode.SIDECAR_UNAVAILABLE)
    async with rig(1, sidecar=False) as gateway:
        for method in ("POST", "GET", "OPTIONS"):
            assert_error(await gateway.fetch(method, "/v1/chat/completions", FORBIDDEN), RefusalCode.SIDECAR_UNAVAILABLE)
        assert gateway.nodes[0].seen == []


async def test_every_other_name_of_the_family_is_removed_whatever_it_is():
    pick = random.Random(7)
    cuts = [name[:end] for name in INTENT for end in range(len("x-din-"), len(name)) if name.startswith("x-din-")]
    longer = [f"{name}{letter}" for name in INTENT if name.startswith("x-din-") for letter in "0z-"]
    made_up = [f"x-din-{''.join(pick.choices(string.ascii_lowercase + string.digits + '-', k=pick.randint(1, 20)))}" for _ in range(60)]
    names = sorted({*cuts, *longer, *made_up} - set(INTENT))
    async with rig(1) as gateway:
        gateway.sidecar.decide = refuse
        for start in range(0, len(names), 60):
            await gateway.fetch("GET", "/v1/models", dict.fromkeys(names[start : start + 60], "x") | {"x-din-priority": "batch"})
        assert gateway.sidecar.heads
        for head in gateway.sidecar.heads:
            assert [name for name in head if name.startswith("x-din-")] == ["x-din-priority"]


async def test_neither_a_tenants_key_nor_the_routing_headers_reach_a_node():
    secrets = {
        "authorization": "Bearer sk-test-SECRET",
        "x-api-key": "SECRET",
        "api-key": "SECRET",
        "cookie": "s=SECRET",
        "accept-encoding": "gzip",
    }
    async with rig(2) as gateway:
        gateway.nodes[0].behaviour = busy
        more = {"x-envoy-upstream-rq-timeout-ms": "20000", "x-din-trace-id": "made-here"}
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(*gateway.nodes, headers=more)
        assert (await gateway.chat(secrets)).status == 200
        assert gateway.sidecar.heads[0]["authorization"] == "Bearer sk-test-SECRET"
        for node in gateway.nodes:
            [seen] = node.seen
            assert not {name for name, value in seen.header_list if "SECRET" in value or name in secrets}
            assert not {name for name, _ in seen.header_list if name in ("x-din-cluster", "x-din-endpoint") or name.startswith("x-envoy-")}
            assert seen.headers["x-din-trace-id"] == "made-here"
        assert await gateway.envoy.stat("http.din.ext_proc.rejected_header_mutations") == 0


# Where it lands


async def test_a_request_lands_on_the_chosen_node_every_time():
    async with rig(3) as gateway:
        for turn in range(30):
            node = gateway.nodes[turn * 7 % 3]
            gateway.sidecar.decide = lambda _headers, _body, node=node: gateway.toward(node)
            reply = await gateway.chat()
            assert (reply.json()["node"], reply["x-din-node-id"]) == (node.name, node.name)
            assert reply["x-din-model-version"] == f"2025.3.{node.name[-1]}"
            assert int(reply["x-din-exec-time-ms"]) >= 0


async def test_a_decision_that_does_not_refresh_the_route_is_noticed():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0], clear_route_cache=False)
        assert_error(await gateway.chat(), RefusalCode.SIDECAR_UNAVAILABLE)
        assert gateway.nodes[0].seen == []


async def test_a_dead_node_is_passed_over_and_the_headers_name_the_node_that_answered():
    async with rig(3, dead=(0,), outlier=Outlier(consecutive_connect_failures=10_000)) as gateway:
        dead, first, second = gateway.nodes
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(dead, second)
        replies = [await gateway.chat() for _ in range(100)]
        assert [reply.status for reply in replies] == [200] * 100
        assert {reply["x-din-node-id"] for reply in replies} == {second.name}
        assert (len(first.seen), len(second.seen)) == (0, 100)
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(dead)
        assert [(await gateway.chat()).status for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("failing", [busy, resetting])
async def test_a_node_that_fails_before_its_first_byte_is_asked_once_and_another_answers(failing):
    async with rig(2, outlier=Outlier(consecutive_connect_failures=10_000)) as gateway:
        bad, good = gateway.nodes
        bad.behaviour = failing
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(bad, good)
        for _ in range(20):
            reply = await gateway.chat(body=b'{"model":"m","x":"' + b"y" * 200_000 + b'"}')
            assert (reply.status, reply["x-din-node-id"]) == (200, good.name)
        assert (len(bad.seen), len(good.seen)) == (20, 20)
        assert bad.seen[0].body == good.seen[0].body
        assert len(gateway.sidecar.heads) == 20


async def test_nothing_is_retried_once_the_first_byte_has_left():
    async def three_then_reset(request):
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(3):
            await answer.write(b"data: {}\n\n")
        await asyncio.sleep(0.1)
        request.transport.abort()
        return answer

    async with rig(2, retry=Retry(attempts=2)) as gateway:
        gateway.nodes[0].behaviour = three_then_reset
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(*gateway.nodes)
        with pytest.raises(Exception, match=r"IncompleteRead|ConnectionReset|reset"):
            await gateway.chat()
        assert gateway.nodes[1].seen == []


async def test_a_client_error_of_a_node_is_passed_on_and_not_retried():
    async def bad_request(_request):
        return web.json_response({"error": {"message": "no"}}, status=400)

    async def limited(_request):
        return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "7"})

    async with rig(2) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(*gateway.nodes)
        for behaviour, status in ((bad_request, 400), (limited, 429)):
            gateway.nodes[0].behaviour = behaviour
            reply = await gateway.chat()
            assert (reply.status, reply["x-din-node-id"]) == (status, "node-0")
        assert reply["retry-after"] == "7"
        assert gateway.nodes[1].seen == []


def route_to_missing_node(_headers, _body):
    """A decision whose node has left the pool: Envoy falls back to one of the others."""
    return Route("pool", ["10.255.255.1:9"])


async def test_a_node_without_a_port_is_ejected_from_the_fallback_and_an_empty_pool_says_so():
    async with rig(2, outlier=Outlier(consecutive_connect_failures=2), retry=Retry(attempts=0)) as gateway:
        bad, good = gateway.nodes
        await bad.stop()
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(bad)
        assert [(await gateway.chat()).status for _ in range(2)] == [503, 503]
        await until_stat(gateway, "cluster.pool.membership_healthy", 1)
        gateway.sidecar.decide = route_to_missing_node
        assert [(await gateway.chat()).json() for _ in range(10)] == [{"node": good.name}] * 10
        await good.stop()
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(good)
        assert [(await gateway.chat()).status for _ in range(2)] == [503, 503]
        await until_stat(gateway, "cluster.pool.membership_healthy", 0)
        gateway.sidecar.decide = route_to_missing_node
        reply = await gateway.chat()
        assert_error(reply, RefusalCode.NO_HEALTHY_NODE)
        assert reply["retry-after"] == "1"


@pytest.mark.parametrize("behaviour", ["busy", "resetting"])
async def test_a_node_that_answers_badly_or_breaks_connections_is_not_ejected_by_envoy(behaviour):
    async with rig(2, outlier=Outlier(consecutive_connect_failures=2), retry=Retry(attempts=0)) as gateway:
        bad, _ = gateway.nodes
        bad.behaviour = {"busy": busy, "resetting": resetting}[behaviour]
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(bad)
        assert {(await gateway.chat()).status for _ in range(8)} == {503 if behaviour == "busy" else 502}
        assert await gateway.envoy.stat("cluster.pool.outlier_detection.ejections_enforced_total") == 0
        assert len(bad.seen) == 8


async def test_a_node_that_fails_its_health_check_leaves_the_fallback_and_comes_back():
    async with rig(2, health_check=HealthCheck(interval_ms=50, timeout_ms=1_000, unhealthy_after=1)) as gateway:
        sick, well = gateway.nodes
        gateway.sidecar.decide = route_to_missing_node
        sick.healthy = False
        await until_stat(gateway, "cluster.pool.membership_healthy", 1)
        assert [(await gateway.chat()).json() for _ in range(10)] == [{"node": well.name}] * 10
        sick.healthy = True
        await until_stat(gateway, "cluster.pool.membership_healthy", 2)
        assert {(await gateway.chat()).json()["node"] for _ in range(30)} == {sick.name, well.name}


# Bodies


async def test_bodies_up_to_the_cap_pass_and_larger_ones_get_our_413():
    cap = 2 << 20
    async with rig(1, body_limit_bytes=cap) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        for size in (32_769, 1_100_000, cap):
            assert (await gateway.chat(body=b"x" * size)).status == 200
            assert len(gateway.nodes[0].seen[-1].body) == size
        chunks = [b"x" * 65_536] * (cap // 65_536)
        assert (await gateway.chat(body=iter(chunks), encode_chunked=True, headers={"transfer-encoding": "chunked"})).status == 200
        for body in (b"x" * (cap + EDIT_ROOM_BYTES + 1), iter([*chunks, b"x" * EDIT_ROOM_BYTES, b"x"])):
            framing = {} if isinstance(body, bytes) else {"transfer-encoding": "chunked"}
            reply = await gateway.chat(framing, body, encode_chunked=bool(framing))
            problem = assert_error(reply, RefusalCode.REQUEST_TOO_LARGE)
            assert problem["trace_id"] == reply["x-din-trace-id"]
            assert problem["instance"] == "/v1/chat/completions"
        assert len(gateway.nodes[0].seen) == 4


@pytest.mark.parametrize("body", [b'{"model":"a-much-longer-name-than-before"}', b"{}", b'{"model":"n"}', '{"model":"多语言😀"}'.encode()])
async def test_content_length_is_right_after_the_body_changed(body):
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0], body=body)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.envoy.port}") as client:
            for _ in range(3):
                assert (await client.post("/v1/chat/completions", content=b'{"model":"m"}')).status_code == 200
        for seen in gateway.nodes[0].seen:
            assert (seen.body, seen.headers["content-length"]) == (body, str(len(body)))


# Paths and methods


SPELLINGS = [
    "//v1/chat/completions",
    "/v1/chat%2Fcompletions",
    "/V1/chat/completions",
    "/v1/chat/completions/",
    "/v1/./chat/../chat/completions",
    "/v1/%63hat/completions",
    "/v1/chat/completions?api-version=1",
    "/v1\\chat\\completions",
    "/v1/chat%5ccompletions",
]


async def test_no_spelling_of_a_path_is_tidied_up_before_the_sidecar_sees_it():
    async with rig(1) as gateway:
        gateway.sidecar.decide = refuse
        for path in SPELLINGS:
            reply = await gateway.fetch("POST", path, body=b"{}")
            assert (reply.status, reply.body) == (404, b'{"own":true}')
        assert [head[":path"] for head in gateway.sidecar.heads] == SPELLINGS
        assert_error(await gateway.fetch("POST", "/v1/chat/completions#x", body=b"{}"), RefusalCode.PATH_NOT_FOUND)
        assert len(gateway.sidecar.heads) == len(SPELLINGS)
        assert gateway.nodes[0].seen == []


async def test_requests_without_a_body_are_answered_in_the_header_phase():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: Answer(200, b'{"data":[]}', {"content-type": "application/json"})
        head, get = await gateway.fetch("HEAD", "/v1/models"), await gateway.fetch("GET", "/v1/models")
        assert (head.status, head.body, get.body) == (200, b"", b'{"data":[]}')
        assert head["content-length"] == get["content-length"] == "11"
        assert (await gateway.fetch("POST", "/v1/chat/completions", {"content-length": "0"})).status == 200
        assert (await gateway.fetch("GET", "/v1/models", {"expect": "100-continue"})).status == 200


async def test_a_client_may_speak_http2_without_tls():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        async with httpx.AsyncClient(http1=False, http2=True, base_url=f"http://127.0.0.1:{gateway.envoy.port}") as client:
            got = await asyncio.gather(
                *(client.post("/v1/chat/completions", content=b"{}", headers={"x-din-cluster": "no"}) for _ in range(20))
            )
            assert {(reply.status_code, reply.http_version) for reply in got} == {(200, "HTTP/2")}
            assert (await client.get("/v1/models")).status_code == 200


NOT_HTTP = [
    (400, b"GET v1/models HTTP/1.1\r\nhost: a\r\n\r\n"),
    (400, b"POST /v1/models HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"),
    (431, b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"),
    (431, b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: a\r\n" * 200 + b"\r\n"),
    (431, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n" + b"x: a\r\n" * 200 + b"\r\n"),
    (426, b"GET /v1/models HTTP/1.0\r\n\r\n"),
    (426, b"POST /v1/models HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}"),
]


async def exchange(gateway: Rig, request_bytes: bytes) -> tuple[int, bytes]:
    """Status and body of what the gateway sends before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.envoy.port)
    writer.write(request_bytes)
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.mark.parametrize(("status", "request_bytes"), NOT_HTTP)
async def test_a_head_that_envoy_refuses_gets_its_answer_with_our_body_and_is_logged(status, request_bytes):
    async with rig(1) as gateway:
        got, body = await exchange(gateway, request_bytes)
        assert (got, json.loads(body)["status"]) == (status, status)
        assert json.loads(body)["error"]["code"] == ("upgrade_required" if status == 426 else "invalid_request")
        [entry] = await gateway.logged(1)
        assert entry["response"]["response_code"] == status
        assert gateway.nodes[0].seen == []


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_there_is_room_for_the_gateways_own_headers_and_a_head_without_it_is_a_431(method):
    async with rig(1) as gateway:
        own = {f"x-din-{index}": "v" for index in range(12)}
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0], headers=own, response_headers={"x-own": "1"})
        for count, status in ((92, 200), (100, 200), (112, 431), (120, 431)):
            lines = "".join(f"x-{index}: v\r\n" for index in range(count))
            length = "content-length: 2\r\n" if method == "POST" else ""
            sent = f"{method} /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{length}{lines}\r\n{'{}' if length else ''}"
            got, body = await exchange(gateway, sent.encode())
            assert got == status, body
            assert status == 200 or json.loads(body)["error"]["code"] == "invalid_request"
        assert len(gateway.nodes[0].seen) == 2


async def test_an_answer_with_too_many_headers_is_the_nodes_fault():
    async with rig(1, retry=Retry(attempts=0)) as gateway:
        many = {f"x-{index}": "v" for index in range(90)}
        gateway.nodes[0].behaviour = lambda _request: _reply(many)
        own = {f"x-own-{index}": "v" for index in range(30)}
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0], response_headers=own)
        assert assert_error(await gateway.chat(), RefusalCode.UPSTREAM_ERROR, 502)["error"]


async def _reply(headers: dict[str, str]) -> web.Response:
    return web.json_response({}, headers=headers)


async def test_what_a_client_says_of_its_connection_and_of_itself_reaches_no_node():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        sent_headers = {
            "te": "trailers",
            "x-real-ip": "203.0.113.9",
            "forwarded": "for=203.0.113.9",
            "connection": "keep-alive, x-hop",
            "x-hop": "1",
        }
        assert (await gateway.chat(sent_headers)).status == 200
        assert not sent_headers.keys() & gateway.nodes[0].seen[0].headers.keys()


async def test_a_websocket_handshake_is_an_ordinary_request_to_the_sidecar_and_leaves_the_connection_usable():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda headers, _body: Answer(426 if "sec-websocket-key" in headers else 200, b"{}")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.envoy.port)
        asked = "connection: Upgrade\r\nupgrade: {}\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
        for lines, status in ((asked.format("websocket"), b"426"), (asked.format("WebSocket"), b"426"), ("", b"200")):
            writer.write(f"GET /v1/responses HTTP/1.1\r\nhost: a\r\n{lines}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            await reader.readexactly(2)
        writer.close()


async def test_the_health_path_is_asked_of_the_sidecar_until_envoy_drains():
    async with rig(1, health_path="/healthz") as gateway:
        gateway.sidecar.decide = lambda _headers, _body: Answer(200, b"ok")
        assert (await gateway.fetch("GET", "/healthz")).status == 200
        await fetch(gateway.envoy.admin_port, "POST", "/healthcheck/fail")
        draining = await gateway.fetch("GET", "/healthz")
        assert_error(draining, RefusalCode.INTERNAL_ERROR, 503)
        assert (await gateway.fetch("GET", "/v1/models")).status == 200
        await fetch(gateway.envoy.admin_port, "POST", "/healthcheck/ok")
        await gateway.sidecar.stop()
        assert (await gateway.fetch("GET", "/healthz")).status == 503


# What Envoy answers by itself


async def test_envoys_own_answers_bear_our_error_body():
    timeouts = Timeouts(message_ms=400, max_message_ms=400, node_idle_ms=300, request_ms=600)
    async with rig(3, dead=(2,), timeouts=timeouts, retry=Retry(attempts=0)) as gateway:
        node, other, dead = gateway.nodes
        node.behaviour, other.behaviour = sleepy, resetting
        for decision, code in (
            (gateway.toward(dead), RefusalCode.NO_HEALTHY_NODE),
            (Route("no-such-pool", ["10.0.0.1:1"]), RefusalCode.NO_HEALTHY_NODE),
            (gateway.toward(node), RefusalCode.UPSTREAM_TIMEOUT),
            (gateway.toward(node, headers={"x-envoy-upstream-rq-timeout-ms": "150"}), RefusalCode.UPSTREAM_TIMEOUT),
            (gateway.toward(other), RefusalCode.UPSTREAM_ERROR),
        ):
            gateway.sidecar.decide = lambda _headers, _body, decision=decision: decision
            reply = await gateway.chat({"x-din-trace-id": 'a"b\\c'})
            assert assert_error(reply, code)["trace_id"] == 'a"b\\c'
            assert (reply["retry-after"] == "1") == (code is RefusalCode.NO_HEALTHY_NODE)
        gateway.sidecar.delay_s = 1
        problem = assert_error(await gateway.fetch("POST", "/v1/embeddings?key=SECRET", body=b"{}"), RefusalCode.SIDECAR_UNAVAILABLE)
        assert problem["instance"] == "/v1/embeddings"
        gateway.sidecar.delay_s = 0
        late = await gateway.fetch("POST", "/v1/embeddings", {"content-length": "9"})
        assert assert_error(late, RefusalCode.INVALID_REQUEST, 408)["trace_id"] == late["x-din-trace-id"]
        upgrade = await gateway.fetch("GET", "/v1/models", {"connection": "upgrade", "upgrade": "mqtt"})
        assert_error(upgrade, RefusalCode.INVALID_REQUEST, 403)


@pytest.mark.parametrize("details", ["", "din_refused"])
async def test_what_the_sidecar_answered_passes_unchanged(details):
    async with rig(1) as gateway:
        for status in (400, 401, 404, 408, 413, 415, 429, 431, 500, 502, 503, 504):
            own = Answer(status, b'{"own":true}', {"content-type": "application/problem+json", "retry-after": "5"}, details)
            gateway.sidecar.decide = lambda _headers, _body, own=own: own
            reply = await gateway.chat()
            assert (reply.status, reply.body, reply["content-type"], reply["retry-after"]) == (
                status,
                own.body,
                "application/problem+json",
                "5",
            )
            assert reply["x-bxagent-degraded"] is None


async def test_without_the_sidecar_requests_are_refused_fast_and_served_again_when_it_is_back():
    async with rig(1) as gateway:
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        assert (await gateway.chat()).status == 200
        await gateway.sidecar.stop()
        for _ in range(3):
            reply = await gateway.chat()
            assert_error(reply, RefusalCode.SIDECAR_UNAVAILABLE)
            assert reply["retry-after"] == "1"
        await gateway.sidecar.start()
        deadline = time.monotonic() + 5
        while (await gateway.chat()).status != 200:
            assert time.monotonic() < deadline
        assert {seen.headers["content-length"] for seen in gateway.nodes[0].seen} == {"13"}


async def test_an_open_gateway_serves_known_paths_from_one_pool_and_marks_the_answer():
    async with rig(1, fail_open_pool="pool") as gateway:
        gateway.sidecar.decide = lambda _headers, _body: Answer(429, b"{}")
        refused = await gateway.chat()
        assert (refused.status, refused["x-bxagent-degraded"]) == (429, None)
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        assert (await gateway.chat())["x-bxagent-degraded"] is None
        await gateway.sidecar.stop()
        open_reply = await gateway.chat({"authorization": "Bearer sk-test-SECRET"})
        assert (open_reply.status, open_reply["x-bxagent-degraded"], open_reply["x-din-degraded-reason"]) == (
            200,
            "true",
            "limits_bypassed",
        )
        assert open_reply["x-din-node-id"] == "node-0"
        assert "authorization" not in gateway.nodes[0].seen[-1].headers
        for path in ("/v1/chat/completions/", "//v1/chat/completions", "/metrics", "/v1/models/m"):
            assert_error(await gateway.fetch("POST", path, body=b"{}"), RefusalCode.SIDECAR_UNAVAILABLE)
        assert len(gateway.nodes[0].seen) == 2


# Browsers


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_a_preflight_is_answered_without_key_and_sidecar_and_errors_are_readable_in_browsers():
    async with rig(1, cors_origins=("https://app.example", "https://*.team.example")) as gateway:
        for origin in ("https://app.example", "https://a.team.example"):
            reply = await gateway.fetch("OPTIONS", "/v1/chat/completions", {"origin": origin, **PREFLIGHT})
            assert (reply.status, reply.body, reply["access-control-allow-origin"]) == (204, b"", origin)
            assert "authorization" in reply["access-control-allow-headers"]
            assert "POST" in reply["access-control-allow-methods"]
        assert gateway.sidecar.heads == []
        gateway.sidecar.decide = lambda _headers, _body: Answer(429, b"{}", {"retry-after": "3"})
        reply = await gateway.chat({"origin": "https://app.example"})
        assert (reply["access-control-allow-origin"], reply["retry-after"]) == ("https://app.example", "3")
        assert {"retry-after", "x-ratelimit-remaining-tokens", "x-din-trace-id"} <= set(reply["access-control-expose-headers"].split(","))
        for origin in ("https://evil.example", "https://appxexample", "https://a.team.example.evil.example"):
            assert (await gateway.chat({"origin": origin}))["access-control-allow-origin"] is None
            assert (await gateway.fetch("OPTIONS", "/v1/models", {"origin": origin, **PREFLIGHT})).status == 429
        await gateway.sidecar.stop()
        down = await gateway.chat({"origin": "https://app.example"})
        assert_error(down, RefusalCode.SIDECAR_UNAVAILABLE)
        assert down["access-control-allow-origin"] == "https://app.example"


async def test_a_node_does_not_open_the_gateway_to_web_pages():
    async def open_to_all(_request):
        return web.json_response({}, headers={"access-control-allow-origin": "*", "access-control-allow-credentials": "true"})

    async with rig(1) as gateway:
        gateway.nodes[0].behaviour = open_to_all
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        reply = await gateway.chat({"origin": "https://evil.example"})
        assert [name for name, _ in reply.headers if name.startswith("access-control-")] == []


# Streams and accounts


async def test_a_node_can_not_speak_in_the_gateways_name_nor_set_cookies():
    forged = {
        "x-din-tenant": "admin",
        "x-din-trace-id": "forged",
        "x-din-node-id": "another",
        "x-bxagent-degraded": "true",
        "x-ratelimit-remaining-tokens": "0",
        "x-envoy-overloaded": "true",
        "x-envoy-immediate-health-check-fail": "true",
        "set-cookie": "session=1",
    }

    async def forging(_request):
        return web.json_response({"kept": True}, headers={**forged, "x-engine-own": "kept"})

    async with rig(1) as gateway:
        gateway.nodes[0].behaviour = forging
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        for _ in range(2):
            reply = await gateway.chat({})
            assert reply.status == 200
            assert [each for each in reply.headers if each in forged.items()] == []
            assert reply["x-engine-own"] == "kept"


async def test_a_stream_passes_as_it_comes_and_the_sidecars_stream_lasts_as_long():
    release = asyncio.Event()

    async def stream(request):
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await release.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async with rig(1) as gateway:
        gateway.nodes[0].behaviour = stream
        limits = {"x-ratelimit-remaining-requests": "9"}
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0], response_headers=limits)
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.envoy.port}") as client,
            client.stream("POST", "/v1/chat/completions", content=b"{}") as reply,
        ):
            assert reply.headers["x-ratelimit-remaining-requests"] == "9"
            chunks = reply.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            assert gateway.sidecar.open_streams == 1
            release.set()
            assert await anext(chunks) == b"data: [DONE]\n\n"
            async for rest in chunks:
                assert rest == b""
        await until(lambda: gateway.sidecar.open_streams == 0)


async def test_a_client_that_leaves_frees_the_node_and_the_sidecars_stream():
    gone = asyncio.Event()

    async def endless(request):
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"data: {}\n\n")
                await asyncio.sleep(0.02)
        except (ConnectionResetError, asyncio.CancelledError):
            gone.set()
            raise

    async with rig(1) as gateway:
        gateway.nodes[0].behaviour = endless
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(gateway.nodes[0])
        with socket.create_connection(("127.0.0.1", gateway.envoy.port)) as client:
            await asyncio.to_thread(client.sendall, b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
            assert await asyncio.to_thread(client.recv, 100)
        async with asyncio.timeout(5):
            await gone.wait()
        await until(lambda: gateway.sidecar.open_streams == 0)
        [entry] = await gateway.logged(1)
        assert entry["common_properties"]["response_flags"]["downstream_connection_termination"]


async def test_every_exchange_is_logged_with_the_sidecar_s_metadata_and_without_secrets():
    async with rig(2) as gateway:
        gateway.nodes[0].behaviour = busy
        gateway.sidecar.decide = lambda _headers, _body: gateway.toward(
            *gateway.nodes, metadata={"tenant": "finance", "reserved_tokens": 120.0}
        )
        await gateway.chat({"authorization": "Bearer sk-test-SECRET", "x-din-trace-id": "t-1"})
        [entry] = await gateway.logged(1)
        common = entry["common_properties"]
        assert common["metadata"]["filter_metadata"]["din"] == {"tenant": "finance", "reserved_tokens": 120.0}
        assert (common["upstream_request_attempt_count"], common["route_name"], common["upstream_cluster"]) == (2, "pool", "pool")
        assert entry["request"]["request_headers"] == {"x-din-trace-id": "t-1"}
        assert entry["request"]["request_id"]
        assert entry["response"]["response_headers"]["x-din-node-id"] == "node-1"
        gateway.sidecar.decide = refuse
        await gateway.chat({"authorization": "Bearer sk-test-SECRET"})
        assert (await gateway.logged(2))[1]["response"]["response_code"] == 404
        assert "SECRET" not in str(gateway.sidecar.log)
