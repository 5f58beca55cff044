"""The nodes of the configuration that Envoy does not know: it was rendered from an older file, and sends them no requests.

Rule: without xDS only Envoy itself can report its rendered configuration, so its admin port is read; no response proves nothing.
"""

import logging
from collections.abc import Mapping

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


class EnvoyNodes:
    """Keeps asking the Envoy beside this sidecar until it knows every node of the configuration.

    Args:
        settings: A sound configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._done = False
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
        self.unknown, self._done = unknown, not unknown
