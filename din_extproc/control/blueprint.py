"""The xDS resources that don't depend on the present nodes: the clusters and the routes of a topology.

Invariant: the same topology gives the same bytes. Importing this module takes seconds (Envoy's whole
vocabulary) and a cluster takes about a millisecond: neither belongs on an event loop.
"""

from din_extproc.control.clusters import build_discovered_pair, build_discovered_pool
from din_extproc.control.routes import build_route_configuration
from din_extproc.control.snapshot import CLUSTER, ROUTES, Blueprint, Pair, Resource
from din_extproc.control.topology import Topology
from din_extproc.domain.node import in_flight_cluster


def make_blueprint(topology: Topology) -> Blueprint:
    """The clusters of all pools and pairs, and the routes."""
    pools = {pool.name: pool for pool in topology.pools}
    clusters = tuple(Resource.of(name, CLUSTER, bytes(build_discovered_pool(pool, topology))) for name, pool in pools.items())
    pairs = tuple(
        Pair(
            Resource.of(in_flight_cluster(pool, fallback), CLUSTER, bytes(build_discovered_pair(pools[pool], pools[fallback], topology))),
            pool,
            fallback,
        )
        for pool, fallback in topology.moves
    )
    routes = build_route_configuration(topology)
    return Blueprint(clusters, Resource.of(routes.name, ROUTES, bytes(routes)), topology.fail_open_pool, pairs)
