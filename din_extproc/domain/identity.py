"""Sources of a client's identity besides its API key: JWT issuers, client certificates, trusted gateways."""

from ipaddress import IPv4Network, IPv6Network

from msgspec import Struct

from din_extproc.domain.tenant import RateLimits, Tenant

JWT_AUTHN = "envoy.filters.http.jwt_authn"
"""Envoy's filter that verifies tokens, and the namespace of its metadata."""
JWT_PAYLOAD = "din"
"""The field of that metadata with a verified token's claims, where this product configures the filter."""
URI_SAN, DNS_SAN, SOURCE = "connection.uri_san_peer_certificate", "connection.dns_san_peer_certificate", "source.address"
"""Envoy's attributes of a connection: the first URI and the first DNS name of the client's certificate, and the client's address."""
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
"""Path of the system's CA bundle on Debian and its derivatives."""
FORWARDED_CERTIFICATE = "x-forwarded-client-cert"


class RemoteJwks(Struct, frozen=True):
    """The source of an issuer's public keys, which Envoy always fetches over TLS."""

    url: str
    host: str
    port: int
    ca: str
    """PEM, on Envoy's machine: who issues the server's certificate."""
    cache_s: int
    """Seconds until Envoy fetches the keys again."""


class InlineJwks(Struct, frozen=True):
    """The public keys themselves, where a control plane has no access to their file."""

    text: str


class JwtIssuer(Struct, frozen=True):
    """An issuer of tokens, its audiences, and the claims that are read. A claim is given by its path."""

    issuer: str
    audiences: tuple[str, ...]
    jwks: str | InlineJwks | RemoteJwks
    """The public keys: a file, as Envoy's file system has it, its content, or where they are fetched."""
    tenant: tuple[str, ...]
    """Names the tenant."""
    key_id: tuple[str, ...]
    """Names who asks."""
    priority: tuple[str, ...] | None = None
    """The highest class of the token's requests."""
    models: tuple[str, ...] | None = None
    """Patterns of the models that the token may use."""


class CertificateRule(Struct, frozen=True):
    """The tenant of client certificates whose name matches."""

    name: str
    """A URI such as `spiffe://corp.example/ns/{tenant}/sa/*`, or a DNS name. `*` and `{tenant}` stand for one segment."""
    tenant: str = ""
    """"": what `{tenant}` stands for."""


class TrustedGateway(Struct, frozen=True):
    """A gateway in front that says who its clients are."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Its addresses."""
    certificates: tuple[str, ...] = ()
    """The names in its certificate, as in `CertificateRule`."""
    tenant_header: str = ""
    """The header that names the tenant; "": none does."""
    client_certificate: bool = False
    """It forwards the names of its client's certificate in `x-forwarded-client-cert`."""


class IdentityRules(Struct, frozen=True):
    """How requests without an API key get a tenant."""

    jwt: tuple[JwtIssuer, ...] = ()
    certificates: tuple[CertificateRule, ...] = ()
    gateway: TrustedGateway | None = None
    unlisted: Tenant | None = None
    """The defaults of tenants that are not listed; None: they are refused."""
    limits: RateLimits | None = None
    """Of each identity, besides its tenant's."""
    shares_limits: bool = True
    """False: the identities of a tenant have its limits once more, apart from its keys."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """The attributes of a request's connection that Envoy must send."""
        gateway = self.gateway or TrustedGateway()
        named = (URI_SAN, DNS_SAN) if gateway.certificates or self.certificates else ()
        return (*named, *((SOURCE,) if gateway.networks else ()))


NO_IDENTITIES = IdentityRules()
