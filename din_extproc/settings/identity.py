"""`identity:`: who asks, besides API keys."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from din_extproc.domain.identity import SYSTEM_CA, CertificateRule, IdentityRules, JwtIssuer, RemoteJwks, TrustedGateway
from din_extproc.settings.remote import is_host
from din_extproc.settings.section import AsTuple, Name, Section, Text
from din_extproc.settings.tenants import DefaultsSection, LimitsSection, TenantPolicySection

_CLAIM = re.compile(r"claims(\.[A-Za-z0-9_:/-]+)+").fullmatch
_CERTIFICATE_NAME = re.compile(r"([a-z][a-z0-9+.-]*://)?([A-Za-z0-9._~%:@/-]|\*|\{tenant\})+").fullmatch
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}").fullmatch
_TAKEN = re.compile(
    r"authorization|(x-)?api-key|cookie|host|te|content-.*|x-(din|envoy|forwarded|request)-.*|x-task-tier|trace.*"
).fullmatch
_HTTPS = 443


def _check_claim(text: str) -> str:
    if _CLAIM(text) is None:
        raise ValueError(f"{text!r} is not a claim, such as claims.tenant or claims.org.team")
    return text


def _https_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        sound = parts.scheme == "https" and is_host(parts.hostname or "") and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not text.isascii() or not text.isprintable() or " " in text or "#" in text:
        raise ValueError(f"{text!r} is not a URL such as https://login.example/keys; keys are fetched over TLS only")
    return text


def _free_header(text: str) -> str:
    if _HEADER(text) is None or _TAKEN(text.lower()):
        raise ValueError(f"{text!r} is not the name of a header that has no other meaning, such as x-tenant")
    return text.lower()


def _certificate_name(text: str) -> str:
    if _CERTIFICATE_NAME(text) is None or text.count("{tenant}") > 1:
        raise ValueError(f"{text!r} is not a name such as spiffe://corp.example/ns/{{tenant}}/sa/* or *.batch.corp.example")
    return text


def _plain_name(text: str) -> str:
    if "{tenant}" in text:
        raise ValueError("the certificate of a gateway names no tenant; only `*` may stand for a segment")
    return text


def _network(value: Any) -> Any:
    try:
        return value if isinstance(value, IPv4Network | IPv6Network) else ip_network(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a network such as 10.0.0.0/24 ({error})") from error


Claim = Annotated[str, AfterValidator(_check_claim)]
HttpsUrl = Annotated[str, AfterValidator(_https_url)]
CertificateName = Annotated[str, AfterValidator(_certificate_name)]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]


def _path(claim: str) -> tuple[str, ...]:
    return tuple(claim.split(".")[1:])


class JwksSection(Section):
    """The public keys of an issuer: a file or a URL."""

    file: Text | None = None
    """A JWKS file, where Envoy can read it when it starts."""
    url: HttpsUrl | None = None
    """Where Envoy fetches them, at its start and again each `cache_s`."""
    ca: Text = SYSTEM_CA
    """PEM: who issues the certificate of the URL's server."""
    cache_s: Annotated[int, Field(ge=1, le=86_400)] = 300
    """Seconds until fetched keys are fetched again."""

    @model_validator(mode="after")
    def _one(self) -> "JwksSection":
        if (self.file is None) == (self.url is None):
            raise ValueError("either `file` or `url`")
        alone = {"ca", "cache_s"} & self.model_fields_set
        if self.url is None and alone:
            raise ValueError(f"`{min(alone)}` is for keys behind a `url`")
        return self

    def source(self, folder: Path) -> str | RemoteJwks:
        """For the domain; a relative file is beside the configuration."""
        if self.url is None:
            return str((folder / (self.file or "")).absolute())
        parts = urlsplit(self.url)
        ca = str((folder / self.ca).absolute())
        return RemoteJwks(url=self.url, host=parts.hostname or "", port=parts.port or _HTTPS, ca=ca, cache_s=self.cache_s)


