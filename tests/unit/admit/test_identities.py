"""Who a request is by tokens, certificates and a trusted gateway, and that several identities must agree."""

from ipaddress import ip_network

import pytest

from din_extproc.admit.identities import Identities, forwarded_names
from din_extproc.admit.keys import MISSING_KEY, Authenticated
from din_extproc.domain.identity import CertificateRule, IdentityRules, JwtIssuer, TrustedGateway
from din_extproc.domain.request import NO_PEER, PeerConnection, Priority, RequestHead
from din_extproc.domain.tenant import ApiKey, RateLimits, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode

ISSUER = JwtIssuer("https://a.example", ("x",), "k.json", ("tenant",), ("sub",), priority=("tier",), models=("models",))
CLAIMS = {"iss": "https://a.example", "exp": 1.8e9, "tenant": "acme", "sub": "ann"}
RULES = (
    CertificateRule("spiffe://corp.example/ns/{tenant}/sa/*"),
    CertificateRule("*.batch.corp.example", "other"),
)
GATEWAY = TrustedGateway((ip_network("10.0.0.0/24"),), ("spiffe://corp.example/edge",), "x-tenant", client_certificate=True)
ALL = IdentityRules(jwt=(ISSUER,), certificates=RULES, gateway=GATEWAY)
EDGE = PeerConnection(address="10.0.0.7:5000")


def tenant(name: str, **fields: object) -> Tenant:
    return Tenant(name, ("*",), Priority.STANDARD, RateLimits(), {}, **fields)


TENANTS = [tenant("acme"), tenant("other")]
KEY = Authenticated(TENANTS[0], ApiKey("k", b"", b""))


def found(
    *,
    claims: dict[str, object] | None = None,
    peer: PeerConnection = NO_PEER,
    by_key: Authenticated | Refusal = MISSING_KEY,
    rules: IdentityRules = ALL,
    **headers: str,
) -> Authenticated | Refusal:
    head = RequestHead("POST", "/", {name.replace("_", "-"): text for name, text in headers.items()}, claims, peer)
    return Identities(rules, TENANTS).authenticate(head, by_key)


def name(who: Authenticated | Refusal) -> str:
    return f"{who.tenant.id} {who.key.id}" if isinstance(who, Authenticated) else who.code.code


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (PeerConnection(uri="spiffe://corp.example/ns/acme/sa/web"), "acme certificate:spiffe://corp.example/ns/acme/sa/web"),
        (PeerConnection(dns="a.batch.corp.example"), "other certificate:a.batch.corp.example"),
        (PeerConnection(uri="spiffe://corp.example/ns/nobody/sa/web"), "invalid_api_key"),
        (PeerConnection(uri="spiffe://corp.example/ns/acme/x/sa/web"), "invalid_api_key"),
        (PeerConnection(uri="spiffe://corp.example/ns/acme/sa/web/more"), "invalid_api_key"),
        (PeerConnection(uri="spiffe://evil.example/ns/acme/sa/web"), "invalid_api_key"),
        (PeerConnection(dns="a.b.batch.corp.example"), "invalid_api_key"),
        (PeerConnection(dns="batchXcorp.example"), "invalid_api_key"),
        (PeerConnection(uri="spiffe://corp.example/edge"), "invalid_api_key"),
    ],
)
def test_a_certificate_is_the_tenants_whose_rule_it_matches(peer, expected):
    assert name(found(peer=peer)) == expected


def test_a_gateway_is_trusted_from_its_networks_and_by_its_certificate_only():
    spoofed = {"x_tenant": "other"}
    assert name(found(peer=EDGE, **spoofed)) == "other gateway:other"
    assert name(found(peer=PeerConnection(uri="spiffe://corp.example/edge"), **spoofed)) == "other gateway:other"
    assert name(found(peer=PeerConnection(address="[::ffff:10.0.0.7]:1"), **spoofed)) == "invalid_api_key"
    others = PeerConnection(address="10.0.1.7:5000"), PeerConnection(uri="spiffe://corp.example/edge2"), PeerConnection(address="x")
    for peer in (NO_PEER, *others):
        assert found(peer=peer, **spoofed) is MISSING_KEY
    assert name(found(peer=EDGE, x_tenant="acme, other")) == "invalid_api_key"


def test_a_gateways_own_certificate_is_no_clients():
    rules = IdentityRules(certificates=(CertificateRule("spiffe://corp.example/*", "acme"),), gateway=GATEWAY)
    assert found(peer=PeerConnection(uri="spiffe://corp.example/edge"), rules=rules) is MISSING_KEY


