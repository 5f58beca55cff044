"""The generated pages of engines: which operations they have, and what they receive for a sample value of each parameter."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from din_extproc.domain.request import OPERATIONS, Operation
from din_extproc.southbound.dialect import Dialect, DialectRequest, PlainRequest
from din_extproc.southbound.engines import ENGINES, native_operations, openai_operations
from din_extproc.southbound.parameters import ALWAYS_DROPPED, BOOKKEEPING, GUIDANCE, Renamed, Table, rename_parameters

_HEAD = """# Engine parameters

Generated from the tables of `din_extproc/southbound/` (`make golden`): what each engine receives for a sample value of a parameter.
`=`: the client's bytes, unchanged. `-`: the engine has no equivalent; the request is refused (400), or with `unmappable: drop` the
parameter is left out and named in `x-din-dropped-parameters`. Values without effect (null, a penalty of 0, `n: 1`) always pass.
"""
_SCHEMA = {"type": "object"}
SAMPLES: Mapping[str, Any] = {
    "max_tokens": 100,
    "max_completion_tokens": 100,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": "END",
    "n": 2,
    "best_of": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "length_penalty": 1.2,
    "logit_bias": {"42": 5},
    "logprobs": True,
    "top_logprobs": 3,
    "min_tokens": 5,
    "ignore_eos": True,
    "echo": True,
    "suffix": "end",
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "dimensions": 256,
    "response_format": {"type": "json_object"},
    **dict(zip(GUIDANCE.values(), (_SCHEMA, "[0-9]+", ["yes", "no"], "root ::= x"), strict=True)),
    "structured_outputs": {"json": _SCHEMA},
}
_OF_COMPLETIONS: Mapping[str, Any] = {"logprobs": 3}
"""Samples for interfaces whose `logprobs` is the number of completions."""
_TOOL = {"type": "function", "function": {"name": "look"}}
_Map = Callable[[str, Any], str]


_OPERATIONS_HEAD = """# Operations

Generated from the tables of operations and engines (`make golden`). Each operation takes its body by POST, with the model under `model`: a
key of the JSON, or a part of the form (`multipart/form-data`). Further paths mean the same, and the node is asked at the first one. A pool
gets only what its engine has, or what its `operations` name of it: a request that no pool of the model serves is refused. The column of an
engine's own interface is in italics.

| operation | further paths | body | charged for |"""
_METERING = """
## Metering

Every operation counts in `rpm` and takes a slot.

| charged for | reserved | settled |
|---|---|---|
| prompt and output | prompt estimate + expected output | the reported usage; without one the estimate and what was counted |
| prompt | prompt estimate | the reported usage, an output with it; without one (sound) the prompt's estimate |
| images | prompt estimate | likewise, and the images that were asked for (`n`) |
| audio seconds | 10 tokens a second, by the file's size | the reported seconds and tokens; else 10 tokens a second, and the estimate |
| request | nothing | nothing: the model computes nothing. The gateway refuses no length |

Seconds are reported in `usage.seconds` or in `duration` of `verbose_json`, and not in `text`, `srt`, `vtt` and beside a usage in tokens.
The length of a file is estimated by the bytes per second in the header of a WAVE file, else as 128 kbit/s. Forms are up to 26 MiB large.
A form that engines could read in different ways (a part twice, a boundary that does not fit) is refused. A policy that masks sensitive data
refuses forms whose texts have any; the sound itself is not looked at.
"""


_OWN = """
## Operations of your own

`operations:` in `din.yaml` adds one in the same form, here a path of a vLLM plugin that takes JSON and one that takes a form:

```yaml
operations:
  /v1/moderations: { engines: [vllm], prompt: [input], metering: prompt, begins_soon: true }
  /v1/audio/diarizations: { engines: [vllm], body: multipart, metering: seconds, ends: [diarization.done] }
```

