"""The modelled Ollama, TGI and Triton beside the clients that their makers publish: each takes the answers for those of its engine.

TGI's types in `huggingface_hub` are generated from its OpenAPI document; a field that they need and an answer lacks is an error here.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
import tritonclient.http as triton
from huggingface_hub import (
    ChatCompletionOutput,
    ChatCompletionStreamOutput,
    TextGenerationOutput,
    TextGenerationStreamOutput,
)
from pydantic import TypeAdapter
from tritonclient.utils import InferenceServerException

from tests.support.engine_fleet import EngineFleet
from tests.support.sdk_matrix import TOOLS
from tests.support.servers import EngineSim

pytestmark = pytest.mark.e2e

OPTIONS = {"decode_rate": 1000.0, "prefill_rate": 1e6, "auto_tool_choice": True, "max_model_len": 1024}
HELLO = [{"role": "user", "content": "hello"}]
FEW: Any = {"num_predict": 4}
LONG = "word " * 2000


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    sims: dict[str, dict[str, Any]] = {name: {"model": name, "api": name, **OPTIONS} for name in ("ollama", "tgi")}
    sims |= {f"{name}-vectors": {"model": "m", "api": name, "runner": "pooling", "dimensions": 8} for name in ("ollama", "triton")}
    with EngineFleet(sims) as fleet:
        yield dict(fleet.members)


# Ollama: `ollama`, its Python client


@pytest.fixture
def ours(engines) -> Iterator[ollama.Client]:
    client = ollama.Client(host=engines["ollama"].url)
    yield client
    client._client.close()


def test_ollama_s_client_chats_whole_and_in_pieces(ours):
    whole = ours.chat("ollama", HELLO, options=FEW)
    assert (whole.done, whole.done_reason, whole.eval_count, whole.message.role) == (True, "length", 4, "assistant")
    parts = list(ours.chat("ollama", HELLO, stream=True, options=FEW))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].prompt_eval_count, parts[-1].eval_count) == (whole.prompt_eval_count, 4)


def test_ollama_s_client_completes_whole_and_in_pieces(ours):
    whole = ours.generate("ollama", "hello", options=FEW)
    parts = list(ours.generate("ollama", "hello", stream=True, options=FEW))
    assert "".join(part.response for part in parts) == whole.response != ""


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_client_finds_the_call_of_a_tool(ours, stream):
    answers = ours.chat("ollama", HELLO, tools=TOOLS, stream=stream, options={"num_predict": 60})
    calls = [call for part in (answers if stream else [answers]) for call in part.message.tool_calls or ()]
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == [("weather", {"city": "example"})]


def test_ollama_s_client_embeds_lists_and_understands_refusals(ours, engines):
    client = ollama.Client(host=engines["ollama-vectors"].url)
    assert [len(vector) for vector in client.embed("m", ["a", "b"]).embeddings] == [8, 8]
    client._client.close()
    [listed], [loaded] = ours.list().models, ours.ps().models
    assert (listed.model, listed.details.format, loaded.context_length) == ("ollama", "gguf", 1024)
    for model, text, status in (("nope", "hello", 404), ("ollama", LONG, 400)):
        with pytest.raises(ollama.ResponseError) as refused:
            ours.chat(model, [{"role": "user", "content": text}], options=FEW)
        assert refused.value.status_code == status
        assert not refused.value.error.startswith("{"), "a sentence, not a document"


# TGI: the types of `huggingface_hub`


def post(engine: EngineSim, path: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=engine.url, verify=False) as client:
        return client.post(path, json=body)


def sent(reply: httpx.Response) -> list[Any]:
    """The events of a stream; TGI sends no space after the colon."""
    data = [line.removeprefix("data:").strip() for line in reply.text.splitlines() if line.startswith("data:")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def test_tgi_s_types_fit_what_it_generates(engines):
    asked = {"inputs": "hello", "parameters": {"max_new_tokens": 4, "details": True}}
    whole = TypeAdapter(TextGenerationOutput).validate_python(post(engines["tgi"], "/generate", asked).json())
    assert (whole.details.generated_tokens, whole.details.finish_reason, len(whole.details.tokens)) == (4, "length", 4)
    answers = [
        TypeAdapter(TextGenerationStreamOutput).validate_python(each) for each in sent(post(engines["tgi"], "/generate_stream", asked))
    ]
    assert [each.index for each in answers] == [1, 2, 3, 4]
    assert (answers[-1].generated_text, answers[-1].details.generated_tokens) == (whole.generated_text, 4)


@pytest.mark.parametrize("usage", [False, True])
def test_tgi_s_types_fit_its_messages(engines, usage):
    asked = {"model": "tgi", "messages": HELLO, "max_tokens": 4}
    whole = TypeAdapter(ChatCompletionOutput).validate_python(post(engines["tgi"], "/v1/chat/completions", asked).json())
    assert whole.usage.completion_tokens == 4
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    reply = post(engines["tgi"], "/v1/chat/completions", {**asked, **options})
    answers = [TypeAdapter(ChatCompletionStreamOutput).validate_python(each) for each in sent(reply)]
    assert "".join(each.choices[0].delta.content or "" for each in answers if each.choices) == whole.choices[0].message.content
    assert [each.usage is not None for each in answers] == [False] * (len(answers) - usage) + [True] * usage


# Triton: `tritonclient`


@pytest.fixture
def server(engines) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(engines["triton-vectors"].address) as client:
        yield client


def tensor(name: str) -> triton.InferInput:
    given = triton.InferInput(name, [2, 1], "BYTES")
    return given.set_data_from_numpy(np.array([["a"], ["b"]], dtype=object), binary_data=False)


def test_triton_s_client_finds_server_and_model_ready_and_infers(server):
    assert (server.is_server_live(), server.is_server_ready(), server.is_model_ready("m")) == (True, True, True)
    assert server.get_server_metadata()["name"] == "triton"
    described = server.get_model_metadata("m")
    assert [each["name"] for each in described["inputs"] + described["outputs"]] == ["text", "output"]
    answers = server.infer("m", [tensor("text")], outputs=[triton.InferRequestedOutput("output", binary_data=False)])
    assert answers.as_numpy("output").shape == (2, 8)


def test_triton_s_client_understands_refusals(server):
    with pytest.raises(InferenceServerException, match="expected the inputs of the model") as refused:
        server.infer("m", [tensor("nope")])
    assert refused.value.status() == "400"
