"""Answers of node sources: endpoints with their states, and the reason if a source fails."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Endpoint


class FoundEndpoint(Struct, frozen=True):
    """One endpoint of a source's answer."""

    weight: int = 1
    state: NodeState = NodeState.READY
    stated: Mapping[str, Any] = {}
    """Fields of `Node` that the source states; the others are those of the pool's template."""
    problem: str = ""
    """Reason why it can't be a node; "": it can."""


class SourceAnswer(Struct, frozen=True):
    """The endpoints of a source at one time."""

    endpoints: Mapping[Endpoint, FoundEndpoint]
    """In a stable order. Those of the last good answer while the source fails."""
    problem: str = ""
    """Reason why there are none, or why a part is from an earlier answer; "": all is current."""
    remedy: str = ""
    """The remedy for an operator."""
