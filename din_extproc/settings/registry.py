"""`gateway.registry:`, where nodes register, and the tokens that they prove themselves with.

Rule: without the section no node can register; a token is known by its hash only.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from din_extproc.admit.keys import is_node_id, parse_hash
from din_extproc.registry.claims import AllowedAddresses
from din_extproc.settings.document import Document, read_yaml
from din_extproc.settings.problems import ConfigProblem
from din_extproc.settings.section import ListenAddress, Section, Text
from din_extproc.settings.tls import ServerTlsSection

Tokens = dict[str, tuple[bytes, bytes]]
"""Salt and digest by node id."""
Reaches = dict[str, AllowedAddresses]
"""Where a node may be, by node id; nodes that are missing may be anywhere."""


class RegistryListenSection(Section):
    """The registry's ports."""

    address: ListenAddress | None = None
    """gRPC; None: closed."""
    http_address: ListenAddress | None = None
    """HTTP and JSON; None: closed."""
    tls: ServerTlsSection | None = None
    """Of both ports."""
    bind_certificates: bool = False
    """A node's certificate must carry the node's id: as common name, DNS name or end of a URI name."""
    node_tokens_file: Text
    """Lines `node-id: sha256$...`, as `din-extproc keys node` prints them; relative to the configuration."""
    heartbeat_s: Annotated[float, Field(strict=False, ge=0.1, le=60)] = 3.0
    dead_after_s: Annotated[float, Field(strict=False, ge=0.2, le=600)] = 12.0
    """A node that says nothing for so long is dead."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "RegistryListenSection":
        if self.address is None and self.http_address is None:
            raise ValueError("`address` (gRPC), `http_address`, or both")
        if self.bind_certificates and (self.tls is None or self.tls.client_ca is None):
            raise ValueError("bind_certificates needs `tls` with `client_ca`: else nodes show no certificates")
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError(f"dead_after_s is at least twice heartbeat_s ({self.heartbeat_s:g}): one heartbeat may be lost")
        return self


def read_tokens(file: Path, text: str) -> tuple[Tokens, Reaches, list[ConfigProblem]]:
    """The tokens in the file's text, where each lets its node register, and what is wrong with it.

    A line is `node-id: sha256$...`, or `node-id: {hash: sha256$..., addresses: [10.0.0.0/24]}`.
    """
    document = read_yaml(text, str(file), {})
    entries = document.data if document.data is not None else {}
    if not isinstance(entries, dict):
        document.report((), "lines `node-id: sha256$...` are expected")
        return {}, {}, document.problems
    tokens: Tokens = {}
    reaches: Reaches = {}
    for node_id, entry in entries.items():
        written = entry.get("hash") if isinstance(entry, dict) else entry
        hashed = parse_hash(written) if isinstance(written, str) else None
        if not is_node_id(node_id):
            document.report((node_id,), f"{node_id!r} is no node's id", at_key=True)
        elif hashed is None:
            document.report((node_id,), "not a token's hash: sha256$<salt, hex>$<digest, hex>", "make one with `din-extproc keys node`")
        else:
            tokens[node_id] = hashed
            if isinstance(entry, dict):
                reaches[node_id] = _read_reach(node_id, entry, document)
    return tokens, reaches, document.problems


def _read_reach(node_id: str, entry: dict[str, object], document: Document) -> AllowedAddresses:
    unknown = sorted(set(entry) - {"hash", "addresses"})
    if unknown:
        document.report((node_id, unknown[0]), "unknown field", "known here: addresses, hash", at_key=True)
    listed = entry.get("addresses")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) for each in listed):
        document.report((node_id, "addresses"), "a list of texts such as 10.0.0.0/24 or 10.0.0.7:8000 is expected")
        return AllowedAddresses()
    try:
        return AllowedAddresses.parse(listed)
    except ValueError as error:
        document.report((node_id, "addresses"), str(error), "a network such as 10.0.0.0/24, or an address and a port")
        return AllowedAddresses()
