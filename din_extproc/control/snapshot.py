"""Snapshot of all xDS resources by type and name, versioned by a hash of their content.

Invariant: equal content has an equal version in every process, so an Envoy that has it receives no update.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import takewhile
from operator import is_

from msgspec import Struct

from din_extproc.control.assignment import make_assignment, make_node_part
from din_extproc.control.protobuf_fields import encode_field
from din_extproc.domain.node import Node

_TYPES = "type.googleapis.com/envoy.config."
CLUSTER = f"{_TYPES}cluster.v3.Cluster"
ASSIGNMENT = f"{_TYPES}endpoint.v3.ClusterLoadAssignment"
ROUTES = f"{_TYPES}route.v3.RouteConfiguration"
SERVED = frozenset({CLUSTER, ASSIGNMENT, ROUTES})
_HASH_DIGITS = 16


class Resource(Struct, frozen=True, gc=False):
    """One xDS resource."""

    name: str
    version: str
    packed: bytes
    """As a serialised `google.protobuf.Any`."""

    @classmethod
    def of(cls, name: str, type_url: str, message: bytes) -> "Resource":
        """Pack a serialised message."""
        return cls(name, _compute_digest(message), encode_field(1, type_url.encode()) + encode_field(2, message))


class Pair(Struct, frozen=True):
    """The cluster of two pools, whose nodes are theirs."""

    cluster: Resource
    pool: str
    """Its nodes are asked first."""
    fallback: str


class Blueprint(Struct, frozen=True):
    """The part that changes only with the configuration: everything but the nodes."""

    clusters: tuple[Resource, ...]
    """One per pool, under its name."""
    routes: Resource
    fail_open_pool: str | None = None
    pairs: tuple[Pair, ...] = ()
    """Pools, each with the one that takes over its requests in flight."""

    def keep_from(self, former: "Blueprint") -> "Blueprint":
        """This one, with the clusters that the former had and this one has not: somebody may still be on the way to them."""
        names = {cluster.name for cluster in self.clusters}
        kept = tuple(cluster for cluster in former.clusters if cluster.name not in names)
        paired = {pair.cluster.name for pair in self.pairs}
        pairs = (*self.pairs, *(pair for pair in former.pairs if pair.cluster.name not in paired))
        return Blueprint((*self.clusters, *kept), self.routes, self.fail_open_pool, pairs)


class Snapshot(Struct, frozen=True):
    """One moment. Every cluster has its assignment, be it empty."""

    resources: Mapping[str, Mapping[str, Resource]]
    """By type and name."""
    versions: Mapping[str, str]
    """By type: of all its resources together."""


class Assigner:
    """Makes assignments, and makes anew only what changed: a node's part once per node, an assignment once per change of its pools."""

    def __init__(self) -> None:
        self._pools: dict[str, _Assigned] = {}
        self._pairs: dict[str, _Paired] = {}
        """By the cluster's name."""

    def make_snapshot(self, blueprint: Blueprint, nodes: Mapping[str, tuple[Node, ...]]) -> Snapshot:
        """The moment at which pools have these nodes, by the pool's name."""
        before, self._pools = self._pools, {}
        for cluster in blueprint.clusters:
            name = cluster.name
            self._pools[name] = _assign_nodes(before.get(name), name, nodes.get(name, ()), fail_open=name == blueprint.fail_open_pool)
        self._pairs = {pair.cluster.name: self._assign_pair(pair) for pair in blueprint.pairs}
        assigned: Mapping[str, _Assigned | _Paired] = {**self._pools, **self._pairs}
        resources = {
            CLUSTER: {cluster.name: cluster for cluster in (*blueprint.clusters, *(pair.cluster for pair in blueprint.pairs))},
            ASSIGNMENT: {name: each.resource for name, each in assigned.items()},
            ROUTES: {blueprint.routes.name: blueprint.routes},
        }
        return Snapshot(resources, {type_url: _compute_version(each.values()) for type_url, each in resources.items()})

    def _assign_pair(self, pair: Pair) -> "_Paired":
        """The nodes of both pools, which are there: their parts are put together anew when one of them has changed."""
        first, second, name = self._pools[pair.pool], self._pools[pair.fallback], pair.cluster.name
        before = self._pairs.get(name)
        if before is not None and before.first is first and before.second is second:
            return before
        return _Paired(first, second, Resource.of(name, ASSIGNMENT, make_assignment(name, first.parts, second.parts)))


class _Assigned(Struct, frozen=True):
    """A pool's assignment, and what it was made from."""

    nodes: tuple[Node, ...]
    fail_open: bool
    parts: list[bytes]
    """Each node's part of the message."""
    resource: Resource


class _Paired(Struct, frozen=True):
    """The assignment of two pools' cluster, and what it was made from."""

    first: _Assigned
    second: _Assigned
    resource: Resource


def _assign_nodes(before: _Assigned | None, pool: str, nodes: tuple[Node, ...], *, fail_open: bool) -> _Assigned:
    if before is not None and before.fail_open == fail_open:
        if before.nodes == nodes:
            return before
        parts = _make_parts(before, pool, nodes)
    else:
        parts = [make_node_part(node, pool, fail_open=fail_open) for node in nodes]
    return _Assigned(nodes, fail_open, parts, Resource.of(pool, ASSIGNMENT, make_assignment(pool, parts)))


def _make_parts(before: _Assigned, pool: str, nodes: tuple[Node, ...]) -> list[bytes]:
    """The nodes' parts: as they were at both ends, where nothing has changed, and looked up or made in between."""
    first = _are_alike(before.nodes, nodes)
    last = min(_are_alike(reversed(before.nodes), reversed(nodes)), len(nodes) - first, len(before.nodes) - first)
    between, old = nodes[first : len(nodes) - last], slice(first, len(before.nodes) - last)
    known = {node.id: (node, part) for node, part in zip(before.nodes[old], before.parts[old], strict=True)}
    made = []
    for node in between:
        had = known.get(node.id)
        made.append(had[1] if had is not None and had[0] == node else make_node_part(node, pool, fail_open=before.fail_open))
    return [*before.parts[:first], *made, *before.parts[old.stop :]]


def _are_alike(before: Iterable[Node], after: Iterable[Node]) -> int:
    """Return the length of the common prefix of two lists of nodes."""
    return sum(1 for _ in takewhile(bool, map(is_, before, after)))


def _compute_version(resources: Iterable[Resource]) -> str:
    return _compute_digest("\n".join(sorted(f"{each.name} {each.version}" for each in resources)).encode())


def _compute_digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:_HASH_DIGITS]
