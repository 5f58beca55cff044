"""The nodes of one cluster as Envoy's message, put together from one part per node.

Invariant: a part is serialised once. Concatenated messages are one message with all their entries, so a change of one node among ten
thousand costs a join.
"""

from collections.abc import Sequence

from din_extproc._proto.envoy.config.endpoint.v3.endpoint_components_pb2 import LocalityLbEndpoints
from din_extproc.control.endpoint_metadata import NAMESPACE, make_endpoint_metadata
from din_extproc.control.protobuf_fields import encode_field
from din_extproc.domain.node import Node

_CLUSTER_NAME = 1
_ENDPOINTS = 2
_PRIORITY = bytes((0x28,))
"""`endpoints.priority`, before a number below 128."""
_POLICY = encode_field(4, encode_field(3, bytes((0x08, 0xA0, 0x8D, 0x06))))
"""`policy.overprovisioning_factor`, `WHOLE_WITH_ONE` percent."""


def make_node_part(node: Node, pool: str, *, fail_open: bool) -> bytes:
    """A node as the only one of its locality."""
    part = LocalityLbEndpoints()
    added = part.lb_endpoints.add()
    if node.remote is None:
        address = added.endpoint.address.socket_address
        address.address, address.port_value = node.endpoint.host, node.endpoint.port
    else:
        added.endpoint.address.envoy_internal_address.server_listener_name = node.endpoint.host
    added.metadata.filter_metadata[NAMESPACE].update(make_endpoint_metadata(node, pool, fail_open=fail_open))
    return part.SerializeToString()


def make_assignment(cluster: str, *parts: Sequence[bytes]) -> bytes:
    """A serialised `ClusterLoadAssignment` of nodes' parts, by priority; those of one priority share a locality."""
    groups = (b"".join(each) + _PRIORITY + bytes((priority,)) for priority, each in enumerate(parts))
    return encode_field(_CLUSTER_NAME, cluster.encode()) + b"".join(encode_field(_ENDPOINTS, each) for each in groups) + _POLICY
