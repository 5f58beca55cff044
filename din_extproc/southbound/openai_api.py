"""OpenAI's hosted API, and those of other providers that offer it: the vocabulary without vLLM's extensions.

| here | OpenAI |
|---|---|
| `guided_json` | `response_format: {type: json_schema}` |
| `guided_regex`, `guided_choice`, `guided_grammar` | unmappable |
| `top_k`, `min_p`, `repetition_penalty`, `length_penalty`, `min_tokens`, `ignore_eos`, `best_of` > 1 | unmappable |

Written by OpenAI's API reference, which refuses parameters that it does not know.
"""

from din_extproc.domain.request import TRANSCRIBING, Operation
from din_extproc.southbound.parameters import UNMAPPABLE, Table, schema_format

OPENAI: Table = {
    "guided_json": schema_format,
    **dict.fromkeys(
        (
            *("guided_regex", "guided_choice", "guided_grammar", "best_of", "top_k", "min_p", "min_tokens"),
            *("repetition_penalty", "length_penalty", "ignore_eos"),
        ),
        UNMAPPABLE,
    ),
}
AZURE = TRANSCRIBING | {
    Operation.CHAT,
    Operation.COMPLETIONS,
    Operation.RESPONSES,
    Operation.EMBEDDINGS,
    Operation.SPEECH,
    Operation.IMAGES,
}
"""The operations of Azure OpenAI."""
OPERATIONS = AZURE | {Operation.INPUT_TOKENS, Operation.COMPACT}
