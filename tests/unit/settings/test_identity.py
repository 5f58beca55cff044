"""What `identity:` takes."""

import pytest
from pydantic import ValidationError

from din_extproc.settings.identity import IdentitySection
from din_extproc.settings.tls import ListenerTlsSection

ISSUER = {"issuer": "https://a.example", "audiences": ["x"], "jwks": {"file": "k.json"}}


def test_an_issuer_is_listed_once():
    assert len(IdentitySection.model_validate({"jwt": [ISSUER, ISSUER | {"issuer": "https://b.example"}]}).jwt) == 2
    with pytest.raises(ValidationError, match="listed twice"):
        IdentitySection.model_validate({"jwt": [ISSUER, ISSUER]})


@pytest.mark.parametrize("claim", ["tenant", "claims", "claims.", "claims..a", "claims.a b"])
def test_a_claim_is_a_path(claim):
    with pytest.raises(ValidationError, match="is not a claim"):
        IdentitySection.model_validate({"jwt": [ISSUER | {"tenant": claim}]})


def test_a_token_for_any_audience_is_not_taken():
    with pytest.raises(ValidationError, match="audiences"):
        IdentitySection.model_validate({"jwt": [ISSUER | {"audiences": []}]})


@pytest.mark.parametrize(
    "jwks",
    [
        {},
        {"file": "k.json", "url": "https://a.example/keys"},
        {"file": "k.json", "cache_s": 9},
        {"url": "http://a.example/keys"},
        {"url": "https://me:secret@a.example/keys"},
        {"url": "https:///keys"},
        {"url": "https://a.example:0/keys"},
        {"url": "https://a.example/k eys"},
        {"url": "https://a.example/keys", "cache_s": 0},
    ],
)
def test_keys_come_from_a_file_or_over_tls(jwks):
    with pytest.raises(ValidationError):
        IdentitySection.model_validate({"jwt": [ISSUER | {"jwks": jwks}]})


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "spiffe://a/{tenant}", "tenant": "acme"},
        {"name": "spiffe://a/b"},
        {"name": "spiffe://a/{tenant}/{tenant}"},
        {"name": "spiffe://a/{team}"},
        {"name": "a b", "tenant": "acme"},
        {"name": "", "tenant": "acme"},
    ],
)
def test_a_certificates_rule_names_one_tenant(rule):
    with pytest.raises(ValidationError):
        IdentitySection.model_validate({"certificates": [rule]})


@pytest.mark.parametrize(
    ("gateway", "complaint"),
    [
        ({"tenant_header": "x-tenant"}, "by which the gateway is known"),
        ({"networks": ["10.0.0.0/8"]}, "names no tenant"),
        ({"networks": ["10.0.0.1/8"], "tenant_header": "x-tenant"}, "is not a network"),
        ({"networks": ["10.0.0.0/8"], "tenant_header": "X-Din-Tenant"}, "no other meaning"),
        ({"networks": ["10.0.0.0/8"], "tenant_header": "Authorization"}, "no other meaning"),
        ({"certificates": ["spiffe://a/{tenant}"], "tenant_header": "x-tenant"}, "names no tenant"),
        ({"networks": ["10.0.0.0/8"], "client_certificate": True}, "needs `certificates`"),
    ],
)
def test_a_gateway_in_front_is_known_and_says_something(gateway, complaint):
    with pytest.raises(ValidationError, match=complaint):
        IdentitySection.model_validate({"gateway": gateway})


def test_only_a_listener_that_asks_for_certificates_can_require_them():
    files = {"cert": "c.pem", "key": "k.pem"}
    with pytest.raises(ValidationError, match="client_ca"):
        ListenerTlsSection.model_validate(files | {"require_client_certificate": True})
    assert ListenerTlsSection.model_validate(files | {"client_ca": "ca.pem", "require_client_certificate": True}).client_ca