def test_a_gateway_forwards_the_names_of_its_clients_certificate():
    forwarded = (
        'Hash=1;Subject="CN=a,O=b;URI=spiffe://corp.example/ns/other/sa/x";URI=spiffe://corp.example/ns/acme/sa/x;DNS=a.batch.corp.example'
    )
    assert name(found(peer=EDGE, x_forwarded_client_cert=forwarded)) == "acme certificate:spiffe://corp.example/ns/acme/sa/x"
    assert found(x_forwarded_client_cert=forwarded) is MISSING_KEY
    assert name(found(peer=EDGE, x_forwarded_client_cert='Subject="')) == "invalid_api_key"
    assert name(found(peer=EDGE, x_forwarded_client_cert=forwarded, x_tenant="other")) == "identity_conflict"


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("URI=a://1,URI=a://2", ("a://2",)),
        ('URI=a://1;Subject="x,URI=a://3"', ("a://1",)),
        (r'Subject="\",URI=a://3";DNS=d', ("d",)),
        ("By=a://own;Hash=1", ()),
        ("DNS=d;URI=a://1;URI=a://2", ("a://1", "a://2", "d")),
        ('URI=a://1"', None),
        ("", ()),
    ],
)
def test_the_last_element_of_a_forwarded_certificate_counts(header, names):
    assert forwarded_names(header) == names


def test_identities_that_agree_count_in_their_order_and_others_are_refused():
    own = PeerConnection(uri="spiffe://corp.example/ns/acme/sa/web")
    assert name(found(by_key=KEY, peer=own)) == "acme k"
    assert name(found(claims=CLAIMS, peer=own)) == "acme jwt:ann"
    assert name(found(by_key=KEY, claims=CLAIMS, x_api_key="din_k_s")) == "acme k"
    other = PeerConnection(dns="a.batch.corp.example")
    for several in ({"by_key": KEY}, {"claims": CLAIMS}):
        assert name(found(peer=other, **several)) == "identity_conflict"
    assert name(found(by_key=KEY, peer=EDGE, x_tenant="other")) == "identity_conflict"


def test_a_wrong_key_is_refused_whatever_else_there_is():
    wrong = Refusal(RefusalCode.INVALID_API_KEY, "wrong")
    assert found(by_key=wrong, peer=PeerConnection(dns="a.batch.corp.example")) is wrong
    assert found(by_key=wrong, claims=CLAIMS, x_api_key="din_k_s") is wrong
    assert name(found(by_key=wrong, claims=CLAIMS, x_api_key="another service's")) == "acme jwt:ann"


def test_claims_narrow_the_tenant():
    who = found(claims=CLAIMS | {"tier": "batch", "models": ["a", "b*"]})
    assert (who.tenant.priority, who.tenant.narrowed_to) == (Priority.BATCH, ("a", "b*"))
    assert found(claims=CLAIMS | {"models": "a b"}).tenant.narrowed_to == ("a", "b")
    assert found(claims=CLAIMS | {"tier": "critical"}).tenant.priority is Priority.STANDARD
    assert found(claims=CLAIMS).tenant == TENANTS[0]
    assert name(found(claims={key: value for key, value in CLAIMS.items() if key != "exp"})) == "invalid_api_key"
    for odd in ({"tier": "urgent"}, {"tier": ["batch"]}, {"models": 7}, {"models": [7]}):
        assert name(found(claims=CLAIMS | odd)) == "invalid_api_key"


def test_tenants_that_are_not_listed_are_as_configured():
    rules = IdentityRules(jwt=(ISSUER,), unlisted=tenant("", listed=False, stays_on_site=True))
    who = found(claims=CLAIMS | {"tenant": "team-7"}, rules=rules)
    assert (who.tenant.id, who.tenant.listed, who.tenant.stays_on_site) == ("team-7", False, True)
    assert found(claims=CLAIMS, rules=rules).tenant.listed
    for odd in ("", "a b", "a\tb", "x" * 129, "-a", "(unlisted)", 7, None):
        assert name(found(claims=CLAIMS | {"tenant": odd}, rules=rules)) == "invalid_api_key"


def test_identities_have_limits_of_their_own_where_the_configuration_says_so():
    limits = RateLimits(rpm=3)
    who = found(claims=CLAIMS, rules=IdentityRules(jwt=(ISSUER,), limits=limits, shares_limits=False))
    assert (who.key.limits, who.scope) == (limits, "identities:")
    shared = found(claims=CLAIMS)
    assert (shared.key.limits, shared.scope) == (None, "")


@pytest.mark.parametrize("subject", ["a\tb", "a\nb", "\x7f"])
def test_an_identity_is_printable(subject):
    assert found(claims=CLAIMS | {"sub": subject}).key.id.isprintable()
    assert len(found(claims=CLAIMS | {"sub": subject * 1000}).key.id) < 200
