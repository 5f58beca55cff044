"""`trtllm-serve`, TensorRT-LLM's OpenAI interface: vLLM's words but for guided decoding, which it knows as `response_format`.

| here | trtllm-serve |
|---|---|
| `guided_json` | `response_format: {type: json, schema}` |
| `guided_regex` | `response_format: {type: regex, regex}` |
| `guided_grammar` | `response_format: {type: ebnf, ebnf}` |
| `guided_choice`, `min_p` > 0, `logit_bias` | unmappable |

Written by its documentation; not checked against a running TensorRT-LLM.
"""

from din_extproc.southbound.parameters import UNMAPPABLE, Table

OPENAI: Table = {
    "guided_json": lambda value: ("response_format", {"type": "json", "schema": value}),
    "guided_regex": lambda value: ("response_format", {"type": "regex", "regex": value}),
    "guided_grammar": lambda value: ("response_format", {"type": "ebnf", "ebnf": value}),
    "guided_choice": UNMAPPABLE,
    "min_p": UNMAPPABLE,
    "logit_bias": UNMAPPABLE,
}
