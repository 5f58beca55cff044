"""OpenAI's completions to TGI's own generate and back."""

import json

import pytest

from din_extproc.domain.request import Operation
from din_extproc.domain.response import ResponseHead
from din_extproc.southbound.tgi import TGI
from tests.support.dialects import OK, ask, asked, streamed, text_of

TEXT = Operation.COMPLETIONS


def event(text, *, special=False, details=None):
    token = {"id": 1, "text": text, "logprob": -0.5, "special": special}
    return b"data:" + json.dumps({"index": 1, "token": token, "generated_text": None, "details": details}).encode() + b"\n\n"


def test_parameters_have_tgis_names_and_no_value_that_tgi_refuses():
    path, body, _ = ask(TGI, TEXT, prompt="once", max_tokens=5, temperature=0.7, top_p=1, top_k=-1, stop="x", seed=3)
    assert path == "/generate"
    assert body == {
        "inputs": "once",
        "parameters": {"max_new_tokens": 5, "temperature": 0.7, "do_sample": True, "stop": ["x"], "seed": 3, "details": True},
    }
    assert ask(TGI, TEXT, prompt="once", temperature=0, stream=True)[:2] == (
        "/generate_stream",
        {"inputs": "once", "parameters": {"do_sample": False, "details": True}},
    )


@pytest.mark.parametrize(
    ("name", "value"), [("n", 2), ("presence_penalty", 0.5), ("min_p", 0.1), ("suffix", "x"), ("logit_bias", {"1": 1})]
)
def test_what_tgi_has_not_is_refused_or_dropped(name, value):
    assert ask(TGI, TEXT, prompt="x", **{name: value}).param == name
    assert ask(TGI, TEXT, prompt="x", drop=True, **{name: value})[2] == (name,)


def test_guided_decoding_is_a_grammar():
    grammar = ask(TGI, TEXT, prompt="x", guided_regex="a+")[1]["parameters"]["grammar"]
    assert grammar == {"type": "regex", "value": "a+"}
    for fields in ({"guided_json": {}, "guided_regex": "a"}, {"guided_regex": "a", "response_format": {"type": "json_object"}}):
        assert "set the same option" in ask(TGI, TEXT, prompt="x", **fields).message
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert ask(TGI, TEXT, prompt="x", response_format=wanted)[1]["parameters"]["grammar"]["value"] == {"type": "object"}


def test_chats_go_through_the_messages_api_of_the_same_server():
    assert Operation.CHAT in TGI.openai_operations


def test_tokens_become_events_special_ones_are_left_out_and_details_are_the_end():
    details = {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 4}
    events = streamed(TGI, asked(TEXT), event("a"), event(" b"), event("</s>", special=True, details=details))
    assert text_of(events) == "a b"
    assert events[2]["choices"][0]["finish_reason"] == "stop"
    assert events[3]["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert events[4:] == ["[DONE]"]


def test_log_probabilities_are_returned_if_requested():
    (first,) = streamed(TGI, asked(TEXT, logprobs=1), event("a"))
    assert first["choices"][0]["logprobs"] == {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": None}


def test_top_log_probabilities_are_returned_if_requested():
    tops = [{"id": 1, "text": "a", "logprob": -0.5}, {"id": 2, "text": "z", "logprob": -1.5}]
    piece = json.loads(event("a").removeprefix(b"data:")) | {"top_tokens": tops}
    (first,) = streamed(TGI, asked(TEXT, logprobs=2), b"data:" + json.dumps(piece).encode() + b"\n\n")
    assert first["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "z": -1.5}]
    details = {"finish_reason": "length", "generated_tokens": 1, "tokens": tops[:1], "top_tokens": [tops]}
    made = json.loads(TGI.translate_answer(asked(TEXT, logprobs=2), OK, json.dumps({"generated_text": "a", "details": details}).encode()))
    assert made["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "z": -1.5}]


def test_an_empty_prompt_has_no_tokens_and_that_is_reported():
    details = {"finish_reason": "length", "generated_tokens": 3, "input_length": 0}
    assert streamed(TGI, asked(TEXT), event("a", details=details))[2]["usage"]["prompt_tokens"] == 0
    body = json.dumps({"generated_text": "a", "details": details}).encode()
    for head, answer in ((OK, body), (ResponseHead(200, {"x-prompt-tokens": "0"}), body.replace(b'"input_length": 0', b'"seed": 0'))):
        assert json.loads(TGI.translate_answer(asked(TEXT), head, answer))["usage"]["total_tokens"] == 3


def test_an_error_in_the_stream_is_reported_in_band():
    events = streamed(TGI, asked(TEXT), event("a"), b'data:{"error":"Request failed","error_type":"generation"}\n\n')
    assert events[-2]["error"]["message"] == "Request failed"


def test_a_whole_answer_counts_the_prompt_by_its_header():
    body = json.dumps({"generated_text": "a b", "details": {"finish_reason": "length", "generated_tokens": 2, "tokens": []}}).encode()
    made = json.loads(TGI.translate_answer(asked(TEXT), ResponseHead(200, {"x-prompt-tokens": "6"}), body))
    assert made["choices"] == [{"index": 0, "text": "a b", "logprobs": None, "finish_reason": "length"}]
    assert made["usage"]["total_tokens"] == 8
    assert "usage" not in json.loads(TGI.translate_answer(asked(TEXT), OK, body))
    assert TGI.translate_answer(asked(TEXT), OK, b'{"x":1}') is None
