"""The whole of `din.yaml`: which sections there are.

Rule: a section stands here when something reads it; what is not built yet is an unknown field.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from din_extproc.settings.audit import AuditSection
from din_extproc.settings.catalog import CatalogSection
from din_extproc.settings.envoy import EnvoySection, off_is_none
from din_extproc.settings.gateway import FailOpen, Gateway, Store
from din_extproc.settings.health import HealthSection
from din_extproc.settings.pools import PoolSection
from din_extproc.settings.routes import AliasSection, RuleSection
from din_extproc.settings.section import AsTuple, ModelName, Name, NameIfAny, Section, Text
from din_extproc.settings.sensitive import SensitivePatterns
from din_extproc.settings.telemetry import Telemetry
from din_extproc.settings.tenants import CommonsSection, Defaults, TenantSection
from din_extproc.settings.verification import Verification


class DinYaml(Section):
    """The file, section by section."""

    version: Literal[1]
    network: NameIfAny = ""
    """Gateways of different networks never share nodes or counters, even over one Redis."""
    gateway: Gateway = Gateway()
    store: Store = Store()
    catalog: CatalogSection | None = None
    aliases: dict[ModelName, AliasSection] = Field(default_factory=dict)
    pools: dict[Name, PoolSection] = Field(default_factory=dict)
    rules: Annotated[tuple[RuleSection, ...], AsTuple] = ()
    tenants: Annotated[tuple[TenantSection, ...], AsTuple] = ()
    keys_file: Text | None = None
    """Where `din-extproc keys` keeps keys, relative to this file; None: all of them stand under their tenants."""
    defaults: Defaults = Defaults()
    limits: CommonsSection = CommonsSection()
    sensitive_data: SensitivePatterns = SensitivePatterns()
    health: HealthSection = HealthSection()
    envoy: EnvoySection = EnvoySection()
    telemetry: Telemetry | None = None
    """None: traces and metrics are not pushed."""
    audit: AuditSection | None = None
    verification: Verification | None = None
    """None: nothing is recorded."""
    fail_open: Annotated[FailOpen | None, BeforeValidator(off_is_none)] = None
