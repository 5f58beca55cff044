"""The input of decisions: one immutable view of the configuration, replaced as a whole when it changes.

Rule: nothing in a view changes after it was made; it may remember what it computed. A decision that began with one view ends with it.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct, field

from din_extproc.admit.identities import Identities
from din_extproc.admit.keys import Authenticated, KeyRing
from din_extproc.admit.ledger import Claim
from din_extproc.admit.reservation import compute_reservation
from din_extproc.domain.node import Pool
from din_extproc.domain.price import NO_PRICES, PriceList
from din_extproc.domain.request import BUILT_IN, Estimate, Intent, Metering, Operation, Priority
from din_extproc.domain.spending import SpendingBudgets
from din_extproc.domain.tenant import Budget, GlobalLimits, OnSensitive, RateLimits, ScopeLimits
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.openai import Prompt
from din_extproc.route.table import RouteTable
from din_extproc.screen.find import Screen


class TokenCounter(Protocol):
    """A model's own tokenizer."""

    async def count(self, prompt: Prompt, estimate: Estimate, calibrator: TokenCalibrator) -> Estimate:
        """The exact number of tokens; the estimate itself when counting fails."""


class ModelFacts(Struct, frozen=True):
    """The properties of one physical model."""

    output_tokens_default: int = 256
    boundaries: tuple[int, ...] = ()
    """Prompt sizes at which routing decides otherwise: thresholds of rules and lengths of nodes."""
    counter: TokenCounter | None = None
    media_tokens: int = TokenCalibrator().media_tokens
    """One image, audio or file."""


NO_GLOBAL_LIMITS = GlobalLimits()
_REMEMBERED = 8192
UNLISTED = ""
"""Applies to all tenants that are not listed."""


class ScreeningPolicy(Struct, frozen=True):
    """The policy for sensitive data in prompts."""

    policy: OnSensitive
    screen: Screen


class ApplicableLimits(Struct, frozen=True, gc=False):
    """The budgets that one key's requests to one model are charged to."""

    budgets: tuple[Budget, ...]
    bucket: int | None
    """The smallest `tpm` among them."""


class DecisionView(Struct, frozen=True):
    """Routes, keys and facts of one configuration."""

    table: RouteTable
    keys: KeyRing
    models: Mapping[str, ModelFacts]
    body_limit: int
    """The largest plain body, in bytes."""
    global_limits: GlobalLimits = NO_GLOBAL_LIMITS
    """The limits of all tenants together."""
    operations: Mapping[str, Operation] = BUILT_IN
    """Every operation that is served, by path."""
    health_paths: frozenset[str] = frozenset()
    """Paths of load balancers' health checks: answered without a key, and not counted."""
    session_header: str = ""
    """The request header that names a session, in lower case; "": none does."""
    identities: Identities | None = None
    """None: requests are authenticated by API key alone."""
    pools: Mapping[str, Pool] = {}
    """By name."""
    prices: PriceList = NO_PRICES
    budgets: SpendingBudgets | None = None
    """None: there are none."""
    screenings: Mapping[str, ScreeningPolicy] = {}
    """By tenant, `UNLISTED` for tenants that are not listed; prompts of other tenants are not checked."""
    pool_screenings: Mapping[str, ScreeningPolicy] = {}
    """Likewise by pool: applied before a prompt goes there."""
    applicable_limits: dict[tuple[str, ...], ApplicableLimits] = field(default_factory=dict)
    """The latest ones, by scope, tenant, key, model and class."""


_UNKNOWN = ModelFacts()
_NO_LIMITS = RateLimits()


def get_model_facts(view: DecisionView, model: str) -> ModelFacts:
    """Return the model's properties; defaults when it is unknown."""
    return view.models.get(model, _UNKNOWN)


def select_applicable_limits(who: Authenticated, model: str, priority: Priority, global_limits: GlobalLimits) -> ApplicableLimits:
    """The budgets of key, tenant, model and network that a request of this class is charged to: those that exist."""
    tenant, key = who.tenant, who.key
    enforced, scope = tenant.enforce, who.scope
    budgets = [Budget(f"{scope}tenant", tenant.limits, enforced=enforced)]
    if model in tenant.per_model:
        budgets.append(Budget(f"{scope}model:{model}", tenant.per_model[model], enforced=enforced))
    if priority in tenant.per_priority:
        budgets.append(Budget(f"{scope}priority:{priority}", tenant.per_priority[priority], enforced=enforced))
    if key.limits is not None:
        budgets.append(Budget(f"key:{key.id}", key.limits, enforced=enforced))
    if global_limits is not NO_GLOBAL_LIMITS:
        budgets += _make_scope_budgets("network", global_limits.total, priority, enforced=global_limits.enforce)
        if model in global_limits.per_model:
            budgets += _make_scope_budgets(
                f"network:model:{model}", global_limits.per_model[model], priority, enforced=global_limits.enforce
            )
    sizes = [budget.limits.tpm for budget in budgets if budget.limits.tpm is not None and budget.enforced]
    return ApplicableLimits(tuple(budgets), min(sizes, default=None))


def _get_applicable_limits(view: DecisionView, who: Authenticated, model: str, priority: Priority) -> ApplicableLimits:
    """Return the same object for the same tenant, key, model and class, so that what is derived from it is found quickly."""
    known, name = view.applicable_limits, (who.scope, who.tenant.id, who.key.id, model, priority)
    found = known.get(name)
    if found is None:
        if len(known) >= _REMEMBERED:
            known.clear()
        found = known[name] = select_applicable_limits(who, model, priority, view.global_limits)
    return found


def build_claim(
    view: DecisionView, request_id: str, intent: Intent, who: Authenticated, model: str, expected: int | None, lease_ms: int
) -> Claim:
    """Return a request's claim on the budgets that it is charged to.

    Args:
        view: The configuration.
        request_id: Names the claim.
        intent: What it wants.
        who: Who asks.
        model: The physical model that it goes to.
        expected: Tokens that one answer to this tenant usually stays under; None: not known.
        lease_ms: How long its slots stay taken without a renewal.
    """
    charged = _get_applicable_limits(view, who, model, who.tenant.priority_of(intent.priority))
    answers, default = intent.answers, get_model_facts(view, model).output_tokens_default
    likely = None if expected is None else expected * answers
    prompt = 0 if intent.operation.spec.metering is Metering.REQUEST else intent.prompt_tokens
    tokens = compute_reservation(prompt, intent.output_tokens, likely, default * answers, charged.bucket)
    return Claim(request_id, who.tenant.id, charged.budgets, tokens, lease_ms)


def _make_scope_budgets(scope: str, limits: ScopeLimits, priority: Priority, *, enforced: bool) -> list[Budget]:
    """The budgets that all tenants share under this scope."""
    found = [(scope, limits.limits), (f"{scope}:priority:{priority}", limits.per_priority.get(priority))]
    if priority is not Priority.CRITICAL:
        found.append((f"{scope}:below_critical", limits.non_critical_limits))
    return [Budget(name, limits, shared=True, enforced=enforced) for name, limits in found if limits is not None and limits != _NO_LIMITS]
