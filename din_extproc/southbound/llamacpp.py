"""llama.cpp's OpenAI interface.

| here | llama.cpp |
|---|---|
| `repetition_penalty` | `repeat_penalty` |
| `guided_json` | `json_schema` |
| `guided_grammar` | `grammar` |
| `guided_regex`, `guided_choice`, `min_tokens`, `best_of` > 1, `length_penalty` | unmappable |

Checked against the server of xllamacpp 2026.10: it ignores what it does not know, `model` included.
"""

from din_extproc.southbound.parameters import UNMAPPABLE, Table

OPENAI: Table = {
    "repetition_penalty": "repeat_penalty",
    "guided_json": "json_schema",
    "guided_grammar": "grammar",
    "guided_regex": UNMAPPABLE,
    "guided_choice": UNMAPPABLE,
    "min_tokens": UNMAPPABLE,
    "best_of": UNMAPPABLE,
    "length_penalty": UNMAPPABLE,
}
