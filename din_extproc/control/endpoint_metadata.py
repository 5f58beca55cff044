"""Endpoint metadata that routes add to responses as headers.

Invariant: the metadata is the same whether endpoints are rendered into a file or served to a running Envoy.
"""

from din_extproc.domain.node import Node

NAMESPACE = "din"
FAIL_OPEN = "fail_open"
"""Metadata key of the marks of responses without admission."""

WHOLE_WITH_ONE = 100_000
"""Percent by which Envoy takes a pool for larger than it has to be: while one node is well, none of its requests goes to the pool that
could take over. By Envoy's own 140 % a part of them would, as soon as three of ten nodes are not."""

Facts = dict[str, str | dict[str, str]]


def make_endpoint_metadata(node: Node, pool: str, *, fail_open: bool) -> Facts:
    """This is where `x-din-node-id` comes from. `fail_open`: requests go to the pool while no worker answers."""
    facts: Facts = {"node_id": node.id, "model": node.model, "version": node.version, "dtype": node.dtype, "pool": pool}
    if fail_open:
        facts[FAIL_OPEN] = {"degraded": "true", "reason": "limits_bypassed"}
    return facts
