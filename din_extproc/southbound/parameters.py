"""Maps request parameters to those of engines: one vocabulary, one table per API.

A parameter keeps its meaning, or it is refused, or it is dropped and reported; it is never changed silently. A value without effect (null,
a penalty of 0, one choice) may be omitted.

The vocabulary is OpenAI's and, beyond it, vLLM's extensions. A table names the parameters for which an engine has another name (`str`),
another form (`Shape`), or no equivalent (`UNMAPPABLE`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.dialect import refuse_unsupported

UNMAPPABLE = None
Shape = Callable[[Any], "tuple[str, Any] | None"]
"""Converts a value to the engine's name and value; None: the value is unsupported."""
Table = Mapping[str, "str | Shape | None"]

BOOKKEEPING = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "stream_options"})
"""Parameters without effect on the answer's content; `stream_options` only selects what is reported about it."""
ALWAYS_DROPPED = frozenset({"parallel_tool_calls"})
"""Parameters that client libraries send by default (LlamaIndex does) and no answer depends on: always dropped instead of refused."""
GUIDANCE = {kind: f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")}
"""The kinds of vLLM's `structured_outputs`, and the older parameter with the same meaning."""
CHAT_ONLY = frozenset({"max_completion_tokens"})
"""Parameters that completions do not have."""
_OUTPUT = ("max_completion_tokens", "max_tokens")
"""Two names of one limit; the older one applies when the newer one is missing."""
_GUIDING = frozenset({"response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar"})
"""Names of guided decoding in the engines; only one may be set."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "tools": ([],),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_k": (-1, 0),
    "top_p": (1,),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "structured_outputs": ({},),
    "encoding_format": ("float",),
    "stop": ([],),
}


class Mapped(Struct, frozen=True):
    """Parameters in the engine's API."""

    values: dict[str, Any]
    dropped: tuple[str, ...]


def is_neutral(name: str, value: Any) -> bool:
    """Return whether the value equals the parameter's default effect."""
    if value is None:
        return True
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in _NEUTRAL.get(name, ()))


def map_parameters(given: Mapping[str, Any], table: Table, taken: frozenset[str], *, drop: bool) -> Mapped | Refusal:
    """Map the parameters of a request to an API that supports only those of its table.

    Args:
        given: The decoded body.
        table: The API's table.
        taken: Keys that the dialect handles itself.
        drop: Drop unsupported parameters instead of refusing them.
    """
    values: dict[str, Any] = {}
    dropped: list[str] = []
    known = {name: value for name, value in given.items() if name in table}
    for name, value in given.items():
        if name in taken or name in BOOKKEEPING or value is None:
            continue
        if (name not in table and is_neutral(name, value)) or (name in table and _is_set_by_other_name(name, value, known.get)):
            continue
        made = _convert(table.get(name, UNMAPPABLE), value)
        if made is not None and made[0] in values:
            return _refuse_duplicate(name)
        if made is not None:
            values[made[0]] = made[1]
        elif is_neutral(name, value):
            continue
        elif drop or name in ALWAYS_DROPPED:
            dropped.append(name)
        else:
            return _refuse_parameter(name)
    return Mapped(values, tuple(dropped))


def schema_format(value: Any) -> tuple[str, Any] | None:
    """Convert `guided_json`, a schema or its text, to OpenAI's `response_format`; None: it is neither."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return None
    if not isinstance(value, dict):
        return None
    return "response_format", {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def with_structured_outputs(table: Table) -> Table:
    """Return the table extended by `structured_outputs`, which is mapped as the one kind of guidance that it holds."""

    def unfolded(value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, dict) or len(value) != 1:
            return None
        [(kind, wanted)] = value.items()
        return _convert(table.get(GUIDANCE.get(kind, ""), UNMAPPABLE), wanted)

    return {**table, "structured_outputs": unfolded}


def _nothing(_name: str) -> None:
    return None


class Renamed(Struct, frozen=True):
    """The changes to a body for an engine with OpenAI's API, except for some parameters."""

    values: dict[str, Any]
    """Values to insert."""
    removed: tuple[str, ...]
    """Keys to remove: the renamed and the dropped ones."""
    dropped: tuple[str, ...]


def rename_parameters(given: Mapping[str, Any], table: Table, *, drop: bool, beside: Callable[[str], Any] = _nothing) -> Renamed | Refusal:
    """Map the parameters that the engine names differently or lacks.

    Args:
        given: The request's parameters that the table names.
        table: The engine's table.
        drop: Drop unsupported parameters instead of refusing them.
        beside: Returns the request's value of a parameter that the table lacks; None: it is missing.
    """
    values: dict[str, Any] = {}
    removed: list[str] = []
    dropped: list[str] = []
    for name, value in given.items():
        if is_neutral(name, value):
            continue
        if _is_set_by_other_name(name, value, beside):
            removed.append(name)
            continue
        made = _convert(table[name], value)
        if made is not None and name not in _OUTPUT and _is_set_twice(made[0], values, beside):
            return _refuse_duplicate(name)
        if made is not None:
            values[made[0]] = made[1]
        elif drop or name in ALWAYS_DROPPED:
            dropped.append(name)
        else:
            return _refuse_parameter(name)
        removed.append(name)
    return Renamed(values, tuple(removed), tuple(dropped))


def _is_set_by_other_name(name: str, value: Any, others: Callable[[str], Any]) -> bool:
    """Return whether the output limit is set under its other name. A newer name without a value yields to the older one."""
    newer, older = _OUTPUT
    return bool(others(newer)) if name == older else name == newer and not value and bool(others(older))


def _is_set_twice(name: str, values: Mapping[str, Any], beside: Callable[[str], Any]) -> bool:
    """Return whether another parameter already sets the same, here or under the engine's own name."""
    names = _GUIDING if name in _GUIDING else {name}
    return any(each in values or not is_neutral(each, beside(each)) for each in names)


def _refuse_duplicate(name: str) -> Refusal:
    return refuse_unsupported(f"{name!r} and another parameter set the same option; send only one of them.", name)


def _convert(rule: "str | Shape | None", value: Any) -> tuple[str, Any] | None:
    if rule is UNMAPPABLE:
        return None
    return (rule, value) if isinstance(rule, str) else rule(value)


def _refuse_parameter(name: str) -> Refusal:
    return refuse_unsupported(f"The engine of this model does not support {name!r} with this value; leave it out.", name)