Pools of the named engines serve it, unless their `operations` leave it out; rules can name it in `path`, and `check`, `explain`, `verify`
and `fail_open` know it. The words for `metering` are `tokens` (prompt and output), `prompt`, `request`, `seconds` and `images`. But for the
model's name, requests and answers pass as they are. A node whose own Envoy runs by `node.yaml` needs the same section there. Keys:
[configuration](configuration.md).
"""


def operations_page() -> str:
    """Return the page of operations by engine."""
    columns = {name: openai_operations(name) or frozenset() for name in ENGINES if openai_operations(name) != frozenset()}
    columns |= {f"*{name}*": native_operations(name) or frozenset() for name, engine in ENGINES.items() if engine.native is not None}
    text = f"{_OPERATIONS_HEAD} {' | '.join(columns)} |\n|{'---|' * (len(columns) + 4)}\n"
    for operation in OPERATIONS:
        spec = operation.spec
        cells = ["yes" if operation in served else "" for served in columns.values()]
        paths = ", ".join(f"`{path}`" for path in spec.paths)
        text += f"| `{operation}` | {paths} | {spec.body} | {spec.metering} | {' | '.join(cells)} |\n"
    return text + _METERING + _OWN


def parameters_page() -> str:
    """Return the page of what each engine receives for each parameter."""
    same = {name: openai_cell(engine.openai) for name, engine in ENGINES.items() if engine.openai}
    own = {name: native_cell(engine.native) for name, engine in ENGINES.items() if engine.native is not None}
    text = "\n## OpenAI's interface of the engines\n\n" + "".join(_matrix(same))
    text += "\n## Their own interfaces\n\nEvery parameter outside these tables is refused, or dropped, alike.\n\n" + "".join(_matrix(own))
    kept = ", ".join(f"`{name}`" for name in sorted(BOOKKEEPING))
    dropped = ", ".join(f"`{name}`" for name in sorted(ALWAYS_DROPPED))
    end = f"Without effect on an answer, so left out here and never refused: {kept}. Dropped and named in both modes: {dropped}."
    return f"{_HEAD}{text}\n{end}\n"


def _matrix(columns: Mapping[str, _Map]) -> Iterator[str]:
    yield f"| parameter | sample | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}\n"
    for name, value in SAMPLES.items():
        cells = [cell(name, value) for cell in columns.values()]
        if set(cells) != {"="}:
            yield f"| `{name}` | `{_text(value)}` | {' | '.join(cells)} |\n"


def openai_cell(table: Table) -> _Map:
    """Return what makes the cells of an engine's OpenAI interface."""

    def cell(name: str, value: Any) -> str:
        if name not in table:
            return "="
        made = rename_parameters({name: value}, table, drop=True)
        assert isinstance(made, Renamed)
        return _made(name, made.values, made.dropped)

    return cell


def native_cell(dialect: Dialect) -> _Map:
    """Return what makes the cells of an engine's own interface: the difference that a parameter makes to its request."""
    operation = Operation.CHAT if Operation.CHAT in dialect.operations else Operation.COMPLETIONS
    input_ = {"messages": [{"role": "user", "content": "hello"}], "tools": [_TOOL]} if operation is Operation.CHAT else {"prompt": "hello"}

    def order(**parameters: Any) -> DialectRequest:
        made = dialect.build_request(PlainRequest(operation, input_ | parameters, "m", stream=False, drop=True))
        assert isinstance(made, DialectRequest)
        return made

    before = _flattened(json.loads(order().body))

    def cell(name: str, value: Any) -> str:
        values: dict[str, Any] = {}
        for each in (value, _OF_COMPLETIONS.get(name)):
            made = order(**{name: each})
            after = _flattened(json.loads(made.body))
            values = values or {key: inner for key, inner in after.items() if before.get(key) != inner}
            if before.keys() - after.keys() and not made.dropped:
                return "left out"
        return _made(name, values, () if values else (name,))

    return cell


def _flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested objects by their dotted paths."""
    if not isinstance(value, dict) or path.endswith(("format", "value")):
        return {path: value}
    return {key: inner for name, each in value.items() for key, inner in _flattened(each, f"{path}.{name}".strip(".")).items()}


def _made(name: str, values: Mapping[str, Any], dropped: tuple[str, ...]) -> str:
    if name in dropped:
        return "-"
    if not values:
        return "left out"
    return ", ".join(f"`{key}: {_text(value)}`" for key, value in values.items())


def _text(value: Any) -> str:
    return json.dumps(value).replace("|", "\\|")
