"""Identities besides API keys: tokens, client certificates, and what a trusted gateway in front says of its clients.

Rule: only what Envoy has verified counts: metadata of its `jwt_authn` filter and attributes of the connection, which no client can set. A
header counts where the connection is a trusted gateway's.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace

from din_extproc.admit.keys import MISSING_KEY, PREFIX, Authenticated
from din_extproc.domain.identity import FORWARDED_CERTIFICATE, IdentityRules, JwtIssuer, TrustedGateway
from din_extproc.domain.request import Priority, RequestHead
from din_extproc.domain.tenant import ApiKey, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode

_ID_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}").fullmatch
_SCOPE = "identities:"
IDENTITY_CONFLICT = Refusal(RefusalCode.IDENTITY_CONFLICT, "The identities of this request belong to different tenants: send those of one.")
_QUOTED = r'"(?:\\.|[^"\\])*"'
_BALANCED = re.compile(r'(?:[^"]|"(?:\\.|[^"\\])*+")*+').fullmatch
_elements = re.compile(rf'(?:[^,"]|{_QUOTED})+').findall
_pairs = re.compile(rf'(?:^|;)\s*([A-Za-z]+)=({_QUOTED}|[^;"]*)').findall
_address = lru_cache(maxsize=4096)(ip_address)
_refusal = partial(Refusal, RefusalCode.INVALID_API_KEY)


class Identities:
    """All ways in which a request can get a tenant without an API key, immutable.

    Args:
        rules: Those of the configuration.
        tenants: The tenants that are listed.
    """

    __slots__ = ("_certificates", "_gateways", "_issuers", "_rules", "_tenants")

    def __init__(self, rules: IdentityRules, tenants: Iterable[Tenant]) -> None:
        self._rules = rules
        self._tenants = {each.id: each for each in tenants}
        self._issuers = {each.issuer: each for each in rules.jwt}
        self._certificates = [(_compile(rule.name), rule) for rule in rules.certificates]
        self._gateways = [_compile(name) for name in (() if rules.gateway is None else rules.gateway.certificates)]

    def authenticate(self, head: RequestHead, by_key: Authenticated | Refusal) -> Authenticated | Refusal:
        """Authenticate a request by all identities that it has: the first one counts, the others must be of the same tenant.

        Args:
            head: The request's head.
            by_key: What its API key says.
        """
        claims = head.claims
        if claims is not None and not head.header("x-api-key").strip().startswith(PREFIX):
            by_key = MISSING_KEY  # the token fills `authorization`
        if isinstance(by_key, Refusal) and by_key is not MISSING_KEY:
            return by_key
        found = [] if by_key is MISSING_KEY else [by_key]
        if claims is not None:
            found.append(self._by_token(claims))
        found += self._by_connection(head)
        if not found:
            return MISSING_KEY
        first = found[0]
        for each in found:
            if isinstance(each, Refusal):
                return each
            if isinstance(first, Authenticated) and each.tenant.id != first.tenant.id:
                return IDENTITY_CONFLICT
        return first

    def _by_token(self, claims: Mapping[str, Any]) -> Authenticated | Refusal:
        issuer = self._issuers.get(str(claims.get("iss")))
        name = None if issuer is None else _find_claim(claims, issuer.tenant)
        tenant = self._find_tenant(name)
        if "exp" not in claims:
            return _refusal("The token has no end: it needs the claim `exp`.")
        if issuer is None or tenant is None:
            return _refusal("The token is valid, but its claims name no tenant of this network.")
        if issuer.priority is not None or issuer.models is not None:
            narrowed = _narrow(tenant, issuer, claims)
            if isinstance(narrowed, Refusal):
                return narrowed
            tenant = narrowed
        subject = _find_claim(claims, issuer.key_id)
        return self._authenticated(tenant, "jwt", subject if isinstance(subject, str) else "")

    def _by_connection(self, head: RequestHead) -> list[Authenticated | Refusal]:
        """Return the identity of the connection: for a trusted gateway, from its headers; otherwise from the client's certificate."""
        peer, gateway = head.peer, self._rules.gateway
        if gateway is None or not self._is_gateway(head, gateway):
            return self._by_certificate((peer.uri, peer.dns))
        found: list[Authenticated | Refusal] = []
        name = head.header(gateway.tenant_header) if gateway.tenant_header else ""
        if name:
            tenant = self._find_tenant(name)
            found.append(
                _refusal("The gateway in front names no tenant of this network.")
                if tenant is None
                else self._authenticated(tenant, "gateway", name)
            )
        forwarded = head.header(FORWARDED_CERTIFICATE) if gateway.client_certificate else ""
        if forwarded:
            names = forwarded_names(forwarded)
            found += [_refusal("x-forwarded-client-cert is malformed.")] if names is None else self._by_certificate(names)
        return found

    def _is_gateway(self, head: RequestHead, gateway: TrustedGateway) -> bool:
        peer = head.peer
        if any(matches(name) for name in (peer.uri, peer.dns) if name for matches in self._gateways):
            return True
        if not gateway.networks or not peer.address:
            return False
        try:
            address = _address(peer.address.rpartition(":")[0].strip("[]"))
        except ValueError:
            return False
        return any(address in network for network in gateway.networks)

    def _by_certificate(self, names: Iterable[str]) -> list[Authenticated | Refusal]:
        """The tenant of the first rule that matches a name. A certificate that no rule matches is no identity."""
        for matches, rule in self._certificates:
            for name in names:
                match = matches(name) if name else None
                if match is not None:
                    tenant = self._find_tenant(rule.tenant or match["tenant"])
                    if tenant is None:
                        return [_refusal("The client's certificate is valid, but its name is no tenant's of this network.")]
                    return [self._authenticated(tenant, "certificate", name)]
        return []

    def _find_tenant(self, name: object) -> Tenant | None:
        """Return the tenant that is listed under the name, or one like all unlisted tenants."""
        if not isinstance(name, str):
            return None
        found = self._tenants.get(name)
        if found is None and self._rules.unlisted is not None and _NAME(name):
            found = replace(self._rules.unlisted, id=name)
        return found

    def _authenticated(self, tenant: Tenant, kind: str, name: str) -> Authenticated:
        text = name if name.isprintable() else quote(name)
        return make_identity(self._rules, tenant, f"{kind}:{text[:_ID_LENGTH]}")


