"""What `identity:` takes."""

import pytest
from pydantic import ValidationError

from din_extproc.settings.identity import IdentitySection

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
