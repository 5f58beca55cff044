"""Requests of one session have one number, which neither other tenants nor other names have."""

import json

import pytest

from din_extproc.domain.request import RequestHead
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.prefix import hash_prefix
from din_extproc.intent.read import parse_request
from din_extproc.intent.session import find_affinity, find_session

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def read(path, headers=None, **fields):
    input_field = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    head = RequestHead("POST", path, headers or {})
    return parse_request(
        head, json.dumps({"model": "m", **input_field, **fields}).encode(), lambda _model: TokenCalibrator(), 1 << 20
    ), head


def session(path, header="", headers=None, **fields):
    return find_session(*read(path, headers, **fields), header)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_prompt_cache_key_names_the_session(path):
    assert session(path, prompt_cache_key="chat-7") == b"prompt_cache_key chat-7"


@pytest.mark.parametrize("value", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_is_named_by_its_id(value):
    assert session(RESPONSES, conversation=value) == b"conversation conv_1"
    assert session(RESPONSES, conversation=value, prompt_cache_key="k") == b"prompt_cache_key k"
    assert session(CHAT, conversation=value) == b""


def test_the_configured_header_goes_before_the_body():
    assert session(CHAT, "x-session-id", {"x-session-id": "s-1"}, prompt_cache_key="k") == b"x-session-id s-1"
    assert session(CHAT, "", {"x-session-id": "s-1"}) == b""
    assert session(CHAT, "x-session-id", {}, prompt_cache_key="k") == b"prompt_cache_key k"


@pytest.mark.parametrize("value", [None, 7, "", ["a"], {"name": "x"}, "x" * 2000])
def test_what_is_no_name_names_no_session(value):
    assert session(RESPONSES, conversation=value) == b""


def test_tenants_do_not_share_sessions():
    asked = read(CHAT, prompt_cache_key="a")
    assert find_affinity(*asked, "", "acme") == find_affinity(*asked, "", "acme")
    assert find_affinity(*asked, "", "acme") != find_affinity(*asked, "", "other")
    assert find_affinity(*asked, "", "acme")[0] == "prompt_cache_key"


def test_without_a_session_the_beginning_of_the_prompt_counts_for_all_tenants():
    asked = read(CHAT)
    assert find_affinity(*asked, "", "acme") == find_affinity(*asked, "", "other") == ("", hash_prefix(asked[0].prompt))
