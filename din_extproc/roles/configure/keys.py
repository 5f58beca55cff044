"""The role of `din-extproc keys`: makes, rotates, revokes and lists API keys in the configuration's `keys_file`.

Rule: a key is returned once and only its hash is stored. A revocation reaches all replicas before the file changes.
"""

import asyncio
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct

from din_extproc.admit.keys import ENTROPY_BYTES, NewKey, make_key
from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.domain.tenant import ApiKey
from din_extproc.edge.keys_file import edit_keys
from din_extproc.edge.redis.revocations import Revocations
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.roles.operate.unknown_tenant import unknown_tenant_message
from din_extproc.settings.settings import Settings

_TIMEOUT_MS = 2000
_SUFFIX_BYTES = 3


class KeyFileError(Exception):
    """The keys were not changed; the message says why."""


class MadeKey(Struct, frozen=True):
    """A new key, to be printed once."""

    id: str
    tenant: str
    key: str
    expires: datetime | None = None


class ListedKey(Struct, frozen=True):
    """One row of `keys list`."""

    id: str
    tenant: str
    expires: datetime | None
    state: str
    """`valid`, `expired` or `revoked`."""


def make_key_of_tenant(settings: Settings, tenant: str, key_id: str | None, valid_for: timedelta | None) -> MadeKey:
    """Make a key of a tenant and store its hash.

    Raises:
        KeyFileError: no file is configured, the tenant or the id is wrong, or the file can't be written.
    """
    if tenant not in {each.id for each in settings.tenants}:
        raise KeyFileError(unknown_tenant_message(settings, tenant))
    expires = expiry(valid_for)
    key_id = key_id or f"{tenant.replace('_', '-')}-{secrets.token_hex(_SUFFIX_BYTES)}"
    made = _make(settings, key_id)
    _edit(settings, key_id, lambda entries: entries.append(_make_entry(tenant, key_id, made, expires)))
    return MadeKey(key_id, tenant, made.text, expires)


def expiry(valid_for: timedelta | None) -> datetime | None:
    """Return when a key that is made now expires; None: never."""
    return None if valid_for is None else _get_now() + valid_for


def rotate_key(settings: Settings, key_id: str, overlap: timedelta) -> MadeKey:
    """Make a successor with the same limits; the old key expires after the overlap.

    Raises:
        KeyFileError: as with `make_key_of_tenant`, or the key is not in the file.
    """
    stem, _, number = key_id.rpartition(".r")
    successor = f"{stem}.r{int(number) + 1}" if stem and number.isdigit() else f"{key_id}.r2"
    made, found = _make(settings, successor), []

    def change(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["id"] == key_id:
                found.append(entry["tenant"])
                last = _get_now() + overlap
                until = _format_moment(entry.get("expires"))
                entries.append({**entry, "id": successor, "hash": made.hash})
                entry["expires"] = last if until is None else min(until, last)
                return
        raise KeyFileError(f"{_get_keys_file(settings)} has no key {key_id!r}")

    _edit(settings, successor, change)
    return MadeKey(successor, found[0], made.text)


def revoke_key(settings: Settings, key_id: str) -> bool:
    """Revoke a key in every replica within a second, and remove it from the file. False: the file did not have it.

    Raises:
        KeyFileError: the key is unknown, Redis can't be reached, or the file can't be written.
    """
    if key_id not in {key.id for _, keys in settings.keys for key in keys}:
        raise KeyFileError(f"there is no key {key_id!r}")
    try:
        asyncio.run(_publish_revocation(settings, key_id))
    except LimitsUnavailable as error:
        raise KeyFileError(f"{key_id!r} is still valid: the revocation can't be written to redis ({error})") from error
    before = []
    if settings.keys_file is not None:
        try:
            with edit_keys(Path(settings.keys_file)) as entries:
                before = [entry for entry in entries if entry["id"] == key_id]
                entries[:] = [entry for entry in entries if entry["id"] != key_id]
        except OSError as error:
            raise KeyFileError(f"{key_id!r} is revoked, but still in the file: {error}") from error
    return bool(before)


def list_keys(settings: Settings) -> tuple[ListedKey, ...]:
    """Return every key, by tenant. Revocations are known only if Redis answers."""
    try:
        revoked = asyncio.run(_fetch_revoked(settings))
    except LimitsUnavailable:
        revoked = frozenset()
    return tuple(ListedKey(key.id, tenant.id, key.expires, _describe_state(key, revoked)) for tenant, keys in settings.keys for key in keys)


def _describe_state(key: ApiKey, revoked: frozenset[str]) -> str:
    if key.id in revoked:
        return "revoked"
    return "expired" if key.expires is not None and key.expires <= _get_now() else "valid"


def _get_keys_file(settings: Settings) -> Path:
    if settings.keys_file is None:
        raise KeyFileError("the configuration has no `keys_file`; set it to store keys")
    return Path(settings.keys_file)


def _make(settings: Settings, key_id: str) -> NewKey:
    if key_id in {key.id for _, keys in settings.keys for key in keys}:
        raise KeyFileError(f"the key {key_id!r} already exists")
    try:
        return make_key(key_id, secrets.token_bytes(ENTROPY_BYTES))
    except ValueError as error:
        raise KeyFileError(str(error)) from error


def _edit(settings: Settings, key_id: str, change: Any) -> None:
    file = _get_keys_file(settings)
    try:
        with edit_keys(file) as entries:
            if any(entry["id"] == key_id for entry in entries):
                raise KeyFileError(f"the key {key_id!r} already exists")
            change(entries)
    except OSError as error:
        raise KeyFileError(f"{file}: {error.strerror or error}") from error


def _make_entry(tenant: str, key_id: str, made: NewKey, expires: datetime | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"tenant": tenant, "id": key_id, "hash": made.hash}
    return entry if expires is None else entry | {"expires": expires}


def _get_now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _format_moment(written: Any) -> datetime | None:
    """Return an expiry that YAML has parsed: a time without a zone is UTC, a date its first moment."""
    if isinstance(written, datetime):
        return written if written.tzinfo else written.replace(tzinfo=UTC)
    return None if written is None else datetime(written.year, written.month, written.day, tzinfo=UTC)


async def _publish_revocation(settings: Settings, key_id: str) -> None:
    link = make_carrier(settings.store.url.get_secret_value(), (), timeout_ms=_TIMEOUT_MS)
    try:
        if not await link.start():
            raise LimitsUnavailable(link.state.reason)
        await Revocations(link, settings.network).add(key_id)
    finally:
        await link.close()


async def _fetch_revoked(settings: Settings) -> frozenset[str]:
    link = make_carrier(settings.store.url.get_secret_value(), (), timeout_ms=_TIMEOUT_MS)
    try:
        if not await link.start():
            raise LimitsUnavailable(link.state.reason)
        return await Revocations(link, settings.network).fetch_all()
    finally:
        await link.close()
