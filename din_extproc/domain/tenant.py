"""Tenants, their API keys, and the limits that admission enforces."""

from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import blake2s

from msgspec import Struct
from msgspec.structs import force_setattr

from din_extproc.domain.request import Priority

RANK = {priority: rank for rank, priority in enumerate(Priority)}
"""Rank of each priority; 0 is the highest."""


class RateLimits(Struct, frozen=True, gc=False):
    """Limits of one budget. None: unlimited."""

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
    def as_tuple(self) -> tuple[int | None, int | None, int | None]:
        """The three limits, in the order of the fields."""
        return self.rpm, self.tpm, self.max_streams


LONG_TAIL = "long_tail"
"""Start of the scope of the slots that long requests may hold at a node."""


class Budget(Struct, frozen=True, gc=False, cache_hash=True):
    """Limits under a name.

    Requests with the same scope of one tenant share its counters; a `shared` budget has one set of counters for all tenants.
    """

    scope: str
    """`tenant`, `model:<physical model>`, `key:<key id>` or `priority:<class>`, unique within the tenant; `identities:` precedes it where a
    tenant's tokens and certificates do not share its keys' limits. `network...` or `long_tail:<pool>:<node>` for a shared budget."""
    limits: RateLimits
    shared: bool = False
    """All tenants of the network share the counters."""
    enforced: bool = True
    """False: requests are counted and never refused; a limit that would have refused is reported."""


class ApiKey(Struct, frozen=True, gc=False):
    """An API key as stored in the configuration: a salted digest, never the secret."""

    id: str
    salt: bytes
    digest: bytes
    """SHA-256 of salt + secret."""
    expires: datetime | None = None
    limits: RateLimits | None = None


class OnSensitive(StrEnum):
    """The action on sensitive data in a tenant's prompts."""

    OFF = "off"
    FLAG = "flag"
    """Send the request on and count the findings."""
    MASK = "mask"
    """Send the request on with the findings masked."""
    BLOCK = "block"
    """Refuse the request."""


class SensitiveData(Struct, frozen=True):
    """The policy of a tenant or pool for sensitive data in prompts."""

    policy: OnSensitive = OnSensitive.OFF
    kinds: tuple[str, ...] | None = None
    """The kinds to look for; None: all kinds."""


class Queueing(Struct, frozen=True, gc=False):
    """How a tenant's requests queue when it lacks tokens or slots."""

    max_wait_ms: int = 0
    """0: requests do not queue, they are refused at once."""
    size: int = 100
    """The largest number of queued requests per worker."""
    weight: int = 1
    """The tenant's weight when tenants compete for a shared limit."""


class Tenant(Struct, frozen=True):
    """A department or application with its own keys, models and budgets."""

    id: str
    models: tuple[str, ...]
    """Patterns of allowed model names with `*` and `?` as in a shell, matched against the requested alias and the physical model."""
    priority: Priority
    limits: RateLimits
    per_model: dict[str, RateLimits]
    per_priority: dict[Priority, RateLimits] = {}
    """Additional limits for requests of one class."""
    enforce: bool = True
    """False: the tenant's own limits are counted and reported, never enforced."""
    sensitive_data: SensitiveData = SensitiveData()
    queueing: Queueing = Queueing()
    stays_on_site: bool = False
    """No request of the tenant goes to a remote API, as a fallback neither."""
    narrowed_to: tuple[str, ...] | None = None
    """Patterns of the token that a request came with: its model must match one of them, too. None: the token has none."""
    listed: bool = True
    """False: the configuration does not list the tenant; it is like all unlisted ones."""
    pseudonym: str = ""
    """Stands for the id where nodes see it: 8 hexadecimal digits of its hash, unless given."""

    def __post_init__(self) -> None:
        if self.id and not self.pseudonym:
            force_setattr(self, "pseudonym", blake2s(self.id.encode(), digest_size=4).hexdigest())

    def priority_of(self, requested: Priority | None) -> Priority:
        """Return the priority of a request: the requested one, capped at the tenant's own."""
        return self.priority if requested is None or RANK[requested] < RANK[self.priority] else requested

    def may_use(self, model: str) -> bool:
        """Return whether one of the allowed patterns matches the name."""
        return any(matches_pattern(model, pattern) for pattern in self.models)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether the name matches: `*` stands for any characters, `?` for one, every other character for itself."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


class ScopeLimits(Struct, frozen=True):
    """Limits of all tenants together, for everything or for one model."""

    limits: RateLimits = RateLimits()
    per_priority: dict[Priority, RateLimits] = {}
    """Additional limits for requests of one class."""
    reserved_for_critical: float = 0.0
    """The share of the limits that only requests of class critical may use, from 0 to less than 1."""

    @property
    def non_critical_limits(self) -> RateLimits | None:
        """The limits of the other classes together; None: nothing is reserved."""
        if not self.reserved_for_critical:
            return None
        rest = 1.0 - self.reserved_for_critical
        return RateLimits(*(None if limit is None else max(1, int(limit * rest)) for limit in self.limits.as_tuple))


class GlobalLimits(Struct, frozen=True):
    """The limits that the tenants of a network share."""

    total: ScopeLimits = ScopeLimits()
    per_model: dict[str, ScopeLimits] = {}
    """By physical model."""
    enforce: bool = True
    """False: the limits are counted and reported, never enforced."""
