"""Keys as the file writes them: by a name and a hash, never by what they are.

Rule: what is no hash is refused without being repeated: it may be the key itself.
"""

from typing import Annotated

from pydantic import AfterValidator

from din_extproc.admit.keys import is_key_id, parse_hash

OWN_KEY = "make each its own key: `din-extproc keys new`"


def _check_key_id(text: str) -> str:
    if not is_key_id(text):
        raise ValueError(f"{text!r}: a key id is 1-64 letters, digits, '-' and '.', a letter or digit first")
    return text


def _check_hash(text: str) -> str:
    if parse_hash(text) is None:
        raise ValueError("not a key's hash: sha256$<salt, hex>$<digest, 64 hex digits>, as `din-extproc keys new` prints it")
    return text


KeyId = Annotated[str, AfterValidator(_check_key_id)]
KeyHash = Annotated[str, AfterValidator(_check_hash)]
