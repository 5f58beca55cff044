"""`identity:`: who asks, besides API keys."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from din_extproc.domain.identity import JwtIssuer
from din_extproc.settings.section import AsTuple, Section, Text

_CLAIM = re.compile(r"claims(\.[A-Za-z0-9_:/-]+)+").fullmatch


def _claim(text: str) -> str:
    if _CLAIM(text) is None:
        raise ValueError(f"{text!r} is not a claim, such as claims.tenant or claims.org.team")
    return text


Claim = Annotated[str, AfterValidator(_claim)]


class JwksSection(Section):
    """The public keys of an issuer."""

    file: Text
    """A JWKS file, where Envoy can read it."""


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
    """The claim that names who asks, in the audit log."""

    def jwt_issuer(self, folder: Path) -> JwtIssuer:
        """For the domain; a relative file is beside the configuration."""
        tenant, key_id = (tuple(each.split(".")[1:]) for each in (self.tenant, self.key_id))
        file = str((folder / self.jwks.file).absolute())
        return JwtIssuer(issuer=self.issuer, audiences=self.audiences, jwks_file=file, tenant=tenant, key_id=key_id)


class IdentitySection(Section):
    """`identity:`."""

    jwt: Annotated[tuple[JwtSection, ...], AsTuple] = ()
    """JSON Web Tokens that Envoy verifies."""

    @field_validator("jwt")
    @classmethod
    def _apart(cls, value: tuple[JwtSection, ...]) -> tuple[JwtSection, ...]:
        issuers = [each.issuer for each in value]
        for issuer in issuers:
            if issuers.count(issuer) > 1:
                raise ValueError(f"issuer {issuer!r} is listed twice; list it once, with all its audiences")
        return value
