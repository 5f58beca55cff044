"""LlamaIndex's OpenAI-like classes: each step of the common script. Run: llamaindex_python.py JSON (see `tests/support/sdk_matrix.py`)."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from steps import play, refused

parameters = json.loads(sys.argv[1])
common = {"api_base": parameters["url"], "api_key": parameters["key"]}
hello = [ChatMessage(role="user", content="Hello, how are you?")]


def llm(name=parameters["chat"], tokens=8, **more):
    return OpenAILike(model=name, max_tokens=tokens, is_chat_model=True, is_function_calling_model=True, **common, **more)


def retries():
    assert llm().chat(hello).message.content


def chat():
    answer = llm(temperature=0.5).chat(hello)
    assert answer.message.content
    assert answer.raw.usage.completion_tokens == 8


def stream():
    assert "".join(part.delta or "" for part in llm().stream_chat(hello))


def weather(city: str) -> str:
    """The weather of a city."""
    return city


def tools():
    model = llm(tokens=60)
    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="rain?", tool_choice=parameters["tool_choice"])
    call = model.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "weather"
    assert "city" in call.tool_kwargs


def embeddings():
    made = OpenAILikeEmbedding(model_name=parameters["vectors"], **common)
    assert len(made.get_text_embedding_batch(["a", "b"])[1]) > 4


def errors():
    refused(lambda: llm("missing").chat(hello))


steps = {"retries": retries, "chat": chat, "stream": stream, "tools": tools, "errors": errors, "embeddings": embeddings}
play(steps, parameters)
