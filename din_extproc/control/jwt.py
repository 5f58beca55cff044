"""The filter that verifies JSON Web Tokens (`jwt_authn`).

Rule: it refuses nothing, because API keys come in the same header; what it has not verified leaves no claims for the sidecar.
"""

from collections.abc import Sequence

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwtAuthentication,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    RequirementRule,
)
from envoy_data_plane.google.protobuf import Empty

from din_extproc.domain.identity import JWT_PAYLOAD, JwtIssuer


def jwt_authentication(issuers: Sequence[JwtIssuer]) -> JwtAuthentication:
    """One provider per issuer; the token comes in `authorization: Bearer` and nowhere else."""
    providers = {
        f"issuer_{index}": JwtProvider(
            issuer=each.issuer,
            audiences=list(each.audiences),
            local_jwks=DataSource(filename=each.jwks_file),
            from_headers=[JwtHeader(name="authorization", value_prefix="Bearer ")],
            payload_in_metadata=JWT_PAYLOAD,
            require_expiration=True,
        )
        for index, each in enumerate(issuers)
    }
    anything = JwtRequirement(allow_missing_or_failed=Empty())
    return JwtAuthentication(providers=providers, rules=[RequirementRule(match=RouteMatch(prefix="/"), requires=anything)])
