"""What a node is asked: the client's bytes, or the same in the engine's own words."""

import json

import pytest

from din_extproc.domain.node import Pool
from din_extproc.domain.request import Operation, Priority, RequestHead
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.node_request import build_node_request
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.southbound.engines import ENGINES

CHAT = "/v1/chat/completions"


def asked(body: bytes, *, path: str = CHAT, **pool):
    reading = parse_request(RequestHead("POST", path, {}), body, lambda _name: TokenCalibrator(), 1 << 20)
    assert isinstance(reading, ParsedRequest), reading
    settings = {"engine": "vllm", "scheduler": "round_robin", "nodes": (), **pool}
    return build_node_request(reading, reading.intent, Pool("p", "physical", "physical", **settings))


def test_a_parameter_with_another_name_is_moved_and_all_else_stays():
    body = b'{"repetition_penalty": 1.1 , "model":"physical", "messages":[], "min_tokens":2}'
    made = asked(body, engine="llamacpp", unmappable="drop")
    assert made.body == b'{"repeat_penalty":1.1, "model":"physical", "messages":[]}'
    assert made.headers == (("x-din-dropped-parameters", "min_tokens"),)
    refused = asked(body, engine="llamacpp")
    assert isinstance(refused, Refusal)
    assert refused.param == "min_tokens"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"n":2,"model":"physical","messages":[]}', b'{"model":"physical","messages":[]}'),
        (b'{"model":"physical","messages":[],"n":2}', b'{"model":"physical","messages":[]}'),
        (b'{ "n" : 2 , "top_k" : 4,\n"model":"physical","messages":[]}', b'{\n"model":"physical","messages":[]}'),
        (b'{"model":"physical", "n":2 ,"messages":[] }', b'{"model":"physical","messages":[] }'),
        (b'{"model":"physical","n":1,"messages":[]}', b'{"model":"physical","n":1,"messages":[]}'),
    ],
)
def test_what_is_dropped_goes_with_its_comma_and_what_asks_for_nothing_stays(body, left):
    assert asked(body, engine="ollama", unmappable="drop").body == left


def test_of_a_form_only_the_models_name_changes():
    body = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\nalias\r\n--b--\r\n' % b"model"
    head = RequestHead("POST", Operation.TRANSCRIPTIONS.value, {"content-type": "multipart/form-data; boundary=b"})
    reading = parse_request(head, body, lambda _name: TokenCalibrator(), 1 << 20)
    assert isinstance(reading, ParsedRequest), reading
    made = build_node_request(reading, reading.intent, Pool("p", "physical", "physical", engine="vllm", scheduler="round_robin", nodes=()))
    assert (made.body, made.path, made.edits) == (body.replace(b"alias", b"physical"), head.path, {"model": b"physical"})
    same = build_node_request(reading, reading.intent, Pool("p", "alias", "alias", engine="vllm", scheduler="round_robin", nodes=()))
    assert same.body is body


def test_a_pool_that_refuses_stream_options_is_not_sent_any():
    body = b'{"model":"physical","messages":[],"stream":true,"stream_options":{"include_usage":true}}'
    made = asked(body, stream_usage=False, unmappable="drop")
    assert (made.body, made.headers) == (
        b'{"model":"physical","messages":[],"stream":true}',
        (("x-din-dropped-parameters", "stream_options"),),
    )
    assert asked(body, stream_usage=False).body == made.body, "an answer without its usage is better than none"


def test_a_native_pool_is_asked_in_its_engines_words():
    body = b'{"model":"alias","messages":[{"role":"user","content":"half \\ud83d"}],"stream":true,"max_tokens":3}'
    made = asked(body, engine="ollama", api="native")
    assert (made.path, made.strips_usage, made.dialect) == ("/api/chat", True, ENGINES["ollama"].native)
    assert json.loads(made.body)["messages"] == [{"role": "user", "content": "half \ufffd"}]
    assert asked(body, engine="tgi", api="native").path == CHAT


@pytest.mark.parametrize(
    ("pool", "extra", "param"),
    [
        ({"engine": "ollama", "api": "native"}, b'"temperature":1e400', None),
        ({"engine": "ollama", "api": "native"}, b'"foo":{"a":[-1e999]}', None),
        ({"engine": "ollama", "api": "native"}, b'"user":"half \\ud83d","temperature":1e400', None),
        ({"engine": "llamacpp"}, b'"repetition_penalty":1e400', "repetition_penalty"),
        ({"engine": "vllm"}, b'"guided_json":{"type":"object","x":1e999}', "guided_json"),
    ],
)
def test_a_number_that_nobody_can_hold_is_refused_where_the_body_is_written_again(pool, extra, param):
    refused = asked(b'{"model":"physical","messages":[],%b}' % extra, **pool)
    assert isinstance(refused, Refusal), refused
    assert (refused.code, refused.param) == (RefusalCode.INVALID_REQUEST, param)
    assert "1e400" in refused.message


def test_a_number_that_nobody_can_hold_passes_where_the_body_stays_as_it_is():
    body = b'{"model":"physical","messages":[],"temperature":1e400}'
    assert asked(body, engine="vllm").body == body


@pytest.mark.parametrize("value", [b"null", b'{"include_usage":false}'])
def test_no_stream_options_of_any_value_reach_a_pool_that_refuses_the_key(value):
    body = b'{"model":"physical","messages":[],"stream":true,"stream_options":' + value + b"}"
    made = asked(body, stream_usage=False, unmappable="drop")
    assert (made.body, made.strips_usage) == (b'{"model":"physical","messages":[],"stream":true}', False)


@pytest.mark.parametrize(("engine", "priority"), [("vllm", b"2"), ("sglang", b"-2")])
def test_a_client_s_own_priority_never_reaches_an_engine_that_schedules_by_it(engine, priority):
    body = b'{"model":"physical","messages":[],"priority":-100}'
    made = asked(body, engine=engine)
    assert made.body == b'{"model":"physical","messages":[]}'
    assert made.headers == (("x-din-dropped-parameters", "priority"),)
    reading = parse_request(RequestHead("POST", CHAT, {}), body, lambda _name: TokenCalibrator(), 1 << 20)
    pool = Pool("p", "physical", "physical", engine=engine, scheduler="round_robin", nodes=(), priority_scheduling=True)
    made = build_node_request(reading, reading.intent, pool, Priority.BATCH)
    assert made.body == b'{"model":"physical","messages":[],"priority":' + priority + b"}"
    assert made.headers == ()


def test_a_developer_s_message_becomes_a_system_message_for_ollama():
    messages = b'[{"role" : "developer", "content":"developer 1.0"},{"role":"user","content":"h\\u00e9"}]'
    system_messages = messages.replace(b'"role" : "developer"', b'"role" : "system"')
    for path, key in ((CHAT, b"messages"), ("/v1/responses", b"input")):
        body = b'{"model":"physical","%b":%b}' % (key, messages)
        made = asked(body, path=path, engine="ollama")
        assert json.loads(made.body) == json.loads(b'{"model":"physical","%b":%b}' % (key, system_messages))
        assert asked(body, path=path, engine="vllm").body == body
    plain = b'{"model":"physical","input":"developer"}'
    assert asked(plain, path="/v1/responses", engine="ollama").body == plain
