"""Who asks, and what they may use: tenants, their keys, and the limits that admission enforces."""

from datetime import datetime
from fnmatch import fnmatchcase

from msgspec import Struct

from din_extproc.domain.request import Priority

_RANK = {priority: rank for rank, priority in enumerate(Priority)}


class Limits(Struct, frozen=True, gc=False):
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


class Budget(Struct, frozen=True, gc=False):
    """Limits under a name. Requests that share a scope of one tenant share its counters."""

    scope: str
    """`tenant`, `model:<physical model>` or `key:<key id>`: unique within the tenant."""
    limits: Limits


class ApiKey(Struct, frozen=True, gc=False):
    """A key as the configuration keeps it: never the secret itself."""

    id: str
    salt: bytes
    digest: bytes
    """SHA-256 over salt + secret."""
    expires: datetime | None = None
    limits: Limits | None = None


class Tenant(Struct, frozen=True):
    """A department or application with its own keys, models and budgets (R29)."""

    id: str
    models: tuple[str, ...]
    """Allowed model names, `*` and `?` as in a shell. Matched against the alias asked for and the physical model served."""
    priority: Priority
    limits: Limits
    per_model: dict[str, Limits]

    def priority_of(self, asked: Priority | None) -> Priority:
        """The priority of one request: what the client asked for, but never above the tenant's own."""
        return self.priority if asked is None or _RANK[asked] < _RANK[self.priority] else asked

    def may_use(self, model: str) -> bool:
        """Whether one of the allowed patterns matches the name."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)
