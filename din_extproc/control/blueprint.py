"""What Envoys are served that does not depend on which nodes there are: the clusters and the routes of a topology.

Rule: the same topology gives the same bytes. Importing this module takes seconds (Envoy's whole
vocabulary) and a cluster takes about a millisecond: neither belongs on an event loop.
"""

from din_extproc.control.clusters import discovered_pool, moving_clusters
from din_extproc.control.routes import route_configuration
from din_extproc.control.snapshot import CLUSTER, ROUTES, Blueprint, Resource
from din_extproc.control.topology import Topology


def blueprint(topology: Topology) -> Blueprint:
    """The clusters of all pools, and the routes."""
    clusters = tuple(Resource.of(pool.name, CLUSTER, bytes(discovered_pool(pool, topology))) for pool in topology.pools)
    routes = route_configuration(topology)
    moving = tuple(Resource.of(cluster.name, CLUSTER, bytes(cluster)) for cluster in moving_clusters(topology))
    return Blueprint(clusters, Resource.of(routes.name, ROUTES, bytes(routes)), topology.fail_open_pool, moving)
