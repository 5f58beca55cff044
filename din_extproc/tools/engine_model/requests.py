"""Parses a body into the engine's work, or into vLLM's refusal. It starts no work.

The order of the checks is vLLM's: the body's shape, the model, the values, the context length.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.tools.engine_model.errors import EngineFailure, output_too_long, prompt_too_long, refuse, refuse_value, unknown_model
from din_extproc.tools.engine_model.fields import check_fields, decode_body
from din_extproc.tools.engine_model.model import ModelSpec
from din_extproc.tools.engine_model.prefix_cache import hash_blocks
from din_extproc.tools.engine_model.script import AnswerScript, Bounds, write_script, write_tool_call
from din_extproc.tools.engine_model.tokens import Media, SimulatedTokenizer, chat_prompt

_SAMPLING = {
    "model": "str",
    "max_tokens": "int",
    "min_tokens": "int",
    "temperature": "float",
    "top_p": "float",
    "n": "int",
    "seed": "int",
    "stream": "bool",
    "stream_options": "dict",
    "stop": "any",
    "ignore_eos": "bool",
}
_CHAT = {
    "messages": "list",
    "max_completion_tokens": "int",
    "logprobs": "bool",
    "top_logprobs": "int",
    "tools": "list",
    "tool_choice": "any",
    "chat_template_kwargs": "dict",
    **_SAMPLING,
}
_COMPLETION = {"prompt": "any", "logprobs": "int", "echo": "bool", **_SAMPLING}
_COMPLETION_DEFAULT_TOKENS = 16
_MOST_CHOICES = 16384


class EngineRequest(Struct, frozen=True):
    """An accepted generation request, with one script per choice."""

    prompt_tokens: int
    """Tokens of all prompts together, as usage reports them."""
    prompts: tuple[int, ...]
    """Prompt tokens of each choice."""
    scripts: tuple[AnswerScript, ...]
    max_tokens: int
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    """Alternatives per token; None: no log probabilities requested."""
    reasoning: str = ""
    """The key of the reasoning."""
    blocks: tuple[tuple[int, ...], ...] = ()
    """The block hashes of each choice's prompt; (): the engine has no prefix cache."""


