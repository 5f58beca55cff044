"""OpenAI's hosted API, and those of other providers that offer it: the vocabulary without vLLM's extensions.

| here | OpenAI |
|---|---|
| `guided_json` | `response_format: {type: json_schema}` |
| `guided_regex`, `guided_choice`, `guided_grammar` | unmappable |
| `top_k`, `min_p`, `repetition_penalty`, `length_penalty`, `min_tokens`, `ignore_eos`, `best_of` > 1 | unmappable |

Written by OpenAI's API reference, which refuses parameters that it does not know.
"""

from typing import Any

import msgspec

from din_extproc.domain.request import Operation
from din_extproc.southbound.parameters import UNMAPPABLE, Table


def _schema(value: Any) -> tuple[str, Any] | None:
    """Convert a schema, which may be text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return None
    if not isinstance(value, dict):
        return None
    return "response_format", {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


OPENAI: Table = {
    "guided_json": _schema,
    **dict.fromkeys(
        (
            *("guided_regex", "guided_choice", "guided_grammar", "best_of", "top_k", "min_p", "min_tokens"),
            *("repetition_penalty", "length_penalty", "ignore_eos"),
        ),
        UNMAPPABLE,
    ),
}
OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETIONS, Operation.RESPONSES, Operation.EMBEDDINGS})
