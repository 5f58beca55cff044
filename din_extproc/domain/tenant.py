"""Who asks, and what they may use: tenants, their keys, and the limits that admission enforces."""

from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase

from msgspec import Struct

from din_extproc.domain.request import Priority

RANK = {priority: rank for rank, priority in enumerate(Priority)}
"""0 is the highest."""


class RateLimits(Struct, frozen=True, gc=False):
    """One budget's ceilings. None: that dimension is not limited."""

    rpm: int | None = None
    """Requests in any 60 seconds."""
    tpm: int | None = None
    """Tokens: the bucket's size, refilled evenly over 60 seconds."""
    max_streams: int | None = None
    """Requests in flight at once."""

    def __post_init__(self) -> None:
        for name in ("rpm", "tpm", "max_streams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1")

    @property
    def numbers(self) -> tuple[int | None, int | None, int | None]:
        """All three, in the order of the fields."""
        return self.rpm, self.tpm, self.max_streams


class Budget(Struct, frozen=True, gc=False):
    """Limits under a name. Requests that share a scope of one tenant share its counters; a shared scope is one for all tenants."""

    scope: str
    """`tenant`, `model:<physical model>`, `key:<key id>`, `priority:<class>`, unique within the tenant; of a shared one `network...`."""
    limits: RateLimits
    shared: bool = False
    """All tenants of the network count here together."""
    enforced: bool = True
    """False: requests are counted and never refused for it; what would have been refused is told."""


class ApiKey(Struct, frozen=True, gc=False):
    """A key as the configuration keeps it: never the secret itself."""

    id: str
    salt: bytes
    digest: bytes
    """SHA-256 over salt + secret."""
    expires: datetime | None = None
    limits: RateLimits | None = None


class OnSensitive(StrEnum):
    """What is done about sensitive data in a tenant's prompts."""

    OFF = "off"
    FLAG = "flag"
    """The request passes; what it holds is counted."""
    MASK = "mask"
    """The request passes without it."""
    BLOCK = "block"
    """The request is refused."""


class SensitiveData(Struct, frozen=True):
    """A tenant's policy for sensitive data in prompts (R45)."""

    policy: OnSensitive = OnSensitive.OFF
    kinds: tuple[str, ...] | None = None
    """What counts as such; None: every kind there is."""


class Queueing(Struct, frozen=True, gc=False):
    """How a tenant's requests wait while its tokens or its slots are short."""

    max_wait_ms: int = 0
    """0: they don't, they are refused at once."""
    size: int = 100
    """How many wait at most, in one worker."""
    weight: int = 1
    """Where tenants compete for what they share: its part is so many times that of weight 1."""


class Tenant(Struct, frozen=True):
    """A department or application with its own keys, models and budgets (R29)."""

    id: str
    models: tuple[str, ...]
    """Allowed model names, `*` and `?` as in a shell. Matched against the alias asked for and the physical model served."""
    priority: Priority
    limits: RateLimits
    per_model: dict[str, RateLimits]
    per_priority: dict[Priority, RateLimits] = {}
    """Narrower ceilings for requests of one class."""
    enforce: bool = True
    """False: this tenant's own limits are counted and told, never enforced."""
    sensitive_data: SensitiveData = SensitiveData()
    queueing: Queueing = Queueing()

    def priority_of(self, asked: Priority | None) -> Priority:
        """The priority of one request: what the client asked for, but never above the tenant's own."""
        return self.priority if asked is None or RANK[asked] < RANK[self.priority] else asked

    def may_use(self, model: str) -> bool:
        """Whether one of the allowed patterns matches the name."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


class ScopeLimits(Struct, frozen=True):
    """What all tenants together may use, of everything or of one model."""

    limits: RateLimits = RateLimits()
    per_priority: dict[Priority, RateLimits] = {}
    """Narrower ceilings for requests of one class."""
    reserved_for_critical: float = 0.0
    """The share of the limits that only requests of class critical may use: 0 up to 1."""

    @property
    def below_critical(self) -> RateLimits | None:
        """What requests of the other classes may use together; None: nothing is reserved."""
        if not self.reserved_for_critical:
            return None
        rest = 1.0 - self.reserved_for_critical
        return RateLimits(*(None if limit is None else max(1, int(limit * rest)) for limit in self.limits.numbers))


class GlobalLimits(Struct, frozen=True):
    """The limits that the tenants of a network share."""

    everything: ScopeLimits = ScopeLimits()
    per_model: dict[str, ScopeLimits] = {}
    """By physical model."""
    enforce: bool = True
    """False: counted and told, never enforced."""
