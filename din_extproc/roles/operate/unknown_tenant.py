"""A tenant that the configuration does not have, as every command says it.

Rule: the name that was meant is guessed; if none is close, some that there are stand beside it.
"""

from din_extproc.route.flaw import did_you_mean
from din_extproc.settings.settings import Settings

_SHOWN = 10


class UnknownTenant(Exception):  # noqa: N818 - it says who the tenant is
    """No tenant is called so."""


def stranger(settings: Settings, tenant: str) -> str:
    """What is said of a name that no tenant has."""
    known = [each.id for each in settings.tenants]
    more = ", ..." if len(known) > _SHOWN else ""
    hint = did_you_mean(tenant, known) or f"there are: {', '.join(known[:_SHOWN])}{more}"
    return f"no tenant is called {tenant!r}; {hint}"
