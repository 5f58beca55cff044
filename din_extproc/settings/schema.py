"""The whole of `din.yaml`: which sections there are.

Rule: a section stands here when something reads it; what is not built yet is an unknown field.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from din_extproc.settings.audit import AuditSection
from din_extproc.settings.budgets import BudgetsSection
from din_extproc.settings.catalog import CatalogSection
from din_extproc.settings.envoy import EnvoySection, off_is_none
from din_extproc.settings.gateway import FailOpenSection, GatewaySection, StoreSection
from din_extproc.settings.health import HealthSection
from din_extproc.settings.identity import IdentitySection
from din_extproc.settings.operations import OwnOperations
from din_extproc.settings.pools import PoolSection
from din_extproc.settings.prices import PricesSection
from din_extproc.settings.routes import AliasSection, RuleSection
from din_extproc.settings.section import AliasName, AsTuple, Name, NameIfAny, Section, Text
from din_extproc.settings.sensitive import SensitivePatternsSection
from din_extproc.settings.telemetry import TelemetrySection
from din_extproc.settings.tenants import DefaultsSection, GlobalLimitsSection, TenantSection
from din_extproc.settings.verification import VerificationSection


class DinYaml(Section):
    """The file, section by section."""

    version: Literal[1]
    network: NameIfAny = ""
    """Gateways of different networks never share nodes or counters, even over one Redis."""
    gateway: GatewaySection = GatewaySection()
    store: StoreSection = StoreSection()
    catalog: CatalogSection | None = None
    aliases: dict[AliasName, AliasSection] = Field(default_factory=dict)
    """Names that clients use. In a name `*` stands for any characters; of several that match, the one with the most others applies."""
    operations: OwnOperations = Field(default_factory=dict)
    """Operations beside those that are built in, by path."""
    pools: dict[Name, PoolSection] = Field(default_factory=dict)
    rules: Annotated[tuple[RuleSection, ...], AsTuple] = ()
    tenants: Annotated[tuple[TenantSection, ...], AsTuple] = ()
    keys_file: Text | None = None
    """Where `din-extproc keys` keeps keys, relative to this file; None: all of them stand under their tenants."""
    identity: IdentitySection = IdentitySection()
    defaults: DefaultsSection = DefaultsSection()
    limits: GlobalLimitsSection = GlobalLimitsSection()
    prices: PricesSection | None = None
    """None: requests have no cost."""
    budgets: BudgetsSection = BudgetsSection()
    sensitive_data: SensitivePatternsSection = SensitivePatternsSection()
    health: HealthSection = HealthSection()
    envoy: EnvoySection = EnvoySection()
    telemetry: TelemetrySection | None = None
    """None: traces and metrics are not pushed."""
    audit: AuditSection | None = None
    verification: VerificationSection | None = None
    """None: nothing is recorded."""
    fail_open: Annotated[FailOpenSection | None, BeforeValidator(off_is_none)] = None
