"""Which of the configuration's nodes and pairs of pools Envoy does not know: it was rendered from an older file or by an older version.

Rule: without xDS only Envoy itself can say what it was rendered with, so it is asked; one that does not answer proves nothing.
"""

import logging
from collections.abc import Callable, Mapping

from din_extproc.control.topology import EXT_PROC_CLUSTER
from din_extproc.domain.node import in_flight_cluster
from din_extproc.edge.probe.envoy_admin import fetch_endpoints_once
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)


def find_unknown_nodes(settings: Settings, known: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Return the listed nodes that an Envoy with these endpoints, by cluster, does not have. None with xDS, which sends them."""
    if settings.gateway.xds is not None:
        return ()
    return tuple(
        f"node {node.id} ({node.endpoint}) of pool {pool.name}"
        for pool in settings.pools
        for node in pool.nodes
        if str(node.endpoint) not in known.get(pool.name, frozenset())
    )


def find_unknown_pairs(settings: Settings, known: Mapping[str, frozenset[str]]) -> frozenset[tuple[str, str]]:
    """Return the pairs of pools between which requests move, and whose cluster an Envoy with our own clusters does not have."""
    if settings.gateway.xds is not None or EXT_PROC_CLUSTER not in known:
        return frozenset()
    return frozenset(pair for pair in settings.may_move_in_flight if in_flight_cluster(*pair) not in known)


class EnvoyNodes:
    """Keeps asking the Envoy beside this sidecar until it knows every node and pair of the configuration.

    Args:
        settings: A sound configuration.
        on_pairs: Called when there are other unknown pairs than before.
    """

    def __init__(self, settings: Settings, on_pairs: Callable[[frozenset[tuple[str, str]]], None]) -> None:
        self._settings = settings
        self._on_pairs = on_pairs
        self._done = False
        self.unknown_pairs: frozenset[tuple[str, str]] = frozenset()
        """Pairs that Envoy did not know when it was asked last: no request may be sent to their cluster."""
        self.unknown: tuple[str, ...] = ()
        """Nodes that Envoy did not know when it was asked last."""

    def reload(self, settings: Settings) -> None:
        """There may be other nodes: ask again."""
        self._settings, self._done = settings, False

    async def look(self) -> None:
        """Ask, unless it is known that nothing is missing."""
        if self._done:
            return
        settings = self._settings
        known = await fetch_endpoints_once(settings.envoy.admin)
        if known is None or settings is not self._settings:
            return
        unknown = find_unknown_nodes(settings, known)
        if unknown and unknown != self.unknown:
            _log.warning("Envoy does not know %s: render its configuration again and reload it", "; ".join(unknown))
        pairs = find_unknown_pairs(settings, known)
        self.unknown, self._done = unknown, not unknown and not pairs
        if pairs != self.unknown_pairs:
            self.unknown_pairs = pairs
            self._on_pairs(pairs)