class Reader:
    """Reads generation requests for one model."""

    def __init__(self, model: ModelSpec, tokenizer: SimulatedTokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def chat(self, body: bytes, content_type: str) -> EngineRequest | EngineFailure:
        """Parse a body of /v1/chat/completions."""
        fields = self._read_fields(body, content_type, _CHAT, "messages")
        if isinstance(fields, EngineFailure):
            return fields
        if not fields["messages"]:
            return refuse(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
        if not all(isinstance(message, dict) for message in fields["messages"]):
            return refuse(400, "Each message is an object with a role.")
        tool = self._choose_tool(fields["tools"] or [], fields["tool_choice"])
        if isinstance(tool, EngineFailure):
            return tool
        tools = msgspec.json.encode(fields["tools"]).decode() if fields["tools"] else ""
        try:
            prompt, media = chat_prompt(fields["messages"], tools=tools, media_tokens=self._model.media_tokens)
        except Media:
            return refuse(400, f"{self._model.name} is not a multimodal model")
        counted = [(prompt, self._tokenizer.count(prompt) + media)]
        logprobs = (fields["top_logprobs"] or 0) if fields["logprobs"] else None
        wanted = fields["max_completion_tokens"] if fields["max_completion_tokens"] is not None else fields["max_tokens"]
        request = self._make_request(fields, counted, wanted, logprobs, tool)
        thinks = self._model.reasoning and (fields["chat_template_kwargs"] or {}).get("enable_thinking", True)
        return request if isinstance(request, EngineFailure) or not thinks else _add_thoughts(request, self._model.reasoning)

    def completion(self, body: bytes, content_type: str) -> EngineRequest | EngineFailure:
        """Parse a body of /v1/completions."""
        fields = self._read_fields(body, content_type, _COMPLETION, "prompt")
        if isinstance(fields, EngineFailure):
            return fields
        prompts = split_inputs(fields["prompt"])
        if not prompts:
            return refuse(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        counted = [count_input(self._tokenizer, prompt) for prompt in prompts]
        wanted = fields["max_tokens"] if fields["max_tokens"] is not None else _COMPLETION_DEFAULT_TOKENS
        return self._make_request(fields, counted, wanted, fields["logprobs"], None)

    def _read_fields(self, body: bytes, content_type: str, kinds: Mapping[str, str], required: str) -> dict[str, Any] | EngineFailure:
        decoded = decode_body(body, content_type)
        if isinstance(decoded, EngineFailure):
            return decoded
        fields = check_fields(decoded, kinds, (required,))
        if isinstance(fields, EngineFailure):
            return fields
        if refused := refuse_model(self._model, fields["model"]):
            return refused
        return _check_values(fields) or fields

    def _choose_tool(self, tools: list[Any], choice: Any) -> Mapping[str, Any] | EngineFailure | None:
        """Return the tool to call: the named one, the first if some tool is required, else none."""
        if isinstance(choice, dict):
            name = (choice.get("function") or {}).get("name")
            named = [tool for tool in tools if isinstance(tool, dict) and (tool.get("function") or {}).get("name") == name]
            return named[0] if named else refuse_value(f"The tool specified in `tool_choice` does not match any: {name}", "tool_choice")
        if not tools or choice == "none":
            return None
        if choice == "required" or self._model.auto_tool_choice:
            return tools[0] if isinstance(tools[0], dict) else None
        return refuse(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')

    def _make_request(
        self,
        fields: Mapping[str, Any],
        prompts: list[tuple[str, int]],
        wanted: int | None,
        logprobs: int | None,
        tool: Mapping[str, Any] | None,
    ) -> EngineRequest | EngineFailure:
        """Fit the output into the context and write every choice's script."""
        limit = self._model.max_model_len
        n = fields["n"] or 1
        if wanted is not None and wanted > limit:
            message = f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
            return refuse_value(message, "max_tokens", wanted)
        scripts: list[AnswerScript] = []
        for text, tokens in prompts:
            if tokens > limit:
                return prompt_too_long(limit)
            if tokens + (wanted or 1) > limit:
                return output_too_long(limit, tokens, wanted or 1)
            bounds = _read_bounds(fields, wanted or limit - tokens)
            scripts.extend(self._write_script(text, choice + (fields["seed"] or 0), bounds, tool) for choice in range(n))
        options = fields["stream_options"] or {}
        include_usage = bool(options.get("include_usage"))
        size = self._model.cache_block
        hashed = [hash_blocks(self._tokenizer.pieces(text), size) for text, _ in prompts] if size else []
        return EngineRequest(
            prompt_tokens=sum(tokens for _, tokens in prompts),
            prompts=tuple(tokens for _, tokens in prompts for _ in range(n)),
            scripts=tuple(scripts),
            max_tokens=wanted or limit - prompts[0][1],
            n=n,
            stream=bool(fields["stream"]),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
            logprobs=logprobs,
            blocks=tuple(blocks for blocks in hashed for _ in range(n)),
        )

    def _write_script(self, text: str, seed: int, bounds: Bounds, tool: Mapping[str, Any] | None) -> AnswerScript:
        if tool is None:
            return write_script(self._tokenizer, text, seed, bounds)
        return write_tool_call(self._tokenizer, tool, bounds)


def _add_thoughts(request: EngineRequest, key: str) -> EngineRequest:
    """Mark the first half of each text answer as reasoning."""
    scripts = [script if script.tool else replace(script, thoughts=(len(script.pieces) + 1) // 2) for script in request.scripts]
    return replace(request, scripts=tuple(scripts), reasoning=key)


def refuse_model(model: ModelSpec, name: str | None) -> EngineFailure | None:
    """Return the refusal of a model that is not served; an absent name means the served one."""
    return unknown_model(name, model.names) if name and name not in model.names else None


def split_inputs(value: Any) -> list[Any]:
    """Split into prompts, as text or token ids: `"a"`, `["a", "b"]`, `[1, 2]`, `[[1], [2]]`. [] for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return []
    if all(isinstance(item, int) for item in value):
        return [value]
    return value if all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value) else []


def count_input(tokenizer: SimulatedTokenizer, value: str | list[int]) -> tuple[str, int]:
    """Return a prompt's text (ids are written out, they only seed the answer) and its number of tokens."""
    if isinstance(value, str):
        return value, tokenizer.count(value)
    return " ".join(map(str, value)), len(value)


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(token, int) for token in item)


def _read_bounds(fields: Mapping[str, Any], max_tokens: int) -> Bounds:
    stop = fields["stop"]
    words = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return Bounds(
        max_tokens=max_tokens,
        min_tokens=fields["min_tokens"] or 0,
        ignore_eos=bool(fields["ignore_eos"]),
        stop=tuple(word for word in words if isinstance(word, str)),
    )


def _check_values(fields: Mapping[str, Any]) -> EngineFailure | None:
    """Check ranges of values, with vLLM's texts."""
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = fields.get(name)
        if value is not None and value < 1:
            parameter = "n" if name == "n" else "max_tokens"
            return refuse_value(f"{parameter} must be at least 1, got {value}.", parameter, value)
    if (fields["n"] or 1) > _MOST_CHOICES:
        return refuse_value(f"n must be at most {_MOST_CHOICES}, got {fields['n']}.", "n", fields["n"])
    temperature, top_p = fields["temperature"], fields["top_p"]
    if temperature is not None and not temperature >= 0:
        return refuse_value(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if top_p is not None and not 0 < top_p <= 1:
        return refuse_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if fields["stream_options"] is not None and not fields["stream"]:
        return refuse_value("Stream options can only be defined when `stream=True`.", "stream_options")
    return None
