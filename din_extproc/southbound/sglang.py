"""SGLang's OpenAI API: vLLM's parameters except for guided decoding.

| here | SGLang |
|---|---|
| `guided_json` | `response_format: {type: json_schema}` |
| `guided_regex` | `regex` |
| `guided_grammar` | `ebnf` |
| `guided_choice`, `best_of` > 1, `length_penalty` | unmappable |

Checked against the request and answer types of SGLang 0.5.23, not against a running one.
"""

from typing import Any

import msgspec

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
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": UNMAPPABLE,
    "best_of": UNMAPPABLE,
    "length_penalty": UNMAPPABLE,
}
