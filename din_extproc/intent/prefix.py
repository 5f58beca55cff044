"""How a prompt begins: one number for requests that an engine could serve from the same cached beginning.

Rule: the first text only (a chat's system prompt, else its first message), and no more than its first bytes: what follows differs anyway.
"""

from zlib import crc32

from din_extproc.intent.openai import Prompt

BYTES = 1024


def prefix(prompt: Prompt) -> int:
    """A number that is the same for prompts that begin alike, in every process; 0 when there is no text."""
    beginning = prompt.strings[:BYTES]
    end = beginning.find(b'","')
    return crc32(beginning.removesuffix(b'"') if end < 0 else beginning[:end])
