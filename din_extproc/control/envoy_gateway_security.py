"""The SecurityPolicy of Envoy Gateway's rendering: tokens and CORS."""

from collections.abc import Sequence
from typing import Any

from din_extproc.control.jwt import keys_for_cluster
from din_extproc.control.routes import ALLOWED, EXPOSED, METHODS
from din_extproc.control.topology import Topology
from din_extproc.domain.identity import JwtIssuer, RemoteJwks


def describe_security(topology: Topology) -> dict[str, Any]:
    """Return the spec of the SecurityPolicy of our routes; only one may apply to a route."""
    cors = {"cors": _cors(topology)} if topology.cors_origins else {}
    return cors | ({"jwt": _jwt(topology.identity.jwt)} if topology.identity.jwt else {})


def _jwt(issuers: Sequence[JwtIssuer]) -> dict[str, Any]:
    """Verify tokens, and leave every refusal to the sidecar: API keys come in the same header."""
    header = {"name": "authorization", "valuePrefix": "Bearer "}
    providers = []
    for index, issuer in enumerate(issuers):
        keys = keys_for_cluster(issuer)
        if isinstance(keys, RemoteJwks):
            source: dict[str, Any] = {"remoteJWKS": {"uri": keys.url, "cacheDuration": f"{keys.cache_s}s"}}
        else:
            source = {"localJWKS": {"type": "Inline", "inline": keys.text}}
        audience = {"issuer": issuer.issuer, "audiences": list(issuer.audiences)}
        providers.append({"name": f"din-{index}", **audience, **source, "extractFrom": {"headers": [header]}})
    return {"failOpen": True, "providers": providers}


def _cors(topology: Topology) -> dict[str, Any]:
    return {
        "allowOrigins": list(topology.cors_origins),
        "allowMethods": METHODS.split(","),
        "allowHeaders": list(ALLOWED),
        "exposeHeaders": list(EXPOSED),
        "maxAge": "600s",
    }
