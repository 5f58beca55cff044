"""Parameters that engines which speak OpenAI's words call otherwise, or don't have."""

import pytest

from din_extproc.domain.verdict import Refusal
from din_extproc.settings.pools import PoolEngine
from din_extproc.southbound.engines import ENGINES, native_operations
from din_extproc.southbound.parameters import ALWAYS_DROPPED, rename_parameters


def test_every_engine_that_a_pool_can_have_is_known():
    assert set(ENGINES) == set(PoolEngine.__args__)
    assert native_operations("vllm") is None


AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}}


@pytest.mark.parametrize(
    ("engine", "given", "made"),
    [
        ("llamacpp", {"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
        ("vllm", {"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ("vllm", {"guided_json": {"a": 1}}, {"structured_outputs": {"json": {"a": 1}}}),
        ("sglang", {"guided_json": {"a": 1}}, {"response_format": AS_SCHEMA}),
        ("sglang", {"guided_json": '{"a":1}'}, {"response_format": AS_SCHEMA}),
        ("sglang", {"structured_outputs": {"json": {"a": 1}}}, {"response_format": AS_SCHEMA}),
        ("llamacpp", {"structured_outputs": {"grammar": "g"}}, {"grammar": "g"}),
        ("tensorrt_llm", {"guided_regex": "a"}, {"response_format": {"type": "regex", "regex": "a"}}),
        ("openai", {"guided_json": '{"a":1}'}, {"response_format": AS_SCHEMA}),
        ("tgi", {"max_completion_tokens": 4}, {"max_tokens": 4}),
        ("ollama", {"max_completion_tokens": 4}, {"max_tokens": 4}),
    ],
)
def test_a_parameter_keeps_its_meaning_under_another_name(engine, given, made):
    found = rename_parameters(given, ENGINES[engine].openai, drop=False)
    assert (found.values, found.removed, found.dropped) == (made, tuple(given), ())


@pytest.mark.parametrize("asked", [{"choice": ["a"]}, {"json_object": True}, {"json": {}, "regex": "a"}, 7])
def test_guidance_that_an_engine_has_not_is_refused_however_it_is_asked_for(asked):
    refused = rename_parameters({"structured_outputs": asked}, ENGINES["sglang"].openai, drop=False)
    assert isinstance(refused, Refusal)
    assert refused.param == "structured_outputs"
    assert rename_parameters({"structured_outputs": {}}, ENGINES["sglang"].openai, drop=False).removed == ()


@pytest.mark.parametrize("engine", ["vllm", "tensorrt_llm"])
def test_two_kinds_of_guidance_at_once_are_refused(engine):
    refused = rename_parameters({"guided_json": {"a": 1}, "guided_regex": "a"}, ENGINES[engine].openai, drop=False)
    assert isinstance(refused, Refusal)
    assert refused.param == "guided_regex"


@pytest.mark.parametrize(
    ("engine", "given", "beside"),
    [
        ("vllm", {"guided_json": {"a": 1}}, {"structured_outputs": {"regex": "a"}}),
        ("sglang", {"guided_json": {"a": 1}}, {"response_format": {"type": "json_object"}}),
        ("sglang", {"guided_regex": "a"}, {"regex": "b"}),
        ("sglang", {"guided_regex": "a"}, {"response_format": {"type": "json_object"}}),
        ("tgi", {"guided_regex": "a"}, {"response_format": {"type": "json_object"}}),
        ("llamacpp", {"repetition_penalty": 1.2}, {"repeat_penalty": 1.5}),
        ("llamacpp", {"guided_json": {"a": 1}}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_is_asked_for_in_an_engines_own_words_too_is_refused_and_never_overwritten(engine, given, beside):
    table = ENGINES[engine].openai
    refused = rename_parameters(given, table, drop=True, beside=beside.get)
    assert isinstance(refused, Refusal)
    assert (refused.param, "set the same option" in refused.message) == (next(iter(given)), True)
    nothing = dict.fromkeys(beside) | ({"response_format": {"type": "text"}} if "response_format" in beside else {})
    assert rename_parameters(given, table, drop=False, beside=nothing.get).removed == tuple(given)


@pytest.mark.parametrize("engine", ["tgi", "ollama"])
def test_the_newer_limit_of_an_output_wins_unless_it_says_nothing(engine):
    def made(newer):
        found = rename_parameters({"max_completion_tokens": newer}, ENGINES[engine].openai, drop=False, beside={"max_tokens": 9}.get)
        return found.values, found.removed

    assert made(4) == ({"max_tokens": 4}, ("max_completion_tokens",))
    assert made(0) == ({}, ("max_completion_tokens",))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_whatever_an_engine_has_not_is_refused_or_named(engine):
    table = ENGINES[engine].openai
    for name in [name for name, rule in table.items() if rule is None]:
        refused = rename_parameters({name: 77}, table, drop=False)
        assert isinstance(refused, Refusal) or (name in ALWAYS_DROPPED and refused.dropped == (name,))
        found = rename_parameters({name: 77}, table, drop=True)
        assert (found.removed, found.dropped) == ((name,), (name,))
        assert rename_parameters({name: None}, table, drop=False).removed == ()