def make_identity(rules: IdentityRules, tenant: Tenant, name: str) -> Authenticated:
    """Return the identity of this name, such as `jwt:ann`, with its limits."""
    return Authenticated(tenant, ApiKey(id=name, salt=b"", digest=b"", limits=rules.limits), "" if rules.shares_limits else _SCOPE)


def _find_claim(claims: Mapping[str, Any], path: tuple[str, ...]) -> object:
    """Return the value at the path; None for a claim that is missing."""
    value: object = claims
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _narrow(tenant: Tenant, issuer: JwtIssuer, claims: Mapping[str, Any]) -> Tenant | Refusal:
    """Return the tenant with no more than the token's claims allow. A claim that is missing narrows nothing."""
    priority = None if issuer.priority is None else _find_claim(claims, issuer.priority)
    models = None if issuer.models is None else _find_claim(claims, issuer.models)
    if isinstance(models, str):
        models = models.split()
    if models is not None and not (isinstance(models, list) and all(isinstance(each, str) for each in models)):
        return _refusal("The token's claim for models is neither a list of names nor a text.")
    try:
        highest = tenant.priority if priority is None else tenant.priority_of(Priority(str(priority)))
    except ValueError:
        return _refusal(f"The token's claim for the priority is none of {', '.join(Priority)}.")
    return replace(tenant, priority=highest, narrowed_to=None if models is None else tuple(models))


def _compile(name: str) -> Any:
    """Return the matcher of a certificate's names. A segment ends at `/` in a URI and at `.` in a DNS name."""
    segment = "[^/]+" if "://" in name else r"[^.]+"
    text = re.escape(name).replace(r"\*", segment).replace(r"\{tenant\}", f"(?P<tenant>{segment})")
    return re.compile(text).fullmatch


def forwarded_names(header: str) -> tuple[str, ...] | None:
    """Return the URIs, then the DNS names, of the last element of `x-forwarded-client-cert`; None for a malformed header.

    The last element is what the gateway itself says of its client; those before it may come from further away.
    """
    if _BALANCED(header) is None:
        return None
    elements = _elements(header)
    pairs = [(key.lower(), value.strip().strip('"')) for key, value in _pairs(elements[-1])] if elements else []
    return tuple(value for wanted in ("uri", "dns") for key, value in pairs if key == wanted)
