"""Prompts that begin alike have one number."""

import json

from din_extproc.domain.request import Operation
from din_extproc.intent.openai import extract_prompt
from din_extproc.intent.outline import build_outline
from din_extproc.intent.prefix import PREFIX_BYTES, hash_prefix


def of(operation, **body):
    text = json.dumps(body).encode()
    return hash_prefix(extract_prompt(operation, text, build_outline(text)))


def chat(*texts):
    return of(Operation.CHAT, messages=[{"role": "user", "content": text} for text in texts])


def test_one_system_prompt_is_one_number_whatever_is_asked():
    assert chat("You are kind.", "Hello") == chat("You are kind.", "Bye", "and more")
    assert chat("Hello") == chat("Hello", "Hi, what can I do?", "Sing")  # a conversation that grows stays where it is
    assert chat("You are kind.", "Hello") != chat("You are terse.", "Hello")
    assert chat('He said: "a","b"', "x") == chat('He said: "a","b"', "y")


def test_only_the_first_bytes_count():
    assert chat("a" * PREFIX_BYTES + "b") == chat("a" * PREFIX_BYTES + "c", "d")
    assert chat("a" * 20 + "b") != chat("a" * 20 + "c")


def test_a_completion_begins_with_its_prompt_and_no_text_has_no_number():
    assert of(Operation.COMPLETIONS, prompt="once upon") == of(Operation.COMPLETIONS, prompt="once upon", suffix="the end")
    assert of(Operation.EMBEDDINGS, input=[1, 2, 3]) == 0