class JwtSection(Section):
    """Tokens of one issuer."""

    issuer: Text
    """The claim `iss`, exactly."""
    audiences: Annotated[tuple[Text, ...], AsTuple, Field(min_length=1)]
    """One of them must be in the claim `aud`."""
    jwks: JwksSection
    tenant: Claim = "claims.tenant"
    """The claim whose value is the tenant's `id`."""
    key_id: Claim = "claims.sub"
    """The claim that names who asks, in the audit log and in metrics."""
    priority: Claim | None = None
    """The claim with the highest class of the token's requests; never above the tenant's own. A token without it has the tenant's."""
    models: Claim | None = None
    """The claim with names of models, as a list or a text, that narrow the tenant's `models`. A token without it may use all of them."""

    def jwt_issuer(self, folder: Path) -> JwtIssuer:
        """For the domain."""
        return JwtIssuer(
            issuer=self.issuer,
            audiences=self.audiences,
            jwks=self.jwks.source(folder),
            tenant=_path(self.tenant),
            key_id=_path(self.key_id),
            priority=None if self.priority is None else _path(self.priority),
            models=None if self.models is None else _path(self.models),
        )


class CertificateSection(Section):
    """Client certificates whose first URI or DNS name matches."""

    name: CertificateName
    """A URI or a DNS name; `*` and `{tenant}` stand for one segment each, or a part of one."""
    tenant: Name | None = None
    """Whose they are; None: the `{tenant}` in the name."""

    @model_validator(mode="after")
    def _one(self) -> "CertificateSection":
        if (self.tenant is None) != ("{tenant}" in self.name):
            raise ValueError("either `tenant`, or `{tenant}` inside `name`")
        return self


class TrustedGatewaySection(Section):
    """A gateway in front that says who its clients are. What anybody else says in these headers counts for nothing."""

    networks: Annotated[tuple[Network, ...], AsTuple] = ()
    """Networks of its addresses."""
    certificates: Annotated[tuple[Annotated[CertificateName, AfterValidator(_plain_name)], ...], AsTuple] = ()
    """First URI or DNS name of its certificate; `*` stands for one segment."""
    tenant_header: Annotated[str, AfterValidator(_free_header)] | None = None
    """The header in which it names the tenant."""
    client_certificate: bool = False
    """It names its client's certificate in `x-forwarded-client-cert`, to which `certificates` of this section apply."""

    @model_validator(mode="after")
    def _useful(self) -> "TrustedGatewaySection":
        if not self.networks and not self.certificates:
            raise ValueError("`networks` or `certificates`, by which the gateway is known")
        if self.tenant_header is None and not self.client_certificate:
            raise ValueError("set `tenant_header` or `client_certificate: true`: otherwise the gateway names no tenant")
        return self

    def trusted_gateway(self) -> TrustedGateway:
        """For the domain."""
        return TrustedGateway(self.networks, self.certificates, self.tenant_header or "", self.client_certificate)


class IdentitySection(Section):
    """`identity:`."""

    jwt: Annotated[tuple[JwtSection, ...], AsTuple] = ()
    """JSON Web Tokens that Envoy verifies."""
    certificates: Annotated[tuple[CertificateSection, ...], AsTuple] = ()
    """Client certificates that Envoy verifies; the first one that matches counts."""
    gateway: TrustedGatewaySection | None = None
    tenant_defaults: TenantPolicySection | None = None
    """Template of tenants that identities name and `tenants` does not list; None: they are refused."""
    limits: LimitsSection | None = None
    """Narrower ceilings for each identity, besides its tenant's."""
    share_limits: bool = True
    """False: a tenant's identities have its limits once more, apart from its keys."""

    @field_validator("jwt")
    @classmethod
    def _check_issuers_apart(cls, value: tuple[JwtSection, ...]) -> tuple[JwtSection, ...]:
        issuers = [each.issuer for each in value]
        for issuer in issuers:
            if issuers.count(issuer) > 1:
                raise ValueError(f"issuer {issuer!r} is listed twice; list it once, with all its audiences")
        return value

    @model_validator(mode="after")
    def _complete(self) -> "IdentitySection":
        if self.gateway is not None and self.gateway.client_certificate and not self.certificates:
            raise ValueError("`gateway.client_certificate` needs `certificates`, which say whose the names are")
        return self

    @property
    def any(self) -> bool:
        """Whether a request can get a tenant without an API key."""
        return bool(self.jwt or self.certificates or self.gateway)

    def rules(self, folder: Path, defaults: DefaultsSection) -> IdentityRules:
        """For the domain."""
        unlisted = self.tenant_defaults
        return IdentityRules(
            jwt=tuple(each.jwt_issuer(folder) for each in self.jwt),
            certificates=tuple(CertificateRule(each.name, each.tenant or "") for each in self.certificates),
            gateway=None if self.gateway is None else self.gateway.trusted_gateway(),
            unlisted=None if unlisted is None else unlisted.policy(defaults, "", listed=False),
            limits=None if self.limits is None else self.limits.to_limits(),
            shares_limits=self.share_limits,
        )
