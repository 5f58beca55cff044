"""Parameters that engines which speak OpenAI's words call otherwise, or don't have."""

import pytest

from din_extproc.domain.verdict import Refusal
from din_extproc.settings.pools import Engine
from din_extproc.southbound.engines import ENGINES, native_operations
from din_extproc.southbound.parameters import WISHES, renamed


def test_every_engine_that_a_pool_can_have_is_known():
    assert set(ENGINES) == set(Engine.__args__)
    assert native_operations("vllm") is None


@pytest.mark.parametrize(
    ("engine", "given", "made"),
    [
        ("llamacpp", {"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
        ("sglang", {"guided_json": {"a": 1}}, {"json_schema": '{"a":1}'}),
        ("tensorrt_llm", {"guided_regex": "a"}, {"response_format": {"type": "regex", "regex": "a"}}),
        ("tgi", {"max_completion_tokens": 4}, {"max_tokens": 4}),
        ("ollama", {"max_completion_tokens": 4}, {"max_tokens": 4}),
    ],
)
def test_a_parameter_keeps_its_meaning_under_another_name(engine, given, made):
    found = renamed(given, ENGINES[engine].openai, drop=False)
    assert (found.values, found.removed, found.dropped) == (made, tuple(given), ())


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_whatever_an_engine_has_not_is_refused_or_named(engine):
    table = ENGINES[engine].openai
    for name in [name for name, rule in table.items() if rule is None]:
        refused = renamed({name: 77}, table, drop=False)
        assert isinstance(refused, Refusal) or (name in WISHES and refused.dropped == (name,))
        found = renamed({name: 77}, table, drop=True)
        assert (found.removed, found.dropped) == ((name,), (name,))
        assert renamed({name: None}, table, drop=False).removed == ()
