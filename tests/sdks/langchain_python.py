"""LangChain's OpenAI classes: each step of the common script. Run: langchain_python.py JSON (see `tests/support/sdk_matrix.py`)."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from steps import play, refused

parameters = json.loads(sys.argv[1])
common = {"base_url": parameters["url"], "api_key": parameters["key"]}
model = ChatOpenAI(model=parameters["chat"], max_tokens=8, temperature=0.5, **common)


def retries():
    assert model.invoke("Hello, how are you?").content


def chat():
    answer = model.invoke([("system", "Be short."), ("human", "Hello, how are you?")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 8


def stream():
    assert "".join(chunk.content for chunk in model.stream("Hello, how are you?"))


def tools():
    asked = ChatOpenAI(model=parameters["chat"], max_tokens=60, **common).bind_tools(
        parameters["tools"], tool_choice=parameters["tool_choice"]
    )
    call = asked.invoke("rain?").tool_calls[0]
    assert call["name"] == "weather"
    assert "city" in call["args"]


def embeddings():
    # Without this it sends token ids of a tokenizer that it would first have to fetch.
    made = OpenAIEmbeddings(model=parameters["vectors"], check_embedding_ctx_length=False, **common)
    assert len(made.embed_documents(["a", "b"])[1]) > 4


def errors():
    refused(lambda: ChatOpenAI(model="missing", **common).invoke("hello"))


steps = {"retries": retries, "chat": chat, "stream": stream, "tools": tools, "errors": errors, "embeddings": embeddings}
play(steps, parameters)
