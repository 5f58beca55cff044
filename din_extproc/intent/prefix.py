"""Hash of a prompt's prefix, equal for requests that an engine can serve from the same cached prefix.

It covers the first bytes of the first text only (a chat's system prompt, else its first message).
"""

from zlib import crc32

from din_extproc.intent.openai import Prompt

PREFIX_BYTES = 1024


def hash_prefix(prompt: Prompt) -> int:
    """Return a hash that is equal, in every process, for prompts that start alike; 0 when there is no text."""
    beginning = prompt.strings[:PREFIX_BYTES]
    end = beginning.find(b'","')
    return crc32(beginning.removesuffix(b'"') if end < 0 else beginning[:end])
