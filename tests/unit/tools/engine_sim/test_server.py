"""The modelled engine over HTTP: faults, load, disconnects, and the record it keeps."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import struct
import urllib.error

import openai
import pytest

from tests.support.servers import EngineSim
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    with EngineSim(model="m", decode_rate=400, max_num_seqs=8, auto_tool_choice=True, media_tokens=64) as running:
        yield running


@pytest.fixture
def engine(server):
    server.fail("")
    server.forget()
    return server


def post(engine, body, path=CHAT):
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def datas(body: bytes) -> list[str]:
    return [part.removeprefix("data: ") for part in body.decode().strip("\n").split("\n\n")]


def contents(body: bytes) -> int:
    return sum(1 for data in datas(body) if '"delta":{"content":' in data)


@pytest.mark.parametrize(
    ("fault", "status", "expected"),
    [
        ("unavailable", 503, "unavailable"),
        ("oom", 500, "CUDA out of memory"),
        ("throttle:retry_after_s=7", 429, "Too many"),
        ("unavailable:message=loading", 503, "loading"),
    ],
)
def test_a_switch_makes_the_engine_answer_with_an_error(engine, fault, status, expected):
    engine.fail(fault + (",count=1" if ":" in fault else ":count=1"))
    got = post(engine, BODY)
    assert got[0] == status
    assert expected in json.loads(got[2])["error"]["message"]
    assert got[1].get("retry-after") == ("7" if status == 429 else None)
    assert post(engine, BODY)[0] == 200, "it struck once"
    assert [record["outcome"] for record in engine.seen()[1]] == ["faulted", "completed"]


def test_any_answer_can_be_asked_for(engine):
    page = "<html>" + "x" * 80_000
    engine.ask("POST", "/_faults", {"faults": [{"kind": "reply", "status": 502, "headers": {"content-type": "text/html"}, "body": page}]})
    status, headers, body = post(engine, BODY)
    assert (status, headers["content-type"], body.decode()) == (502, "text/html", page)


def test_a_reset_comes_before_the_first_byte_or_after_so_many_tokens(engine):
    engine.fail("reset:count=1; reset:after=3")
    with pytest.raises(ConnectionResetError):
        post(engine, STREAM)
    engine.fail("reset:after=3")
    with socket.create_connection(("127.0.0.1", engine.port), timeout=10) as raw:
        sent = json.dumps(STREAM).encode()
        raw.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % CHAT.encode())
        raw.sendall(b"content-length: %d\r\n\r\n%s" % (len(sent), sent))
        got: list[bytes] = []
        with pytest.raises(ConnectionResetError):
            got.extend(iter(lambda: raw.recv(65536), None))
    # RST drops what the kernel has not sent yet: the last tokens may or may not have come.
    assert b"".join(got).count(b'"delta":{"content":') <= 3
    eventually(lambda: engine.gauge("num_requests_running") == 0)


def test_a_stream_can_be_truncated_without_its_end_marker(engine):
    engine.fail("truncate:after=4")
    status, _, body = post(engine, STREAM)
    assert (status, contents(body)) == (200, 4)
    assert b"[DONE]" not in body
    assert b'"usage"' not in body


@pytest.mark.parametrize(("options", "error"), [("", dict), ("text=true", str)])
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_can_come_inside_a_stream(engine, options, error, after):
    engine.fail(f"error_event:after={after},{options}")
    status, _, body = post(engine, STREAM)
    assert (status, contents(body)) == (200, after)
    assert datas(body)[-1] == "[DONE]"
    assert isinstance(json.loads(datas(body)[-2])["error"], error)


def test_foreign_text_can_be_put_into_a_stream(engine):
    engine.ask("POST", "/_faults", {"faults": [{"kind": "insert", "after": 2, "body": ": ping\n\n"}]})
    body = post(engine, STREAM)[2]
    assert body.count(b": ping\n\n") == 1
    assert (contents(body), datas(body)[-1]) == (6, "[DONE]")


def test_usage_can_be_wrong_or_missing_while_the_record_stays_true(engine):
    engine.fail("usage:factor=3")
    usage = json.loads(post(engine, BODY)[2])["usage"]
    assert usage["completion_tokens"] == 18
    engine.fail("no_usage")
    assert json.loads(post(engine, BODY)[2])["usage"] is None
    assert b'"usage"' not in post(engine, STREAM)[2]
    assert engine.seen()[0]["completion_tokens"] == 18


def test_a_slow_drip_sends_the_same_bytes(engine):
    quick = post(engine, {**STREAM, "max_tokens": 2})[2]
    engine.fail("drip:bytes=50,ms=1")
    assert [len(data) for data in datas(post(engine, {**STREAM, "max_tokens": 2})[2])] == [len(data) for data in datas(quick)]


def test_a_stalled_engine_accepts_says_nothing_and_looks_healthy(engine):
    engine.fail("stall")
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.3)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(BODY), {"content-type": "application/json"})
        with pytest.raises(TimeoutError):
            connection.getresponse()
    assert engine.ask("GET", "/health") == b""
    eventually(lambda: engine.seen()[1][-1]["outcome"] == "aborted")


def test_a_stream_can_go_silent_after_some_tokens(engine):
    engine.fail("stall:after=2")
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.3)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(STREAM), {"content-type": "application/json"})
        response = connection.getresponse()
        got: list[bytes] = []
        with pytest.raises(TimeoutError):
            got.extend(iter(response.readline, None))
    assert contents(b"".join(got)) == 2


def test_health_can_lie_either_way(engine):
    engine.fail("health:status=503")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        engine.ask("GET", "/health")
    assert post(engine, BODY)[0] == 200


def test_a_wrong_switch_is_refused_and_the_old_ones_stay(engine):
    engine.fail("unavailable")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        engine.fail("explode")
    assert post(engine, BODY)[0] == 503


def test_a_client_that_leaves_frees_its_slot_at_once(engine):
    long = {**STREAM, "max_tokens": 4000}
    connections = [http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10) for _ in range(10)]
    for connection in connections:
        connection.request("POST", CHAT, json.dumps(long), {"content-type": "application/json"})
    eventually(lambda: (engine.gauge("num_requests_running"), engine.gauge("num_requests_waiting")) == (8, 2))
    # One that waits, one that runs, and the rest: whatever they were doing, nothing of them stays.
    for connection in connections:
        connection.sock.close()
    eventually(lambda: (engine.gauge("num_requests_running"), engine.gauge("num_requests_waiting")) == (0, 0))
    totals, records = engine.seen()
    assert totals["aborted"] == 10
    assert all(record["completion_tokens"] < 4000 and record["ended"] is not None for record in records)
    assert engine.gauge("kv_cache_usage_perc") == 0


def test_a_client_that_resets_a_whole_answer_frees_its_slot_too(engine):
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
    connection.request("POST", CHAT, json.dumps({**BODY, "max_tokens": 4000}), {"content-type": "application/json"})
    eventually(lambda: engine.gauge("num_requests_running") == 1)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: engine.gauge("num_requests_running") == 0)
    assert engine.seen()[0]["aborted"] == 1


def test_the_record_holds_what_was_sent_and_what_it_really_cost(engine):
    body = {**BODY, "messages": [{"role": "user", "content": "ü [[tag]]"}], "n": 2}
    usage = json.loads(post(engine, body, CHAT + "?x=1")[2])["usage"]
    totals, (record,) = engine.seen()
    assert json.loads(record["body"]) == body
    assert (record["method"], record["path"], record["status"]) == ("POST", CHAT + "?x=1", 200)
    assert ["content-type", "application/json"] in record["headers"]
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert usage["completion_tokens"] == 12
    assert totals == {
        "requests": 1,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": 12,
        "completed": 1,
        **dict.fromkeys(("refused", "faulted", "aborted", "running"), 0),
    }


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_sooner_and_reports_it():
    long = {**BODY, "messages": [{"role": "user", "content": "word " * 2000}]}
    with EngineSim(model="m", prefix_cache=True, prefill_rate=2000) as engine:
        first, second = ((json.loads(post(engine, long)[2])["usage"], engine.gauge("request_prefill_time_seconds_sum")) for _ in range(2))
        hits = engine.gauge("prefix_cache_hits_total")
    assert first[0]["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = second[0]["prompt_tokens_details"]["cached_tokens"]
    assert second[0]["prompt_tokens"] - 16 <= cached == hits
    assert second[1] - first[1] < first[1] / 2


def test_every_token_of_many_streams_is_counted(engine):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda n: post(engine, {**STREAM, "max_tokens": n})[2], range(1, 33)))
    usages = [json.loads(datas(body)[-2])["usage"] for body in bodies]
    assert [usage["completion_tokens"] for usage in usages] == list(range(1, 33))
    assert [contents(body) for body in bodies] == list(range(1, 33))
    totals, _ = engine.seen()
    assert totals["completion_tokens"] == sum(range(1, 33))
    assert totals["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)


def test_the_official_client_is_content(engine):
    client = openai.OpenAI(base_url=engine.url + "/v1", api_key="x", max_retries=0)
    with client:
        whole = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=6)
        assert whole.choices[0].message.content
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        tool = {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
        }
        called = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], tools=[tool])
        (call,) = called.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "example"})
        parts = list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], tools=[tool], stream=True))
        arguments = "".join(
            part.choices[0].delta.tool_calls[0].function.arguments or "" for part in parts if part.choices[0].delta.tool_calls
        )
        assert json.loads(arguments) == {"city": "example"}
        logged = client.completions.create(model="m", prompt="hi", max_tokens=3, logprobs=2)
        assert len(logged.choices[0].logprobs.tokens) == 3
        assert client.models.list().data[0].id == "m"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'"hello"',
        b"\xff\xfe{",
        b'{"messages":[{"role":"user","content":"cut \\ud83d"}],"max_tokens":2}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":Infinity}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"messages":["x", null, 7]}',
        b'{"messages":[{"role":"user","content":[null, 7, "x"]}],"max_tokens":2}',
        b'{"messages":[{"role":"user","tool_calls":[7]}],"max_tokens":2}',
        b'{"messages":[{"role":"user","content":"x"}],"tools":[7],"tool_choice":"required"}',
        b'{"messages":[{"role":"user","content":"x"}],"n":100000,"max_tokens":2}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":[7,"a"],"max_tokens":2}',
    ],
)
def test_no_body_makes_the_engine_fail(engine, body):
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        assert connection.getresponse().status in (200, 400)
    assert post(engine, BODY)[0] == 200


def test_a_stopped_engine_tells_its_streams_that_they_are_aborted():
    with EngineSim(decode_rate=50) as engine:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps({**STREAM, "max_tokens": 2000}), {"content-type": "application/json"})
            eventually(lambda: engine.gauge("num_requests_running") == 1)
            engine.process.terminate()
            body = connection.getresponse().read()
        assert b'"finish_reason":"abort"' in body
        assert body.endswith(b"data: [DONE]\n\n")
        assert engine.process.wait(10) == 0
