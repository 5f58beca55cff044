"""API keys (R29): `din_<key id>_<secret>`, found by id, proven by a salted hash, never kept or quoted.

Rule: an unknown id costs as much as a wrong secret, and nothing tells the two apart.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from msgspec import Struct

from din_extproc.domain.tenant import ApiKey, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode

PREFIX = "din_"
SALT_BYTES = 16
ENTROPY_BYTES = SALT_BYTES + 32
"""Random bytes that a new key is made from."""
LONGEST_KEY = 256
"""Characters: longer ones are refused unread."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_LENGTH = 43
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}").fullmatch
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_HASH = re.compile(r"sha256\$((?:[0-9a-f]{2}){8,64})\$([0-9a-f]{64})").fullmatch
_MISSING = Refusal(RefusalCode.INVALID_API_KEY, "No API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`.")
_WRONG = Refusal(RefusalCode.INVALID_API_KEY, "The API key is not valid.")
_EXPIRED = Refusal(RefusalCode.INVALID_API_KEY, "The API key has expired.")


class Authenticated(Struct, frozen=True, gc=False):
    """Who asks."""

    tenant: Tenant
    key: ApiKey


class NewKey(Struct, frozen=True, gc=False):
    """A key just made: `text` goes to the client and is shown once, `hash` goes into the configuration."""

    text: str
    hash: str

    def __repr__(self) -> str:
        return "NewKey(...)"


class KeyRing:
    """All keys of all tenants, immutable.

    Args:
        keys: Each tenant with its keys. Key ids are unique over all tenants.
    """

    __slots__ = ("_entries",)

    def __init__(self, keys: Iterable[tuple[Tenant, Iterable[ApiKey]]]) -> None:
        self._entries = {
            key.id: (Authenticated(tenant, key), key.salt, key.digest, _moment(key.expires)) for tenant, own in keys for key in own
        }

    def authenticate(
        self, authorization: str, x_api_key: str, now: float, revoked: frozenset[str] = frozenset()
    ) -> Authenticated | Refusal:
        """Whose request this is, by `authorization: Bearer` or, without one, by `x-api-key`.

        Args:
            authorization: That header's value, "" when it is absent.
            x_api_key: Likewise.
            now: Seconds since the epoch.
            revoked: Ids of keys that are valid no more.
        """
        scheme, _, text = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            text = x_api_key
        text = text.strip()
        if not text:
            return _MISSING
        if len(text) > LONGEST_KEY or not text.startswith(PREFIX):
            return _WRONG
        key_id, _, secret = text[len(PREFIX) :].rpartition("_")
        who, salt, digest, expires = self._entries.get(key_id, _NOBODY)
        proven = hmac.compare_digest(_digest(salt, secret), digest)
        if who is None or not proven or key_id in revoked:
            return _WRONG
        if expires <= now:
            return _EXPIRED
        return who


class NodeTokens:
    """The tokens of all nodes, immutable: `authorization: Bearer din_<node id>_<secret>`.

    Args:
        hashes: Salt and digest by node id.
    """

    __slots__ = ("_hashes",)

    def __init__(self, hashes: Mapping[str, tuple[bytes, bytes]]) -> None:
        self._hashes = dict(hashes)

    def owner(self, authorization: str) -> str | None:
        """The node whose token it is; None when it is nobody's."""
        scheme, _, text = authorization.strip().partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or len(text) > LONGEST_KEY or not text.startswith(PREFIX):
            return None
        node_id, _, secret = text[len(PREFIX) :].rpartition("_")
        salt, digest = self._hashes.get(node_id, (bytes(SALT_BYTES), bytes(32)))
        proven = hmac.compare_digest(_digest(salt, secret), digest)
        return node_id if proven and node_id in self._hashes else None


def make_key(key_id: str, entropy: bytes) -> NewKey:
    """A new key and its hash.

    Args:
        key_id: Letters, digits, `-` and `.`, at most 64; names the key in logs.
        entropy: `ENTROPY_BYTES` random bytes, used once.

    Raises:
        ValueError: the id has other characters, or there are fewer or more bytes.
    """
    if not is_key_id(key_id):
        raise ValueError(f"{key_id!r}: a key id is 1-64 letters, digits, '-' and '.', a letter or digit first")
    return _made(key_id, entropy)


def make_node_token(node_id: str, entropy: bytes) -> NewKey:
    """A new token of a node, and its hash. Errors as with `make_key`; a node's id may be any name."""
    if not is_node_id(node_id):
        raise ValueError(f"{node_id!r}: a node's id is 1-128 letters, digits, '.', '_' and '-', a letter or digit first")
    return _made(node_id, entropy)


def _made(name: str, entropy: bytes) -> NewKey:
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key is made from {ENTROPY_BYTES} random bytes")
    number = int.from_bytes(entropy[SALT_BYTES:], "big")
    digits = []
    for _ in range(_SECRET_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    secret = "".join(digits)
    salt = entropy[:SALT_BYTES]
    return NewKey(text=f"{PREFIX}{name}_{secret}", hash=f"sha256${salt.hex()}${_digest(salt, secret).hex()}")


def is_key_id(text: str) -> bool:
    """Whether a key may be called this."""
    return _KEY_ID(text) is not None


def is_node_id(text: str) -> bool:
    """Whether a node that has a token may be called this."""
    return _NODE_ID(text) is not None


def parse_hash(text: str) -> tuple[bytes, bytes] | None:
    """Salt and digest of `sha256$<salt, hex>$<digest, hex>`; None when it is something else."""
    found = _HASH(text)
    return None if found is None else (bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def _digest(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode("utf-8", "replace")).digest()


def _moment(expires: datetime | None) -> float:
    """Seconds since the epoch; a time without zone is UTC."""
    if expires is None:
        return float("inf")
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()


_NOBODY: tuple[Authenticated | None, bytes, bytes, float] = (None, bytes(SALT_BYTES), bytes(32), 0.0)
