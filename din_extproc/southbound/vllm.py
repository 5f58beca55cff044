"""vLLM's OpenAI interface: the vocabulary that everything else is measured by. Nothing has to be changed.

Checked against vLLM 0.32: it ignores parameters that it does not know, so those are passed on.
"""

from din_extproc.southbound.parameters import Table

OPENAI: Table = {}
