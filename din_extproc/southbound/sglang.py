"""SGLang's OpenAI API: vLLM's parameters except for guided decoding.

| here | SGLang |
|---|---|
| `guided_json` | `response_format: {type: json_schema}` |
| `guided_regex` | `regex` |
| `guided_grammar` | `ebnf` |
| `guided_choice`, `best_of` > 1, `length_penalty` | unmappable |

Checked against the request and answer types of SGLang 0.5.23, not against a running one.
"""

from din_extproc.southbound.parameters import UNMAPPABLE, Table, schema_format

OPENAI: Table = {
    "guided_json": schema_format,
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "guided_choice": UNMAPPABLE,
    "best_of": UNMAPPABLE,
    "length_penalty": UNMAPPABLE,
}
