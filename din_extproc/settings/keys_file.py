"""The file of keys that `din-extproc keys` keeps: which tenant each belongs to, its hash, when it expires.

Rule: the file holds hashes only; a missing file is read as one without keys.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from din_extproc.admit.keys import parse_hash
from din_extproc.domain.tenant import ApiKey, Tenant
from din_extproc.settings.document import Document, read_yaml
from din_extproc.settings.keys import OWN_KEY
from din_extproc.settings.problems import ConfigProblem
from din_extproc.settings.section import AsTuple, Name, Section
from din_extproc.settings.shape import validated
from din_extproc.settings.tenants import KeySection

Keys = tuple[tuple[Tenant, tuple[ApiKey, ...]], ...]


class StoredKey(KeySection):
    """One key of the file."""

    tenant: Name


class KeysFile(Section):
    """The file."""

    keys: Annotated[tuple[StoredKey, ...], AsTuple] = ()


class StoredKeys(Struct, frozen=True):
    """The content of the file, and its errors."""

    keys: tuple[StoredKey, ...]
    document: Document

    @property
    def tenants(self) -> frozenset[str]:
        """The owner of a key."""
        return frozenset(key.tenant for key in self.keys)

    @property
    def problems(self) -> list[ConfigProblem]:
        """The findings so far."""
        return self.document.problems

    def joined(self, own: Keys, is_broken: Callable[[str], bool]) -> Keys:
        """All keys by tenant, the configuration's and the file's; reports those without a tenant or with another key's id or hash.

        Args:
            own: The configuration's.
            is_broken: Whether the configuration may have a tenant of this name in an invalid section.
        """
        known = {tenant.id for tenant, _ in own}
        ids = {key.id: _make_message(key.id, tenant.id) for tenant, keys in own for key in keys}
        hashes = {(key.salt, key.digest): ids[key.id] for _, keys in own for key in keys}
        for at, key in enumerate(self.keys):
            if key.tenant not in known and not is_broken(key.tenant):
                self.document.report(("keys", at, "tenant"), f"no tenant is called {key.tenant!r}")
            here = f"{_make_message(key.id, key.tenant)} on line {self.document.values['keys', at].line}"
            if (first := ids.setdefault(key.id, here)) != here:
                self.document.report(("keys", at, "id"), f"a second key is called {key.id!r}, the first is {first}", "give each its own id")
            secret = parse_hash(key.hash) or (b"", b"")
            if (first := hashes.setdefault(secret, here)) != here:
                self.document.report(("keys", at, "hash"), f"it is also the hash of {first}", OWN_KEY)
        return tuple((tenant, (*keys, *_filter_tenant(tenant.id, self.keys))) for tenant, keys in own)


def _make_message(key_id: str, tenant: str) -> str:
    return f"key {key_id!r} of tenant {tenant!r}"


def _filter_tenant(tenant: str, keys: Iterable[StoredKey]) -> Iterable[ApiKey]:
    return (key.to_key() for key in keys if key.tenant == tenant)


def read_keys(file: Path, text: str) -> StoredKeys:
    """The keys in the file's text."""
    document = read_yaml(text, str(file), {})
    found = KeysFile() if document.data is None else validated(KeysFile, document)
    return StoredKeys(() if found is None else found.keys, document)
