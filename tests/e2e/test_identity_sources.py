"""Keys behind a URL, client certificates, a trusted gateway in front and tenants that are not listed, on a real Envoy with TLS."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.explain.explain import explain
from tests.support.certificates import Authority
from tests.support.servers import EngineSim, free_port
from tests.support.stack import Stack, key_of, node, tenant
from tests.support.tokens import AUDIENCE, ISSUER, KeyServer, jwks, make_claims, make_signer, sign

pytestmark = pytest.mark.e2e

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
SPIFFE = "spiffe://corp.example/ns/{}/sa/web"
OTHER_ISSUER = "https://unreachable.example"


class TlsStack(Stack):
    """With a listener that speaks TLS and asks for certificates."""

    authority: Authority
    keys: KeyServer

    def ask(self, certificate: dict[str, str] | None = None, body: object = ASK, **headers: str) -> httpx.Response:
        """Send a request over a connection of its own."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        with httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=self.authority.client(certificate), timeout=30) as client:
            return client.post("/v1/chat/completions", json=body, headers=named)


def code(answer: httpx.Response) -> int | str:
    return 200 if answer.status_code == 200 else answer.json()["error"]["code"]


@pytest.fixture(scope="module")
def signer():
    return make_signer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("identities")


@pytest.fixture(scope="module")
def authority(folder) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def workload(authority):
    """Make a certificate whose only name is a URI."""
    numbers = itertools.count()
    return lambda uri: authority.issue_workload(f"workload-{next(numbers)}", uri)


@pytest.fixture(scope="module", params=["static", "xds"])
def stack(request, signer, authority, folder) -> Iterator[TlsStack]:
    served = authority.issue("keys", "127.0.0.1")
    other_authority = Authority(folder, "other")
    with (
        EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) as sim,
        KeyServer(served, jwks(one=signer)) as keys,
        KeyServer(other_authority.issue("false-keys", "127.0.0.1"), jwks(one=signer)) as false_keys,
    ):

        def issuer(name: str, server: KeyServer) -> dict[str, object]:
            source = {"url": server.url, "ca": str(authority.file), "cache_s": 1}
            own = {"tenant": "claims.org.team", "priority": "claims.tier", "models": "claims.models"}
            return {"issuer": name, "audiences": [AUDIENCE], "jwks": source, **own}

        config = {
            "pools": {
                "p": {"model": "m", "engine": "vllm", "nodes": [node("a", sim.address)]},
                "q": {"model": "n", "served_model": "m", "engine": "vllm", "nodes": [node("b", sim.address)]},
            },
            "tenants": [tenant("acme"), tenant("other"), tenant("tight", rpm=2), tenant("tiered", per_priority={"batch": {"rpm": 1}})],
            "identity": {
                "jwt": [issuer(ISSUER, keys), issuer(OTHER_ISSUER, false_keys)],
                "certificates": [{"name": SPIFFE.format("{tenant}")}, {"name": "*.batch.corp.example", "tenant": "other"}],
                "gateway": {
                    "certificates": ["spiffe://corp.example/edge"],
                    "tenant_header": "x-tenant",
                    "client_certificate": True,
                },
                "tenant_defaults": {"models": ["m"], "limits": {"rpm": 2}},
                "share_limits": False,
            },
            "envoy": {"tls": {**authority.issue("listener", "127.0.0.1"), "client_ca": str(authority.file)}},
        }
        gateway = {"xds": {"address": f"127.0.0.1:{free_port()}"}} if request.param == "xds" else {}
        running = TlsStack(config, gateway=gateway)
        running.authority, running.keys = authority, keys
        with running:
            yield running


def bearer(key, *arguments: object, kid: str = "one", **changed: object) -> str:
    return f"Bearer {sign(key, make_claims(*arguments, **changed), kid)}"


def test_keys_behind_a_url_are_fetched_over_verified_tls(stack, signer):
    assert code(stack.ask(authorization=bearer(signer))) == 200
    assert code(stack.ask(authorization=bearer(signer, iss=OTHER_ISSUER))) == "invalid_api_key"


def test_keys_rotate_without_a_restart(stack, signer):
    successor = make_signer()
    stack.keys.document = jwks(one=signer, two=successor)
    stack.eventually(lambda: code(stack.ask(authorization=bearer(successor, kid="two"))) == 200, "the new key is known")
    assert code(stack.ask(authorization=bearer(signer))) == 200
    stack.keys.document = jwks(two=successor)
    stack.eventually(lambda: code(stack.ask(authorization=bearer(signer))) == "invalid_api_key", "the old key is forgotten")
    assert code(stack.ask(authorization=bearer(successor, kid="two"))) == 200
    stack.keys.document = jwks(one=signer)
    stack.eventually(lambda: code(stack.ask(authorization=bearer(signer))) == 200, "the old key is known again")


