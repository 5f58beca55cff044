"""The file of keys that `din-extproc keys` keeps: which tenant each belongs to, its hash, when it expires.

Rule: the file holds hashes only; one that is not there yet holds no key.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from din_extproc.domain.tenant import ApiKey, Tenant
from din_extproc.settings.document import Document, read_yaml
from din_extproc.settings.problems import Problem
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


class Stored(Struct, frozen=True):
    """What the file holds, and what is wrong with it."""

    keys: tuple[StoredKey, ...]
    document: Document

    @property
    def tenants(self) -> frozenset[str]:
        """Whoever has a key there."""
        return frozenset(key.tenant for key in self.keys)

    @property
    def problems(self) -> list[Problem]:
        """What was found so far."""
        return self.document.problems

    def joined(self, own: Keys) -> Keys:
        """The keys of the configuration and those of the file, by tenant; reports those that belong to nobody or have another's id."""
        known = {tenant.id for tenant, _ in own}
        taken = {key.id for _, keys in own for key in keys}
        for at, key in enumerate(self.keys):
            if key.tenant not in known:
                self.document.report(("keys", at, "tenant"), f"no tenant is called {key.tenant!r}")
            if key.id in taken:
                self.document.report(("keys", at, "id"), f"a second key is called {key.id!r}", "give each its own id")
            taken.add(key.id)
        return tuple((tenant, (*keys, *_of(tenant.id, self.keys))) for tenant, keys in own)


def _of(tenant: str, keys: Iterable[StoredKey]) -> Iterable[ApiKey]:
    return (key.key() for key in keys if key.tenant == tenant)


def read_keys(file: Path, text: str) -> Stored:
    """The keys in the file's text."""
    document = read_yaml(text, str(file), {})
    found = KeysFile() if document.data is None else validated(KeysFile, document)
    return Stored(() if found is None else found.keys, document)
