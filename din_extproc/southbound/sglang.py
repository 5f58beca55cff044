"""SGLang's OpenAI interface: vLLM's words but for guided decoding.

| here | SGLang |
|---|---|
| `guided_json` | `json_schema`, as text |
| `guided_regex` | `regex` |
| `guided_grammar` | `ebnf` |
| `guided_choice`, `best_of` > 1, `length_penalty` | unmappable |

Written by its documentation; not checked against a running SGLang.
"""

from typing import Any

import msgspec

from din_extproc.southbound.parameters import UNMAPPABLE, Table


def _schema(value: Any) -> tuple[str, Any]:
    return "json_schema", value if isinstance(value, str) else msgspec.json.encode(value).decode()


OPENAI: Table = {
    "guided_json": _schema,
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": UNMAPPABLE,
    "best_of": UNMAPPABLE,
    "length_penalty": UNMAPPABLE,
}
