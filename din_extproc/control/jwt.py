"""The filter that verifies JSON Web Tokens (`jwt_authn`), and the clusters of the issuers' keys.

Rule: it refuses nothing, because API keys come in the same header; what it has not verified leaves no claims for the sidecar.
"""

from collections.abc import Iterator, Sequence

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.core.v3 import DataSource, HttpUri
from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwksAsyncFetch,
    JwtAuthentication,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    RequirementRule,
)
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    RemoteJwks as EnvoyRemoteJwks,
)
from envoy_data_plane.google.protobuf import Empty

from din_extproc.control.egress import remote_cluster
from din_extproc.control.packing import to_duration
from din_extproc.control.topology import JWKS_PREFIX, SocketAddress, Topology
from din_extproc.domain.identity import JWT_PAYLOAD, SYSTEM_CA, InlineJwks, JwtIssuer, RemoteJwks

_FETCH_MS = 5_000
_FAILED_FETCH_MS = 1_000
"""Between a failed fetch of keys and the next one."""


def build_jwt_authentication(issuers: Sequence[JwtIssuer]) -> JwtAuthentication:
    """One provider per issuer; the token comes in `authorization: Bearer` and nowhere else."""
    providers = {f"issuer_{index}": _provider(index, each) for index, each in enumerate(issuers)}
    anything = JwtRequirement(allow_missing_or_failed=Empty())
    return JwtAuthentication(providers=providers, rules=[RequirementRule(match=RouteMatch(prefix="/"), requires=anything)])


def _provider(index: int, issuer: JwtIssuer) -> JwtProvider:
    jwks = issuer.jwks
    return JwtProvider(
        issuer=issuer.issuer,
        audiences=list(issuer.audiences),
        local_jwks=DataSource(filename=jwks) if isinstance(jwks, str) else None,
        remote_jwks=_remote(index, jwks) if isinstance(jwks, RemoteJwks) else None,
        from_headers=[JwtHeader(name="authorization", value_prefix="Bearer ")],
        payload_in_metadata=JWT_PAYLOAD,
        require_expiration=True,
    )


def _remote(index: int, jwks: RemoteJwks) -> EnvoyRemoteJwks:
    """Keys are fetched before the first request and in the background: a slow issuer delays no request."""
    return EnvoyRemoteJwks(
        http_uri=HttpUri(uri=jwks.url, cluster=f"{JWKS_PREFIX}{index}", timeout=to_duration(_FETCH_MS)),
        cache_duration=to_duration(jwks.cache_s * 1000),
        async_fetch=JwksAsyncFetch(failed_refetch_duration=to_duration(_FAILED_FETCH_MS)),
    )


def keys_for_cluster(issuer: JwtIssuer) -> InlineJwks | RemoteJwks:
    """Return the keys as a control plane takes them.

    Raises:
        ValueError: it would not verify the server of the keys as the configuration says.
    """
    jwks = issuer.jwks
    if isinstance(jwks, str):
        raise TypeError(jwks)
    if isinstance(jwks, RemoteJwks) and jwks.ca != SYSTEM_CA:
        raise ValueError(f"issuer {issuer.issuer}: keys are fetched with the cluster's own authorities; leave out `jwks.ca`")
    return jwks


def jwks_clusters(topology: Topology) -> Iterator[Cluster]:
    """Yield the clusters from which keys are fetched, over verified TLS. They are static even with xDS: a listener starts with its keys."""
    for index, issuer in enumerate(topology.identity.jwt):
        if isinstance(issuer.jwks, RemoteJwks):
            jwks = issuer.jwks
            yield remote_cluster(f"{JWKS_PREFIX}{index}", SocketAddress(jwks.host, jwks.port), topology, ca=jwks.ca)