def test_claims_narrow_models(stack, signer):
    for_n = ASK | {"model": "n"}
    assert code(stack.ask(body=for_n, authorization=bearer(signer))) == 200
    assert code(stack.ask(body=for_n, authorization=bearer(signer, models=["m"]))) == "model_not_allowed"
    assert code(stack.ask(authorization=bearer(signer, models=["m"]))) == 200
    assert code(stack.ask(authorization=bearer(signer, tier="urgent"))) == "invalid_api_key"


def test_a_claim_lowers_the_priority(stack, signer):
    asked = [code(stack.ask(authorization=bearer(signer, "tiered", tier=tier))) for tier in ("batch", "batch", "critical", None)]
    assert asked == [200, "rate_limit_exceeded", 200, 200]


def test_a_tenant_that_is_not_listed_has_the_limits_of_all_such_tenants(stack, signer):
    answers = [code(stack.ask(authorization=bearer(signer, team))) for team in ("team-1", "team-1", "team-1", "team-2")]
    assert answers == [200, 200, "rate_limit_exceeded", 200]
    assert code(stack.ask(body=ASK | {"model": "n"}, authorization=bearer(signer, "team-3"))) == "model_not_allowed"
    assert code(stack.ask(authorization=bearer(signer, "no name"))) == "invalid_api_key"


def test_a_workload_is_known_by_the_uri_in_its_certificate(stack, workload):
    assert code(stack.ask(workload(SPIFFE.format("acme")))) == 200
    assert code(stack.ask(workload(SPIFFE.format("acme") + "/more"))) == "invalid_api_key"
    assert code(stack.ask(workload("spiffe://evil.example/ns/acme/sa/web"))) == "invalid_api_key"
    assert code(stack.ask()) == "invalid_api_key"


def test_a_workload_is_known_by_the_dns_name_in_its_certificate(stack, authority):
    assert code(stack.ask(authority.issue("dns", "a.batch.corp.example"))) == 200
    assert code(stack.ask(authority.issue("dns-odd", "batch.corp.example"))) == "invalid_api_key"


def test_a_certificate_of_another_authority_opens_no_connection(stack, folder):
    strange = Authority(folder, "another").issue_workload("strange", SPIFFE.format("acme"))
    with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError, httpx.WriteError)):
        stack.ask(strange)


def test_a_gateway_in_front_is_known_by_its_certificate(stack, workload, authority):
    edge = workload("spiffe://corp.example/edge")
    assert code(stack.ask(edge)) == "invalid_api_key"
    assert code(stack.ask(edge, x_tenant="acme")) == 200
    assert code(stack.ask(edge, x_forwarded_client_cert=f"URI={SPIFFE.format('acme')}")) == 200
    assert code(stack.ask(edge, x_tenant="acme", x_forwarded_client_cert=f"URI={SPIFFE.format('other')}")) == "identity_conflict"
    assert code(stack.ask(edge, x_tenant="acme", authorization=f"Bearer {key_of('other')}")) == "identity_conflict"


def test_what_nobody_vouches_for_counts_for_nothing(stack, workload):
    forwarded = f"URI={SPIFFE.format('acme')}"
    forged = {"x_tenant": "acme", "x_forwarded_client_cert": forwarded, "x_jwt_payload": "e30", "x_din_tenant": "acme"}
    assert code(stack.ask(**forged)) == "invalid_api_key"
    unknown_workload = workload("spiffe://corp.example/somebody")
    assert code(stack.ask(unknown_workload, **forged)) == "invalid_api_key"
    assert code(stack.ask(workload(SPIFFE.format("other")), **forged)) == 200


def test_two_identities_that_disagree_are_refused(stack, workload, signer):
    other = workload(SPIFFE.format("other"))
    assert code(stack.ask(other, authorization=bearer(signer))) == "identity_conflict"
    assert code(stack.ask(other, authorization=f"Bearer {key_of('acme')}")) == "identity_conflict"
    assert code(stack.ask(other, authorization=bearer(signer, "other"))) == 200


def test_keys_and_identities_count_apart_where_they_share_no_limits(stack, signer):
    token, key = bearer(signer, "tight"), f"Bearer {key_of('tight')}"
    answers = [code(stack.ask(authorization=each)) for each in (token, token, token, key, key, key)]
    assert answers == [200, 200, "rate_limit_exceeded", 200, 200, "rate_limit_exceeded"]


def test_metrics_show_the_identity_and_one_name_for_tenants_that_are_not_listed(stack, signer, workload):
    for headers in ({"authorization": bearer(signer, "team-8")}, {"authorization": f"Bearer {key_of('acme')}"}):
        assert code(stack.ask(**headers)) == 200
    assert code(stack.ask(workload(SPIFFE.format("acme")))) == 200

    def page() -> str:
        with urlopen(f"{stack.admin_url}/metrics", timeout=30) as reply:
            return reply.read().decode()

    def is_counted() -> bool:
        kinds = [("(unlisted)", "jwt"), ("acme", "key"), ("acme", "certificate")]
        text = page()
        return all(f'din_requests_identified_total{{din_tenant_id="{name}",din_identity="{kind}"}}' in text for name, kind in kinds)

    stack.eventually(is_counted, page)
    assert "team-8" not in page()


