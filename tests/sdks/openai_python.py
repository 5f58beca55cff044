"""OpenAI's Python client: each step of the common script. Run: openai_python.py JSON (see `tests/support/sdk_matrix.py`)."""

import json
import sys

import openai
from steps import play, refused

parameters = json.loads(sys.argv[1])
client = openai.OpenAI(base_url=parameters["url"], api_key=parameters["key"])
hello = [{"role": "user", "content": "Hello, how are you?"}]


def retries():
    answer = client.chat.completions.create(model=parameters["chat"], messages=hello, max_tokens=8)
    assert answer.choices[0].message.content


def chat():
    answer = client.chat.completions.create(model=parameters["chat"], messages=hello, max_tokens=8, temperature=0.5)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def stream():
    chunks = list(client.chat.completions.create(model=parameters["chat"], messages=hello, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def tools():
    answer = client.chat.completions.create(
        model=parameters["chat"], messages=hello, tools=parameters["tools"], tool_choice=parameters["tool_choice"], max_tokens=60
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)


def embeddings():
    answer = client.embeddings.create(model=parameters["vectors"], input=["a", "b"])
    assert len(answer.data[1].embedding) > 4


def errors():
    refused(lambda: client.chat.completions.create(model="missing", messages=hello))


steps = {"retries": retries, "chat": chat, "stream": stream, "tools": tools, "errors": errors, "embeddings": embeddings}
play(steps, parameters)
