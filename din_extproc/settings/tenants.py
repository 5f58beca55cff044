"""Tenants, their keys and limits, as written and as the domain knows them.

Rule: a limit that a tenant does not mention is the default's; `null` lifts it.
"""

from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from din_extproc.admit.keys import parse_hash
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import ApiKey, GlobalLimits, OnSensitive, Queueing, RateLimits, ScopeLimits, Tenant
from din_extproc.settings.keys import KeyHash, KeyId
from din_extproc.settings.routes import PriorityName
from din_extproc.settings.section import AsTuple, Ceiling, Name, Section, Text
from din_extproc.settings.sensitive import SensitiveDataPolicy, SensitiveDataSection

_DIMENSIONS = ("rpm", "tpm", "max_streams")


class LimitsSection(Section):
    """Ceilings of one budget."""

    rpm: Ceiling | None = None
    """Requests in any 60 seconds."""
    tpm: Ceiling | None = None
    """Tokens per minute; also the most that one request may need."""
    max_streams: Ceiling | None = None
    """Requests in flight."""

    def to_limits(self, default: RateLimits | None = None) -> RateLimits:
        """For the domain; what is not mentioned is taken from the default."""
        own = {name: getattr(self, name) for name in _DIMENSIONS if default is None or name in self.model_fields_set}
        return RateLimits(**({} if default is None else {name: getattr(default, name) for name in _DIMENSIONS}) | own)


class TenantLimitsSection(LimitsSection):
    """A tenant's ceilings, and narrower ones for single models and classes of priority."""

    per_model: dict[str, LimitsSection] = Field(default_factory=dict)
    """Physical model -> its ceilings, besides the tenant's."""
    per_priority: dict[PriorityName, LimitsSection] = Field(default_factory=dict)
    """Class of priority -> the ceilings of its requests, besides the tenant's."""
    enforce: bool = True
    """False: shadow mode, this tenant's limits are counted and reported, and nothing is refused for them."""


class ScopeLimitsSection(LimitsSection):
    """Limits of all tenants together."""

    per_priority: dict[PriorityName, LimitsSection] = Field(default_factory=dict)
    """Class of priority -> the ceilings of its requests."""
    reserved_for_critical: Annotated[float, Field(strict=False, ge=0, lt=1)] = 0.0
    """The share of these limits that only critical requests may use."""

    def to_scope_limits(self) -> ScopeLimits:
        """For the domain."""
        return ScopeLimits(self.to_limits(), _convert_by_priority(self.per_priority), self.reserved_for_critical)


class GlobalLimitsSection(ScopeLimitsSection):
    """`limits:`, those that all tenants of the network share."""

    per_model: dict[str, ScopeLimitsSection] = Field(default_factory=dict)
    """Physical model -> what all tenants together may use of it."""
    enforce: bool = True
    """False: shadow mode, they are counted and reported, and nothing is refused for them."""

    def to_global_limits(self) -> GlobalLimits:
        """For the domain."""
        return GlobalLimits(self.to_scope_limits(), {model: each.to_scope_limits() for model, each in self.per_model.items()}, self.enforce)

    @property
    def any(self) -> bool:
        """Whether anything is limited here."""
        return bool(self.model_fields_set - {"enforce"})


def _convert_by_priority(sections: dict[Priority, LimitsSection]) -> dict[Priority, RateLimits]:
    return {priority: section.to_limits() for priority, section in sections.items()}


def _parse_moment(value: Any) -> Any:
    """A date is its first moment; without a zone, a time is UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if not isinstance(value, datetime):
        raise ValueError("a date such as 2027-05-01 or a time such as 2027-05-01T12:00:00Z is expected")  # noqa: TRY004 - a finding
    return value if value.tzinfo else value.replace(tzinfo=UTC)


class KeySection(Section):
    """One API key, by its hash."""

    id: KeyId
    hash: KeyHash
    expires: Annotated[datetime, BeforeValidator(_parse_moment)] | None = None
    limits: LimitsSection | None = None
    """Narrower ceilings for this key, besides the tenant's."""

    def to_key(self) -> ApiKey:
        """For the domain."""
        salt, digest = parse_hash(self.hash) or (b"", b"")
        return ApiKey(
            id=self.id, salt=salt, digest=digest, expires=self.expires, limits=None if self.limits is None else self.limits.to_limits()
        )


class QueueSection(Section):
    """How requests wait while tokens or slots are short."""

    max_wait_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 0
    """0: they don't wait."""
    size: Annotated[int, Field(ge=1, le=100_000)] = 100
    """How many wait at most, in one worker."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Where tenants compete for what they share."""

    def to_queueing(self, default: "QueueSection") -> Queueing:
        """For the domain; what is not mentioned is taken from the default."""
        return Queueing(**(default.model_dump() | self.model_dump(exclude_unset=True)))


class TenantNameSection(Section):
    """The id and the keys of a tenant."""

    id: Name
    keys: Annotated[tuple[KeySection, ...], AsTuple] = ()


class TenantPolicySection(Section):
    """Permissions and limits of a tenant."""

    models: Annotated[tuple[Text, ...], AsTuple, Field(min_length=1)]
    """Names it may ask for: aliases and physical models, `*` for any characters, `?` for one. An alias allows the models behind it."""
    priority: PriorityName = Priority.STANDARD
    limits: TenantLimitsSection = TenantLimitsSection()
    queue: QueueSection = QueueSection()
    sensitive_data: SensitiveDataPolicy | None = None
    """None: that of `defaults`."""
    stays_on_site: bool = False
    """No request of the tenant goes to a remote API, as a fallback neither."""

    def policy(self, defaults: "DefaultsSection", name: str, *, listed: bool = True) -> Tenant:
        """For the domain, as a tenant of this name."""
        return Tenant(
            id=name,
            listed=listed,
            models=self.models,
            priority=self.priority,
            limits=self.limits.to_limits(defaults.limits.to_limits()),
            per_model={model: limits.to_limits() for model, limits in self.limits.per_model.items()},
            per_priority=_convert_by_priority(self.limits.per_priority),
            enforce=self.limits.enforce,
            queueing=self.queue.to_queueing(defaults.queue),
            stays_on_site=self.stays_on_site,
            sensitive_data=(self.sensitive_data or defaults.sensitive_data).sensitive_data(),
        )


class TenantSection(TenantPolicySection, TenantNameSection):
    """A department or an application."""

    def to_tenant(self, defaults: "DefaultsSection") -> Tenant:
        """For the domain."""
        return self.policy(defaults, self.id)


class DefaultsSection(Section):
    """`defaults:`."""

    limits: LimitsSection = LimitsSection()
    sensitive_data: SensitiveDataPolicy = SensitiveDataSection(policy=OnSensitive.OFF)
    queue: QueueSection = QueueSection()
