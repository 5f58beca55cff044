"""OpenAI's words to Triton's generate extension and KServe v2, and back."""

import json

import pytest

from din_extproc.domain.request import Operation
from din_extproc.southbound.triton import TRITON
from tests.support.dialects import OK, ask, asked, streamed, text_of

TEXT, VECTORS, RANK = Operation.COMPLETIONS, Operation.EMBEDDINGS, Operation.RERANK


def test_a_prompt_goes_to_the_generate_extension_of_its_model():
    path, body, _ = ask(TRITON, TEXT, prompt="once", max_tokens=4, stop=["x"], seed=1, min_tokens=2)
    assert path == "/v2/models/m/generate"
    assert body == {
        "text_input": "once", "stream": False, "exclude_input_in_output": True,
        "max_tokens": 4, "stop_words": ["x"], "random_seed": 1, "min_length": 2,
    }  # fmt: skip
    assert ask(TRITON, TEXT, prompt="once", stream=True)[0] == "/v2/models/m/generate_stream"


def test_texts_go_as_bytes_tensors():
    path, body, _ = ask(TRITON, VECTORS, input=["a", "b"])
    assert (path, body) == ("/v2/models/m/infer", {"inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "b"]}]})
    _, body, _ = ask(TRITON, RANK, query="q", documents=["a", {"text": "b"}], top_n=1)
    assert [(tensor["name"], tensor["data"]) for tensor in body["inputs"]] == [("query", ["q", "q"]), ("document", ["a", "b"])]


@pytest.mark.parametrize(
    ("operation", "fields", "param"),
    [
        (VECTORS, {"input": [1, 2]}, "input"),
        (RANK, {"query": 3, "documents": ["a"]}, "query"),
        (RANK, {"query": "a", "documents": []}, "documents"),
        (TEXT, {"prompt": [1, 2]}, "prompt"),
        (TEXT, {"prompt": "x", "logprobs": 1}, "logprobs"),
        (VECTORS, {"input": "a", "dimensions": 8}, "dimensions"),
    ],
)
def test_what_has_no_tensor_or_name_is_refused(operation, fields, param):
    assert ask(TRITON, operation, **fields).param == param


def test_the_first_output_of_floats_is_the_answer():
    body = {"outputs": [{"name": "ids", "datatype": "INT32", "shape": [2], "data": [1, 2]}]}
    body["outputs"].append({"name": "e", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]})
    made = json.loads(TRITON.translate_answer(asked(VECTORS), OK, json.dumps(body).encode()))
    assert [entry["embedding"] for entry in made["data"]] == [[1, 2], [3, 4]]
    body["outputs"][1] |= {"shape": [2, 1], "data": [0.1, 0.9]}
    ranked = json.loads(TRITON.translate_answer(asked(RANK, documents=["a", "b"], top_n=1), OK, json.dumps(body).encode()))
    assert ranked["results"] == [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}]
    bare = json.loads(TRITON.translate_answer(asked(RANK, documents=["a", "b"], return_documents=False), OK, json.dumps(body).encode()))
    assert "document" not in bare["results"][0]


@pytest.mark.parametrize("output", [{"datatype": "FP32", "shape": [], "data": []}, {"datatype": "FP32", "shape": [3], "data": [1, 2]}])
def test_shapes_that_dont_fit_are_no_answer(output):
    assert TRITON.translate_answer(asked(VECTORS), OK, json.dumps({"outputs": [output]}).encode()) is None


@pytest.mark.parametrize(("operation", "number"), [(VECTORS, b"1e39"), (RANK, b"1" + b"0" * 400), (VECTORS, b'"1"'), (RANK, b"true")])
def test_what_is_no_float_is_no_answer(operation, number):
    body = b'{"outputs":[{"name":"o","datatype":"FP64","shape":[1,1],"data":[%b]}]}' % number
    assert TRITON.translate_answer(asked(operation, encoding_format="base64"), OK, body) is None


def test_the_end_of_the_body_is_the_end_of_the_answer():
    parts = [b'data: {"text_output":"a"}\n\n', b'data: {"text_output":" b"}\n\n']
    events = streamed(TRITON, asked(TEXT, max_tokens=5), *parts)
    assert (text_of(events), events[-2]["choices"][0]["finish_reason"], events[-1]) == ("a b", "stop", "[DONE]")
    assert streamed(TRITON, asked(TEXT, max_tokens=2), *parts)[-2]["choices"][0]["finish_reason"] == "length"
    assert streamed(TRITON, asked(TEXT), *parts, b'data: {"error":"out of memory"}\n\n')[-2]["error"]["message"] == "out of memory"
    assert streamed(TRITON, asked(TEXT)) == []
