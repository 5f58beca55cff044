"""Resources of the Gateway API and of Envoy Gateway as plain values, without their namespace."""

from typing import Any

from din_extproc.control.topology import Address, SocketAddress

OWN, STANDARD, CORE = "gateway.envoyproxy.io", "gateway.networking.k8s.io", ""
"""API groups: Envoy Gateway's, the Gateway API's, and Kubernetes' own."""
LABELS = {"app.kubernetes.io/name": "din-extproc"}
NO_LIMITS = dict.fromkeys(("maxConnections", "maxPendingRequests", "maxParallelRequests", "maxParallelRetries"), 1 << 20)
"""A `circuitBreaker` that never opens: admission is the sidecar's."""
_VERSIONS = {OWN: f"{OWN}/v1alpha1", STANDARD: f"{STANDARD}/v1", CORE: "v1"}


def make_resource(group: str, kind: str, name: str, content: dict[str, Any], *, field: str = "spec") -> dict[str, Any]:
    """A manifest. `field`: where it has its content."""
    return {"apiVersion": _VERSIONS[group], "kind": kind, "metadata": {"name": name, "labels": LABELS}, field: content}


def make_target(kind: str, name: str, group: str = STANDARD) -> dict[str, Any]:
    """A reference to a resource in the same namespace, as policies and routes have it."""
    return {"group": group, "kind": kind, "name": name}


def make_patch(kind: str, name: str, place: str, path: str, value: Any) -> dict[str, Any]:
    """A patch of an EnvoyPatchPolicy. `kind`: of Envoy's resource, such as `cluster.v3.Cluster`. Path "" adds the resource as a whole."""
    where = {**({"jsonPath": place} if place else {}), "path": path}
    return {"type": f"type.googleapis.com/envoy.config.{kind}", "name": name, "operation": {"op": "add", **where, "value": value}}


def make_address(address: Address) -> dict[str, Any]:
    """Return an endpoint of a Backend.

    Raises:
        TypeError: it is a Unix socket.
    """
    if not isinstance(address, SocketAddress):
        raise TypeError(address)
    kind, key = ("ip", "address") if address.is_ip else ("fqdn", "hostname")
    return {kind: {key: address.host, "port": address.port}}


def format_duration(milliseconds: int) -> str:
    """Return a duration in the API's own spelling, of five digits a unit."""
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds // 1000}s{milliseconds % 1000}ms"
