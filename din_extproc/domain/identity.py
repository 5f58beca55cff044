"""Who may vouch for a client besides its API key."""

from msgspec import Struct

JWT_AUTHN = "envoy.filters.http.jwt_authn"
"""Envoy's filter that verifies tokens, and the namespace of its metadata."""
JWT_PAYLOAD = "din"
"""The field of that metadata with a verified token's claims."""


class JwtIssuer(Struct, frozen=True):
    """Who signs tokens, for whom, and which claims are read."""

    issuer: str
    audiences: tuple[str, ...]
    jwks_file: str
    """The public keys, as Envoy's file system has them."""
    tenant: tuple[str, ...]
    """The path of the claim that names the tenant."""
    key_id: tuple[str, ...]
    """The path of the claim that names who asks."""
