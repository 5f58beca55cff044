"""`telemetry:`, where traces and metrics are pushed to, in OpenTelemetry's protocol.

Rule: without the section nothing is pushed and no request leaves a span; `/metrics` is there in any case.
"""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from din_extproc.settings.section import Section, Text
from din_extproc.settings.tls import ClientTlsSection


def _check_endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{text!r} is no address of a collector: http://host:4318 is expected, without /v1/traces")
    return text.rstrip("/")


Share = Annotated[float, Field(strict=False, ge=0, le=1)]


class TelemetrySection(Section):
    """`telemetry:`."""

    endpoint: Annotated[Text, AfterValidator(_check_endpoint)]
    """OTLP over HTTP; `/v1/traces` and `/v1/metrics` are put behind it."""
    headers: dict[Text, Annotated[SecretStr, Field(strict=False)]] = Field(default_factory=dict)
    tls: ClientTlsSection | None = None
    """Whom it believes behind `https`, and what it shows there. None: as the system does."""
    sample: Share = 0.05
    """The share of requests without a trace of their own that leave spans; a client's sampled trace always does."""
    metrics_every_s: Annotated[float, Field(strict=False, ge=0, le=3600)] = 60.0
    """How often metrics are pushed; 0: they are only scraped."""
    flush_s: Annotated[float, Field(strict=False, ge=0.05, le=60)] = 1.0
    """How often spans are pushed."""
    timeout_s: Annotated[float, Field(strict=False, ge=0.1, le=60)] = 5.0
    service_name: Text = "din-extproc"

    @model_validator(mode="after")
    def _check_tls(self) -> "TelemetrySection":
        if self.tls is not None and not self.endpoint.startswith("https:"):
            raise ValueError("`tls` is for an endpoint that begins with https:")
        return self
