"""The modelled answers and their token counts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.tools.engine_model.script import Bounds, write_script, write_tool_call
from din_extproc.tools.engine_model.tokens import Media, PatternTokenizer, chat_prompt

TOKENS = PatternTokenizer()


@given(st.text())
def test_the_pieces_of_a_text_join_to_the_text(text):
    assert "".join(TOKENS.pieces(text)) == text
    assert TOKENS.count(text) == len(TOKENS.pieces(text)) == len(TOKENS.ids(text))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("hello world", 2), ("antidisestablishment", 3), ("你好世界", 4), ("2026", 2), ("<|im_start|>user\nhi<|im_end|>\n", 6)],
)
def test_the_built_in_tokenizer_follows_its_rule(text, tokens):
    assert TOKENS.count(text) == tokens


def test_the_same_prompt_gets_the_same_answer_and_another_choice_another():
    bounds = Bounds(max_tokens=50)
    assert write_script(TOKENS, "hi", 0, bounds) == write_script(TOKENS, "hi", 0, bounds)
    assert write_script(TOKENS, "hi", 0, bounds).text != write_script(TOKENS, "hi", 1, bounds).text


def test_a_tag_in_the_prompt_begins_the_answer():
    assert write_script(TOKENS, "tell me [[case-7]] a story", 0, Bounds(max_tokens=50)).text.startswith("[[case-7]] ")


def test_an_answer_ends_by_itself_or_by_the_length():
    natural = write_script(TOKENS, "hi", 0, Bounds(max_tokens=1000))
    assert (natural.finish_reason, natural.pieces[-1]) == ("stop", "")
    cut = write_script(TOKENS, "hi", 0, Bounds(max_tokens=5))
    assert (cut.finish_reason, len(cut.pieces)) == ("length", 5)
    forced = write_script(TOKENS, "hi", 0, Bounds(max_tokens=1000, ignore_eos=True))
    assert (forced.finish_reason, len(forced.pieces)) == ("length", 1000)
    long = write_script(TOKENS, "hi", 0, Bounds(max_tokens=1000, min_tokens=700))
    assert len(long.pieces) == 701


@given(st.text(min_size=1, max_size=6), st.integers(1, 200))
def test_a_stop_string_is_never_part_of_the_answer(stop, max_tokens):
    free = write_script(TOKENS, "hi", 0, Bounds(max_tokens=max_tokens))
    script = write_script(TOKENS, "hi", 0, Bounds(max_tokens=max_tokens, stop=(stop,)))
    if stop in free.text:
        assert script.text == free.text.partition(stop)[0]
        assert (script.finish_reason, script.stop_reason) == ("stop", stop)
        assert len(script.pieces) <= len(free.pieces)
    else:
        assert script == free


def test_a_tool_call_has_arguments_of_the_schema_s_types():
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "deep": {"type": ["string", "null"]},
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": properties}}}
    script = write_tool_call(TOKENS, tool, Bounds(max_tokens=100))
    assert script.finish_reason == "tool_calls"
    assert script.tool.name == "weather"
    assert json.loads(script.text) == {"city": "example", "days": 1, "unit": "C", "deep": "example"}


def test_every_shape_of_message_is_rendered():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": None}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "y", "tool_calls": None},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}]},
        {},
    ]
    prompt, media = chat_prompt(messages)
    assert media == 0
    assert prompt.count("<|im_start|>") == 6
    assert "assistant\nf<|im_end|>" in prompt


def test_an_image_costs_what_the_model_says_or_is_refused():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "hi"}]}]
    assert chat_prompt(messages, media_tokens=576)[1] == 576
    with pytest.raises(Media):
        chat_prompt(messages)
