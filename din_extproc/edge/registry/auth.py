"""Authorization of registry calls, and the mapping of registry errors to HTTP and gRPC statuses.

Invariant: a node acts only for itself; the token of any node grants read access to all nodes.
"""

import socket
from collections.abc import Iterable, Mapping
from enum import Enum
from ipaddress import IPv6Address, ip_address

from msgspec import Struct

from din_extproc.admit.keys import NodeTokens
from din_extproc.domain.node import Endpoint, Node
from din_extproc.edge.registry.forms import NodeForm
from din_extproc.edge.registry.registrar import Registered, Registrar
from din_extproc.registry.claims import AllowedAddresses, is_link_local
from din_extproc.registry.row import DenialReason, RegistryDenial


class RegistryErrorCode(Enum):
    """Errors of the registry: code, HTTP status, gRPC status, title."""

    INVALID = ("invalid_request", 400, 3, "The message is malformed")
    UNAUTHENTICATED = ("unauthenticated", 401, 16, "The node's token is missing or wrong")
    FORBIDDEN = ("forbidden", 403, 7, "The token or the certificate belongs to another node")
    UNKNOWN = ("unknown_lease", 404, 5, "There is no such registration")
    OUTDATED = ("outdated", 409, 10, "A newer message or another node takes precedence")
    UNTRUE = ("untrue", 422, 9, "The node contradicts the catalogue")
    IMPOSSIBLE = ("impossible", 400, 3, "The node states impossible values")

    def __init__(self, code: str, status: int, grpc_status: int, title: str) -> None:
        self.code = code
        self.status = status
        self.grpc_status = grpc_status
        self.title = title


class RegistryError(Struct, frozen=True):
    """Error response with its reason."""

    code: RegistryErrorCode
    reason: str


_DENIALS = {
    DenialReason.IMPOSSIBLE: RegistryErrorCode.IMPOSSIBLE,
    DenialReason.UNTRUE: RegistryErrorCode.UNTRUE,
    DenialReason.UNKNOWN: RegistryErrorCode.UNKNOWN,
    DenialReason.OUTDATED: RegistryErrorCode.OUTDATED,
}
_UNAUTHENTICATED = RegistryError(RegistryErrorCode.UNAUTHENTICATED, "send the node's token: `authorization: Bearer din_<node id>_<secret>`")


def to_registry_error(denied: RegistryDenial) -> RegistryError:
    """Convert a denial of the registry to an error response."""
    return RegistryError(_DENIALS[denied.kind], denied.reason)


class RegistryAuth:
    """Authorization in front of the registrar.

    Args:
        registrar: Handles authorized calls.
        tokens: Tokens of all nodes; replaced when their file changes.
        reaches: Allowed addresses by node id, replaced likewise; a missing node may have any address.
        bound: Whether a node's client certificate must name its id.
        own: Addresses of the gateway itself; a node may have one only if its token lists exactly that endpoint.
    """

    def __init__(
        self,
        registrar: Registrar,
        tokens: NodeTokens,
        reaches: Mapping[str, AllowedAddresses],
        *,
        bound: bool = False,
        own: Iterable[Endpoint] = (),
    ) -> None:
        self.registrar = registrar
        self.tokens = tokens
        self.reaches = reaches
        self._bound = bound
        self._own = frozenset(own)

    async def register(self, form: NodeForm) -> Registered | RegistryError:
        """Register a node if the form is valid and its address is allowed. The caller is already authorized."""
        try:
            registration = form.to_registration()
        except ValueError as error:
            return RegistryError(RegistryErrorCode.INVALID, str(error))
        kept_out = self._find_forbidden_address(registration.node)
        if kept_out is not None:
            return kept_out
        outcome = await self.registrar.register(registration)
        return to_registry_error(outcome) if isinstance(outcome, RegistryDenial) else outcome

    def _find_forbidden_address(self, node: Node) -> RegistryError | None:
        """Return an error if the node's token does not allow its address."""
        reach = self.reaches.get(node.id)
        if is_own(node.endpoint, self._own) and (reach is None or node.endpoint not in reach.endpoints):
            reason = f"the gateway itself listens at {node.endpoint}: the token's `addresses` must name exactly that for a node to be there"
            return RegistryError(RegistryErrorCode.FORBIDDEN, reason)
        if (reach is None and not is_link_local(node.endpoint)) or (reach is not None and reach.allows(node.endpoint)):
            return None
        return RegistryError(RegistryErrorCode.FORBIDDEN, f"the token of node {node.id!r} does not hold for the address {node.endpoint}")

    def find_denial(self, authorization: str, names: frozenset[str], node_id: str | None = None) -> RegistryError | None:
        """Return an error if the caller may not act for the node.

        Args:
            authorization: Value of the `authorization` header.
            names: Names in the client certificate.
            node_id: Id of the node; None: a read of all nodes.
        """
        owner = self.tokens.find_owner(authorization)
        if owner is None:
            return _UNAUTHENTICATED
        if self._bound and owner not in names:
            listed = ", ".join(sorted(names)) or "none"
            return RegistryError(
                RegistryErrorCode.FORBIDDEN, f"the certificate is not that of node {owner!r}; it carries these names: {listed}"
            )
        if node_id is not None and owner != node_id:
            return RegistryError(RegistryErrorCode.FORBIDDEN, f"the token is that of node {owner!r}")
        return None


def is_own(endpoint: Endpoint, own: Iterable[Endpoint]) -> bool:
    """Return whether one of `own` listens at the endpoint: the same address, or a wildcard address and this machine has the endpoint's."""
    host = ip_address(endpoint.host)
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    plain = str(mapped or host)
    there = {address.host for address in own if address.port == endpoint.port}
    return plain in there or (not there.isdisjoint({"0.0.0.0", "::"}) and _is_local(plain))


def _is_local(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
