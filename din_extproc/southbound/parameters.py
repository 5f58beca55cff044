"""What engines call the parameters of a request, and which ones they don't have: one vocabulary, one table per interface.

Rule: a parameter is passed on with its meaning, or it is refused, or it is dropped and named. It is never silently changed. A value that
asks for nothing (null, a penalty of 0, one choice) may be left out without a word.

The vocabulary is OpenAI's and, beyond it, that of vLLM's extensions. A table names the parameters for which an engine has another word
(`name`), another shape (`Shape`), or none (`UNMAPPABLE`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from din_extproc.domain.verdict import Refusal
from din_extproc.southbound.dialect import refused

UNMAPPABLE = None
Shape = Callable[[Any], "tuple[str, Any] | None"]
"""Makes the engine's name and value of a value; None: this value can't be expressed."""
Table = Mapping[str, "str | Shape | None"]

BOOKKEEPING = frozenset({"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "stream_options"})
"""Parameters that change nothing about an answer; `stream_options` only says what is told of it."""
WISHES = frozenset({"parallel_tool_calls"})
"""What clients say unasked (LlamaIndex does) and no answer depends on: dropped and named even where other parameters are refused."""
GUIDANCE = {kind: f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")}
"""What vLLM's `structured_outputs` can hold, and the parameter of the same meaning that it had before."""
OF_CHATS = frozenset({"max_completion_tokens"})
"""Parameters that completions don't have."""
_OUTPUT = ("max_completion_tokens", "max_tokens")
"""One limit under two names, the older for those who don't say the newer."""
_GUIDING = frozenset({"response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar"})
"""What engines call guided decoding: one of them at a time, under whichever name."""
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
    """Parameters in an engine's words."""

    values: dict[str, Any]
    dropped: tuple[str, ...]


def neutral(name: str, value: Any) -> bool:
    """Whether the value asks for nothing that would not happen anyway."""
    if value is None:
        return True
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in _NEUTRAL.get(name, ()))


def translated(given: Mapping[str, Any], table: Table, taken: frozenset[str], *, drop: bool) -> Mapped | Refusal:
    """The parameters of a request for an interface that knows only those of its table.

    Args:
        given: The decoded body.
        table: Of the interface.
        taken: Keys that the dialect has dealt with itself.
        drop: Leave out what can't be said, instead of refusing it.
    """
    values: dict[str, Any] = {}
    dropped: list[str] = []
    known = {name: value for name, value in given.items() if name in table}
    for name, value in given.items():
        if name in taken or name in BOOKKEEPING or value is None:
            continue
        if (name not in table and neutral(name, value)) or (name in table and _said_otherwise(name, value, known.get)):
            continue
        made = _made(table.get(name, UNMAPPABLE), value)
        if made is not None and made[0] in values:
            return _two_ways(name)
        if made is not None:
            values[made[0]] = made[1]
        elif neutral(name, value):
            continue
        elif drop or name in WISHES:
            dropped.append(name)
        else:
            return _cant_say(name)
    return Mapped(values, tuple(dropped))


def unfolding(table: Table) -> Table:
    """The table, and `structured_outputs` by its words for the one kind of guidance that stands in there."""

    def unfolded(value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, dict) or len(value) != 1:
            return None
        [(kind, wanted)] = value.items()
        return _made(table.get(GUIDANCE.get(kind, ""), UNMAPPABLE), wanted)

    return {**table, "structured_outputs": unfolded}


def _nothing(_name: str) -> None:
    return None


class Renamed(Struct, frozen=True):
    """How the parameters of a body change for an engine that speaks OpenAI's words, but for some."""

    values: dict[str, Any]
    """To be put in."""
    removed: tuple[str, ...]
    """Keys that go: those that have another name now, and those that were dropped."""
    dropped: tuple[str, ...]


def renamed(given: Mapping[str, Any], table: Table, *, drop: bool, beside: Callable[[str], Any] = _nothing) -> Renamed | Refusal:
    """The parameters that such an engine calls otherwise or doesn't have.

    Args:
        given: Those parameters of the request that the table names.
        table: Of the engine.
        drop: Leave out what can't be said, instead of refusing it.
        beside: What the request says by a name that the table doesn't have; None: nothing.
    """
    values: dict[str, Any] = {}
    removed: list[str] = []
    dropped: list[str] = []
    for name, value in given.items():
        if neutral(name, value):
            continue
        if _said_otherwise(name, value, beside):
            removed.append(name)
            continue
        made = _made(table[name], value)
        if made is not None and name not in _OUTPUT and _asked_again(made[0], values, beside):
            return _two_ways(name)
        if made is not None:
            values[made[0]] = made[1]
        elif drop or name in WISHES:
            dropped.append(name)
        else:
            return _cant_say(name)
        removed.append(name)
    return Renamed(values, tuple(removed), tuple(dropped))


def _said_otherwise(name: str, value: Any, others: Callable[[str], Any]) -> bool:
    """Whether the output's limit stands under its other name. A newer name with no number says nothing where the older has one."""
    newer, older = _OUTPUT
    return bool(others(newer)) if name == older else name == newer and not value and bool(others(older))


def _asked_again(name: str, values: Mapping[str, Any], beside: Callable[[str], Any]) -> bool:
    """Whether the same is asked for already, here or by the client in the engine's own words."""
    names = _GUIDING if name in _GUIDING else {name}
    return any(each in values or not neutral(each, beside(each)) for each in names)


def _two_ways(name: str) -> Refusal:
    return refused(f"{name!r} and another parameter ask for the same in two ways.", name)


def _made(rule: "str | Shape | None", value: Any) -> tuple[str, Any] | None:
    if rule is UNMAPPABLE:
        return None
    return (rule, value) if isinstance(rule, str) else rule(value)


def _cant_say(name: str) -> Refusal:
    return refused(f"The engine that serves this model has no {name!r}, or can't be told this value of it.", name)
