"""API keys `din_<key id>_<secret>`: looked up by id, verified by a salted hash; secrets are neither stored nor quoted.

An unknown id takes as long as a wrong secret and gets the same refusal.
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
"""Number of random bytes for a new key."""
MAX_KEY_LENGTH = 256
"""In characters; longer keys are refused unread."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_LENGTH = 43
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}").fullmatch
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_HASH = re.compile(r"sha256\$((?:[0-9a-f]{2}){8,64})\$([0-9a-f]{64})").fullmatch
MISSING_KEY = Refusal(RefusalCode.INVALID_API_KEY, "No API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`.")
_WRONG = Refusal(RefusalCode.INVALID_API_KEY, "The API key is not valid.")
_EXPIRED = Refusal(RefusalCode.INVALID_API_KEY, "The API key has expired.")


class Authenticated(Struct, frozen=True, gc=False):
    """The tenant and the key of an authenticated request.

    An identity that is no key has a key, too: its id is `jwt:`, `certificate:` or `gateway:` and a name.
    """

    tenant: Tenant
    key: ApiKey
    scope: str = ""
    """The prefix of the scopes of the tenant's budgets; "": the scopes are those of its keys."""


class NewKey(Struct, frozen=True, gc=False):
    """A new key: `text` goes to the client and is shown once, `hash` goes into the configuration."""

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
            key.id: (Authenticated(tenant, key), key.salt, key.digest, _parse_expiry(key.expires)) for tenant, own in keys for key in own
        }

    def authenticate(
        self, authorization: str, x_api_key: str, now: float, revoked: frozenset[str] = frozenset()
    ) -> Authenticated | Refusal:
        """Authenticate a request by `authorization: Bearer` or `x-api-key`.

        Some clients send both, one of them another service's. The one with our prefix counts; of two of ours that in `authorization`.

        Args:
            authorization: That header's value, "" when it is absent.
            x_api_key: Likewise.
            now: Seconds since the Unix epoch.
            revoked: Ids of revoked keys.
        """
        scheme, _, text = authorization.strip().partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else ""
        if not text.startswith(PREFIX):
            other = x_api_key.strip()
            text = other if other.startswith(PREFIX) or not text else text
        if not text:
            return MISSING_KEY
        if len(text) > MAX_KEY_LENGTH or not text.startswith(PREFIX):
            return _WRONG
        key_id, _, secret = text[len(PREFIX) :].rpartition("_")
        identity, salt, digest, expires = self._entries.get(key_id, _UNKNOWN_KEY)
        proven = hmac.compare_digest(_compute_digest(salt, secret), digest)
        if identity is None or not proven or key_id in revoked:
            return _WRONG
        if expires <= now:
            return _EXPIRED
        return identity


class NodeTokens:
    """The tokens of all nodes, immutable: `authorization: Bearer din_<node id>_<secret>`.

    Args:
        hashes: Salt and digest by node id.
    """

    __slots__ = ("_hashes",)

    def __init__(self, hashes: Mapping[str, tuple[bytes, bytes]]) -> None:
        self._hashes = dict(hashes)

    def find_owner(self, authorization: str) -> str | None:
        """Return the id of the node that owns the token, or None for an invalid token."""
        scheme, _, text = authorization.strip().partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or len(text) > MAX_KEY_LENGTH or not text.startswith(PREFIX):
            return None
        node_id, _, secret = text[len(PREFIX) :].rpartition("_")
        salt, digest = self._hashes.get(node_id, (bytes(SALT_BYTES), bytes(32)))
        proven = hmac.compare_digest(_compute_digest(salt, secret), digest)
        return node_id if proven and node_id in self._hashes else None


def make_key(key_id: str, entropy: bytes) -> NewKey:
    """Create a key and its hash.

    Args:
        key_id: Letters, digits, `-` and `.`, at most 64; names the key in logs.
        entropy: `ENTROPY_BYTES` random bytes, used once.

    Raises:
        ValueError: The id has other characters, or the number of bytes is wrong.
    """
    if not is_key_id(key_id):
        raise ValueError(f"{key_id!r}: a key id is 1-64 letters, digits, '-' and '.', a letter or digit first")
    return _build_key(key_id, entropy)


def make_node_token(node_id: str, entropy: bytes) -> NewKey:
    """Create a node token and its hash. Raises `ValueError` as `make_key` does; a node id may also contain `_`."""
    if not is_node_id(node_id):
        raise ValueError(f"{node_id!r}: a node's id is 1-128 letters, digits, '.', '_' and '-', a letter or digit first")
    return _build_key(node_id, entropy)


def _build_key(name: str, entropy: bytes) -> NewKey:
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key is made from {ENTROPY_BYTES} random bytes")
    number = int.from_bytes(entropy[SALT_BYTES:], "big")
    digits = []
    for _ in range(_SECRET_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    secret = "".join(digits)
    salt = entropy[:SALT_BYTES]
    return NewKey(text=f"{PREFIX}{name}_{secret}", hash=f"sha256${salt.hex()}${_compute_digest(salt, secret).hex()}")


def is_key_id(text: str) -> bool:
    """Return whether the text is a valid key id."""
    return _KEY_ID(text) is not None


def is_node_id(text: str) -> bool:
    """Return whether the text is a valid id for a node with a token."""
    return _NODE_ID(text) is not None


def parse_hash(text: str) -> tuple[bytes, bytes] | None:
    """Return salt and digest of `sha256$<salt, hex>$<digest, hex>`, or None for any other text."""
    found = _HASH(text)
    return None if found is None else (bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def _compute_digest(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode("utf-8", "replace")).digest()


def _parse_expiry(expires: datetime | None) -> float:
    """Return the expiry in seconds since the Unix epoch; a time without zone is UTC."""
    if expires is None:
        return float("inf")
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()


_UNKNOWN_KEY: tuple[Authenticated | None, bytes, bytes, float] = (None, bytes(SALT_BYTES), bytes(32), 0.0)
