"""Tokens that Envoy verifies name the tenant; what it did not verify names nobody."""

from collections.abc import Iterator

import jwt
import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant
from tests.support.tokens import AUDIENCE, ISSUER, make_signer, sign, write_jwks
from tests.support.tokens import make_claims as claims

pytestmark = pytest.mark.e2e

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def signer():
    return make_signer()


@pytest.fixture(scope="module")
def other_key():
    return make_signer()


@pytest.fixture(scope="module", params=["wire", "grpcio"])
def stack(request, signer, tmp_path_factory) -> Iterator[Stack]:
    jwks = tmp_path_factory.mktemp("jwks") / "jwks.json"
    write_jwks(jwks, one=signer)
    issuer = {"issuer": ISSUER, "audiences": [AUDIENCE], "jwks": {"file": str(jwks)}, "tenant": "claims.org.team"}
    with EngineSim(model="m", decode_rate=2000.0, prefill_rate=1e6) as sim:
        config = {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", sim.address)]}},
            "tenants": [tenant("acme"), tenant("other"), tenant("tight", rpm=2)],
            "identity": {"jwt": [issuer]},
        }
        with Stack(config, serve=("--transport", request.param)) as running:
            running.sim = sim
            yield running


def ask(stack: Stack, **headers: str):
    with stack.client(None) as client:
        return client.post("/v1/chat/completions", json=ASK, headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_a_verified_token_is_its_tenants(stack, signer):
    assert ask(stack, authorization=f"Bearer {sign(signer, claims())}").status_code == 200


def test_keys_still_work(stack):
    assert ask(stack, authorization=f"Bearer {key_of('acme')}").status_code == 200
    assert ask(stack, x_api_key=key_of("acme")).status_code == 200
    assert ask(stack).status_code == 401


def test_a_token_and_a_key_share_the_tenants_limits(stack, signer):
    token = f"Bearer {sign(signer, claims('tight'))}"
    answers = [ask(stack, authorization=token), ask(stack, x_api_key=key_of("tight")), ask(stack, authorization=token)]
    assert [each.status_code for each in answers] == [200, 200, 429]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"exp": 1_700_000_000}, id="expired"),
        pytest.param({"exp": None}, id="without an end"),
        pytest.param({"aud": "another"}, id="for another audience"),
        pytest.param({"iss": "https://another.example"}, id="of another issuer"),
        pytest.param({"org": {"team": "unknown"}}, id="of no tenant"),
        pytest.param({"org": {"team": ["acme"]}}, id="with a claim that is no text"),
        pytest.param({"org": "acme"}, id="without the claim"),
    ],
)
def test_other_tokens_are_refused(stack, signer, changed):
    answer = ask(stack, authorization=f"Bearer {sign(signer, claims(**changed))}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_forged_signature_is_refused(stack, signer, other_key):
    unsigned = jwt.encode(claims(), None, algorithm="none")
    head, body, signature = sign(signer, claims("other")).split(".")
    swapped = ".".join((head, sign(signer, claims()).split(".")[1], signature))
    forged = (sign(other_key, claims()), sign(other_key, claims(), "two"))
    for token in (unsigned, unsigned + signature, swapped, f"{head}.{body}.", *forged):
        assert ask(stack, authorization=f"Bearer {token}").status_code == 401


def test_claims_in_headers_count_for_nothing(stack, signer):
    payload = sign(signer, claims()).split(".")[1]
    for name in ("x-jwt-payload", "x-envoy-jwt-payload", "envoy.filters.http.jwt_authn", "x-forwarded-user", "x-access-token"):
        assert ask(stack, **{name: payload}).status_code == 401
    with stack.client(None) as client:
        answer = client.post("/v1/chat/completions", params={"access_token": sign(signer, claims())}, json=ASK)
    assert answer.status_code == 401


def test_a_forwarded_certificate_does_not_pass_where_nothing_may_forward_one(stack):
    answer = ask(stack, x_api_key=key_of("acme"), x_forwarded_client_cert="URI=spiffe://corp.example/ns/other/sa/web")
    assert answer.status_code == 200
    assert "x-forwarded-client-cert" not in {name for request in stack.sim.seen()[1] for name, _ in request["headers"]}


def test_a_token_and_another_tenants_key_are_refused(stack, signer):
    token = f"Bearer {sign(signer, claims())}"
    answer = ask(stack, authorization=token, x_api_key=key_of("other"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "identity_conflict")
    assert ask(stack, authorization=token, x_api_key=key_of("acme")).status_code == 200
    assert ask(stack, authorization=token, x_api_key=key_of("acme") + "x").status_code == 401