def test_explain_names_the_identity(stack):
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)

    def explained(tenant_id: str = "", **parts: object):
        return explain(settings, tenant_id, json.dumps({"body": ASK, **parts}).encode())

    by_token = explained(claims=make_claims())
    assert (by_token.sent, by_token.tenant, by_token.identity) == (True, "acme", "jwt:ann")
    assert "tenant    acme, known by jwt:ann" in by_token.lines()
    by_gateway = explained(peer={"uri": "spiffe://corp.example/edge"}, headers={"X-Tenant": "team-9"})
    assert (by_gateway.sent, by_gateway.tenant, by_gateway.identity) == (True, "team-9", "gateway:team-9")
    assert explained("other", claims=make_claims()).refusal == "identity_conflict"
    assert explained("team-9").sent


@pytest.fixture(scope="module")
def plain(signer, authority, folder) -> Iterator[Stack]:
    """A listener without TLS behind gateways of a network, with an issuer that has a DNS name, and an audit log."""
    with (
        EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) as sim,
        KeyServer(authority.issue("named-keys", "localhost"), jwks(one=signer)) as keys,
    ):
        source = {"url": keys.url.replace("127.0.0.1", "localhost"), "ca": str(authority.file)}
        issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks": source, "tenant": "claims.org.team"}
        config = {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", sim.address)]}},
            "tenants": [tenant("acme"), tenant("other"), tenant("tight", rpm=3)],
            "identity": {
                "jwt": [issuer],
                "certificates": [{"name": SPIFFE.format("{tenant}")}],
                "gateway": {"networks": ["127.0.0.2/32"], "tenant_header": "x-tenant", "client_certificate": True},
                "limits": {"rpm": 2},
            },
            "audit": {"folder": "audit", "replica": "gw-1", "keys": {"k1": {"file": "audit.key"}}, "flush_ms": 20},
        }
        running = Stack(config)
        (running.folder / "audit.key").write_text("0" * 64)
        running.sim = sim
        with running:
            yield running


def ask_from(stack: Stack, address: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    with httpx.Client(base_url=stack.url, transport=httpx.HTTPTransport(local_address=address), timeout=30) as client:
        return client.post("/v1/chat/completions", json=ASK, headers=named)


def test_a_gateway_in_front_is_known_by_its_network(plain, signer):
    forwarded = f"By=spiffe://corp.example/edge;URI={SPIFFE.format('acme')}"
    for spoofed in ({"x_tenant": "acme"}, {"x_forwarded_client_cert": forwarded}):
        assert code(ask_from(plain, "127.0.0.2", **spoofed)) == 200
        assert code(ask_from(plain, "127.0.0.1", **spoofed)) == "invalid_api_key"
    assert code(ask_from(plain, "127.0.0.1", x_forwarded_for="127.0.0.2", x_tenant="acme")) == "invalid_api_key"
    assert (
        code(ask_from(plain, "127.0.0.2", x_tenant="acme", x_forwarded_client_cert=forwarded.replace("acme", "other")))
        == "identity_conflict"
    )
    arrived = {name for request in plain.sim.seen()[1] for name, _ in request["headers"]}
    assert not arrived & {"x-tenant", "x-forwarded-client-cert", "authorization"}


def test_the_keys_of_an_issuer_with_a_name_are_fetched(plain, signer):
    assert code(ask_from(plain, "127.0.0.1", authorization=bearer(signer))) == 200


def test_each_identity_has_its_limits_and_shares_its_tenants(plain, signer):
    def token(subject: str) -> str:
        return bearer(signer, "tight", sub=subject)

    answers = [code(ask_from(plain, "127.0.0.1", authorization=token(subject))) for subject in ("ann", "ann", "ann", "bob", "bob")]
    assert answers == [200, 200, "rate_limit_exceeded", 200, "rate_limit_exceeded"]
    assert code(ask_from(plain, "127.0.0.1", authorization=f"Bearer {key_of('tight')}")) == "rate_limit_exceeded"


def test_the_audit_log_names_the_identity(plain, signer):
    asked = {
        "jwt:carol": ("127.0.0.1", {"authorization": bearer(signer, sub="carol")}),
        "gateway:other": ("127.0.0.2", {"x_tenant": "other"}),
        f"certificate:{SPIFFE.format('other')}": ("127.0.0.2", {"x_forwarded_client_cert": f"URI={SPIFFE.format('other')}"}),
        "acme": ("127.0.0.1", {"authorization": f"Bearer {key_of('acme')}"}),
    }
    for address, headers in asked.values():
        assert code(ask_from(plain, address, **headers)) == 200

    def named() -> set[str]:
        lines = [line for path in (plain.folder / "audit").glob("gw-1-*.jsonl") for line in path.read_text().splitlines()]
        return {record.get("key_id", "") for record in map(json.loads, lines) if record["kind"] == "settled"}

    plain.eventually(lambda: set(asked) <= named(), named)
