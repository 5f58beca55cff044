"""JSON Web Tokens that Envoy has verified: their claims name the tenant.

Rule: claims come from the metadata of Envoy's `jwt_authn` filter alone, which no client can set; a header never counts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from din_extproc.admit.keys import PREFIX, Authenticated
from din_extproc.domain.identity import JwtIssuer
from din_extproc.domain.tenant import ApiKey, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode

_ID_LENGTH = 128
_CONFLICT = Refusal(
    RefusalCode.IDENTITY_CONFLICT, "The token and the API key belong to different tenants: send one of them, or both of one tenant."
)


class TokenIssuers:
    """All issuers, immutable.

    Args:
        issuers: In the order of the configuration.
        tenants: The tenants that claims can name.
    """

    __slots__ = ("_issuers", "_tenants")

    def __init__(self, issuers: Iterable[JwtIssuer], tenants: Iterable[Tenant]) -> None:
        self._issuers = {each.issuer: each for each in issuers}
        self._tenants = {each.id: each for each in tenants}

    def authenticate(self, claims: Mapping[str, Any] | None, x_api_key: str, by_key: Authenticated | Refusal) -> Authenticated | Refusal:
        """Authenticate a request by a verified token and, where it has one, by its API key.

        Args:
            claims: Those of a token that Envoy has verified, or None without one.
            x_api_key: That header's value: a token fills `authorization`, so an API key besides it can only be here.
            by_key: What the API key says.
        """
        has_key = x_api_key.strip().startswith(PREFIX)
        if claims is None or (has_key and isinstance(by_key, Refusal)):
            return by_key
        issuer = self._issuers.get(str(claims.get("iss")))
        name = None if issuer is None else _find_claim(claims, issuer.tenant)
        tenant = self._tenants.get(name or "")
        if issuer is None or tenant is None:
            return Refusal(RefusalCode.INVALID_API_KEY, "The token is valid, but its claims name no tenant of this network.")
        if has_key and isinstance(by_key, Authenticated):
            return by_key if by_key.tenant.id == tenant.id else _CONFLICT
        subject = _find_claim(claims, issuer.key_id) or ""
        return Authenticated(tenant, ApiKey(id=f"jwt:{subject[:_ID_LENGTH]}", salt=b"", digest=b""))


def _find_claim(claims: Mapping[str, Any], path: tuple[str, ...]) -> str | None:
    """Return the text at the path; None for a claim that is missing or no text."""
    value: Any = claims
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None
