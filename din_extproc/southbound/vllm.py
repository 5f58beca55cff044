"""vLLM's OpenAI interface: the vocabulary that everything else is measured by.

| here | vLLM |
|---|---|
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | `structured_outputs: {json}`, `{regex}`, `{choice}`, `{grammar}` |

Checked against vLLM 0.32: it ignores parameters that it does not know, so those are passed on; the four are such by now.
"""

from functools import partial
from typing import Any

from din_extproc.southbound.parameters import GUIDANCE, Table


def _structured(kind: str, value: Any) -> tuple[str, Any]:
    return "structured_outputs", {kind: value}


OPENAI: Table = {name: partial(_structured, kind) for kind, name in GUIDANCE.items()}
