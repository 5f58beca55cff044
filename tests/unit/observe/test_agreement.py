"""Answers compared: what chance explains, and what it does not."""

import json

import pytest

from din_extproc.domain.agreement import Agreement
from din_extproc.observe.agreement import TokenizedAnswer, compare_answers, read_tokenized_answer


def chat(*tokens: str | tuple[str, dict[str, float]], text: str | None = None) -> bytes:
    """An answer of chat completions, as vLLM gives it with `logprobs`."""
    content = []
    for each in tokens:
        token, others = each if isinstance(each, tuple) else (each, {})
        top = [{"token": token, "logprob": -0.1}, *({"token": other, "logprob": chance} for other, chance in others.items())]
        content.append({"token": token, "logprob": -0.1, "top_logprobs": top})
    message = {"role": "assistant", "content": text or "".join(each["token"] for each in content)}
    return json.dumps({"choices": [{"message": message, "logprobs": {"content": content} if content else None}]}).encode()


def of(*tokens) -> TokenizedAnswer:
    found = read_tokenized_answer(chat(*tokens))
    assert found is not None
    return found


def test_the_same_tokens_agree():
    assert compare_answers(of("The", " capital"), of("The", " capital")) == (Agreement.AGREE, 2)


def test_parting_where_the_model_was_undecided_is_close_and_anywhere_else_a_difference():
    undecided = of("The", " capital", (" is", {" of": -0.6, " was": -5.0}), " Paris")
    other = of("The", " capital", " of", " France")
    assert compare_answers(undecided, other) == (Agreement.CLOSE, 2)
    assert compare_answers(other, undecided) == (Agreement.CLOSE, 2)
    decided = of("The", " capital", (" is", {" of": -4.0}), " Paris")
    assert compare_answers(decided, other) == (Agreement.DIFFER, 2)
    assert compare_answers(decided, of("The", " capital", (" zebra", {" is": -0.2}))) == (Agreement.CLOSE, 2)
    assert compare_answers(decided, of("zebra")) == (Agreement.DIFFER, 0)


def test_one_that_ends_earlier_is_no_difference():
    assert compare_answers(of("a", "b"), of("a", "b", "c")) == (Agreement.CLOSE, 2)


def test_without_probabilities_only_answers_with_hardly_a_word_in_common_differ():
    def text(answer_text: str) -> TokenizedAnswer:
        return read_tokenized_answer(chat(text=answer_text))

    assert compare_answers(text("The capital is Paris."), text("The capital is Paris."))[0] is Agreement.AGREE
    assert compare_answers(text("The capital is Paris."), text("The capital of France is Paris."))[0] is Agreement.CLOSE
    assert compare_answers(text("The capital is Paris."), text("lorem ipsum dolor sit amet"))[0] is Agreement.DIFFER


def test_text_completions_are_read_too():
    reported_logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [None, {"b": -0.2, "c": -0.5}],
        "text_offset": [0, 1],
    }
    found = read_tokenized_answer(json.dumps({"choices": [{"text": "ab", "logprobs": reported_logprobs}]}).encode())
    assert found == TokenizedAnswer(("a", "b"), ({"a": -0.1}, {"b": -0.2, "c": -0.5}))
    assert compare_answers(found, TokenizedAnswer(("a", "c"), ({"a": -0.1}, {"c": -0.1}))) == (Agreement.CLOSE, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"[]", b'{"choices":[]}', b'{"choices":[{}]}', b'{"error":"x"}', b'{"choices":[{"message":{"content":null}}]}',
        b'{"choices":[{"logprobs":{"content":[{"token":"a"}]}}]}', b'{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[null]}}]}',
        b'{"choices":[{"logprobs":{"content":[]}}]}', b'{"choices":[{"text":"  "}]}',
    ],
)  # fmt: skip
def test_what_can_not_be_compared_is_nothing(body):
    assert read_tokenized_answer(body) is None


def test_seeded_answers_may_part_at_any_candidate_of_the_other_node_but_not_beyond():
    drawn = TokenizedAnswer(("a", "x"), ({"a": -0.1}, {"x": -4.0, "b": -0.1}))
    assert compare_answers(drawn, TokenizedAnswer(("a", "b"), ({"a": -0.1}, {"b": -0.1})), sampled=True) == (Agreement.CLOSE, 1)
    assert compare_answers(drawn, TokenizedAnswer(("a", "z"), ({"a": -0.1}, {"z": -0.1})), sampled=True) == (Agreement.DIFFER, 1)
    assert compare_answers(drawn, TokenizedAnswer(("a", "y"), ({"a": -0.1}, {"y": -0.1, "x": -4.0}))) == (Agreement.DIFFER, 1)
