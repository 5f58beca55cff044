"""`discover:` of a pool: where its further nodes are found.

Rule: a name is checked for what DNS allows; whether it exists is for the source to find out.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from din_extproc.settings.catalog import VersionText
from din_extproc.settings.section import Name, NodeAddress, Positive, Section, Text

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?").fullmatch
_LONGEST_NAME = 253
_LAST_PORT = 65535


def _read_dns(text: object) -> object:
    """`name:port`, or the name of SRV records, such as `_http._tcp.vllm.inference.svc.cluster.local`."""
    if not isinstance(text, str):
        raise ValueError("a DNS name is text: `name:port`")  # noqa: TRY004 - a problem of the file, as all validators report it
    name, colon, port = text.rpartition(":")
    services = text.startswith("_")
    if services == bool(colon):
        raise ValueError(f"{text!r} is not `name:port`, or the name of SRV records without a port, such as `_http._tcp.vllm.local`")
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
    host = name if colon else text
    labels = host.removesuffix(".").split(".")
    if len(host) > _LONGEST_NAME or not all(_LABEL(label) for label in labels):
        raise ValueError(f"{text!r}: {host!r} is not a DNS name (labels of 1-63 letters, digits, '-' and '_')")
    if labels[-1].isdigit():
        raise ValueError(f"{text!r}: {host!r} is an address, not a name: list it under `nodes`")
    return text


class DiscoverSection(Section):
    """Nodes that are found by DNS. What is left out of their properties comes from the model's catalogue entry."""

    dns: Annotated[Text, BeforeValidator(_read_dns)]
    """`name:port`: each A and AAAA record is a node. A name that begins with `_` has SRV records, which give port, priority and weight."""
    every_s: Annotated[float, Field(strict=False, ge=0.1, le=3600)] = 1.0
    """Seconds between two questions. A record with a longer TTL is not asked for before it expires."""
    server: NodeAddress | None = None
    """The DNS server; None: those of the system."""
    version: VersionText | None = None
    dtype: Name | None = None
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")] | None = None
    tp_world_size: Positive | None = None
    max_seq_len: Positive | None = None
    max_concurrency: Positive = 64
    """Of a node with the highest weight; those with a lower one take proportionally less."""
