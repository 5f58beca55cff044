"""The error for a tenant that the configuration does not have, shared by all commands.

Rule: the message suggests the closest name, or lists some that exist.
"""

from din_extproc.route.flaw import did_you_mean
from din_extproc.settings.settings import Settings

_MAX_LISTED = 10


class UnknownTenant(Exception):  # noqa: N818 - it says who the tenant is
    """The configuration has no such tenant."""


def unknown_tenant_message(settings: Settings, tenant: str) -> str:
    """Return the error message for a name that no tenant has."""
    known = [each.id for each in settings.tenants]
    more = ", ..." if len(known) > _MAX_LISTED else ""
    hint = did_you_mean(tenant, known) or f"there are: {', '.join(known[:_MAX_LISTED])}{more}"
    return f"no tenant is called {tenant!r}; {hint}"
