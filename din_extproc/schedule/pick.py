"""Filter the pool's nodes, then let a strategy rank them.

Rule: filtering is a function of nodes and demand alone, so that its result can be kept (see `route/cache.py`).
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.node import Node
from din_extproc.domain.verdict import Code, Refusal
from din_extproc.schedule.load import Load
from din_extproc.schedule.round_robin import RoundRobin
from din_extproc.schedule.token_available import TokenAvailable


class Strategy(Protocol):
    """Ranks one set of nodes. Made anew whenever the set changes."""

    def pick(self, count: int) -> tuple[Node, ...]:
        """The best node first; at most `count`, all different."""


STRATEGIES: dict[str, Callable[[tuple[Node, ...], Load], Strategy]] = {
    "round_robin": RoundRobin,
    "token_available": TokenAvailable,
}


class Demand(Struct, frozen=True, gc=False):
    """What a node must bring. `tokens`: prompt plus requested output."""

    tokens: int
    version: str
    accepts: Callable[[str], bool]
    """Whether a model version meets the constraint that `version` spells."""


def fitting(nodes: tuple[Node, ...], demand: Demand) -> tuple[Node, ...] | Refusal:
    """The nodes that can take the request at all; a refusal that names the first thing that none of them has."""
    if not nodes:
        return Refusal(Code.NO_HEALTHY_NODE, "No node of the model is in service.")
    versioned = tuple(node for node in nodes if demand.accepts(node.version))
    if not versioned:
        offered = ", ".join(sorted({node.version for node in nodes}))
        return Refusal(
            Code.VERSION_MISMATCH,
            f"No node serves a version that meets {demand.version!r}; in service: {offered}.",
            param="x-din-model-version",
        )
    roomy = tuple(node for node in versioned if node.max_seq_len >= demand.tokens)
    if not roomy:
        longest = max(node.max_seq_len for node in versioned)
        return Refusal(
            Code.CONTEXT_LENGTH_EXCEEDED,
            f"The longest context in service is {longest} tokens; prompt and requested output need {demand.tokens}.",
            param="messages",
        )
    return roomy
