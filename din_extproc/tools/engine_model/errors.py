"""vLLM's error answers, word for word. An `EngineFailure` is a value; nothing is raised."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

_MAX_INPUT_CHARS = 100


class EngineFailure(Struct, frozen=True):
    """An error answer."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"


class FieldFinding(Struct, frozen=True):
    """One invalid field, as pydantic reports it."""

    kind: str
    loc: str
    msg: str
    input_text: str
    """The input, shortened."""
    context: str = ""

    def __str__(self) -> str:
        context = f", 'ctx': {{'error': '{self.context}'}}" if self.context else ""
        return f"{{'type': '{self.kind}', 'loc': '{self.loc}', 'msg': '{self.msg}', 'input': {self.input_text}{context}}}"


def shorten(value: Any) -> str:
    """Format an input as vLLM does in errors: containers by their size only."""
    if isinstance(value, (dict, list)):
        return f"'<{type(value).__name__} of {len(value)} items>'"
    text = repr(value)
    return text if len(text) <= _MAX_INPUT_CHARS else f"{text[:_MAX_INPUT_CHARS]}...'"


def refuse(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> EngineFailure:
    """Return the `error` object that vLLM answers with."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return EngineFailure(status, msgspec.json.encode({"error": error}))


def refuse_value(message: str, param: str, value: Any = None) -> EngineFailure:
    """Return the error of a parameter out of range."""
    suffix = f"(parameter={param})" if value is None else f"(parameter={param}, value={value})"
    return refuse(400, f"{message} {suffix}", param=param)


def invalid(findings: Sequence[FieldFinding]) -> EngineFailure:
    """Return the error of missing fields or wrong types."""
    noun = "validation error" if len(findings) == 1 else "validation errors"
    lines = "".join(f"\n  {finding}" for finding in findings)
    return refuse(400, f"{len(findings)} {noun}:{lines}", "Bad Request", findings[0].loc)


def unsupported_media_type() -> EngineFailure:
    """Return the error of a content type that is not JSON."""
    return refuse(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")


def unknown_model(name: str, known: Sequence[str]) -> EngineFailure:
    """Return the error of an unknown model."""
    return refuse(404, f"The model `{name}` does not exist. Valid aliases: {', '.join(known)}.", "NotFoundError", "model")


def prompt_too_long(limit: int) -> EngineFailure:
    """Return the error of a prompt longer than the context; vLLM stops counting one past the limit."""
    return refuse_value(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1} input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        limit + 1,
    )


def output_too_long(limit: int, prompt_tokens: int, max_tokens: int) -> EngineFailure:
    """Return the error of prompt and requested output longer than the context."""
    return refuse_value(
        f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens and your prompt "
        f"contains at least {prompt_tokens} input tokens, for a total of at least {prompt_tokens + max_tokens} tokens. Please reduce the "
        "length of the input prompt or the number of requested output tokens.",
        "input_tokens",
        prompt_tokens,
    )


NOT_FOUND = EngineFailure(404, b'{"detail":"Not Found"}')
UNAUTHORIZED = EngineFailure(401, b'{"error":"Unauthorized"}')
ENGINE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.32 GiB is free. "
    "Including non-PyTorch memory, this process has 77.82 GiB memory in use."
)
