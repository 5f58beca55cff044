"""What decisions read: one immutable view of the configuration, swapped whole when it changes.

Rule: nothing in a view changes after it was made; a decision that began with one view ends with it.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from din_extproc.admit.keys import Authenticated, KeyRing
from din_extproc.domain.request import Estimate
from din_extproc.domain.tenant import Budget
from din_extproc.intent.estimate import Gauge
from din_extproc.intent.openai import Prompt
from din_extproc.route.table import RouteTable


class TokenCounter(Protocol):
    """A model's own tokenizer."""

    async def count(self, prompt: Prompt, estimate: Estimate, gauge: Gauge) -> Estimate:
        """The exact number of tokens; the estimate itself when counting fails."""


class ModelFacts(Struct, frozen=True):
    """What is known of one physical model."""

    output_tokens_default: int = 256
    boundaries: tuple[int, ...] = ()
    """Prompt sizes at which routing decides otherwise: thresholds of rules and lengths of nodes."""
    counter: TokenCounter | None = None
    media_tokens: int = Gauge().media_tokens
    """One image, audio or file."""


class View(Struct, frozen=True):
    """Routes, keys and facts of one configuration."""

    table: RouteTable
    keys: KeyRing
    models: Mapping[str, ModelFacts]
    body_limit: int
    """The largest plain body, in bytes."""


_UNKNOWN = ModelFacts()


def facts(view: View, model: str) -> ModelFacts:
    """What the view knows of the model; defaults when it is unknown."""
    return view.models.get(model, _UNKNOWN)


class Purse(Struct, frozen=True, gc=False):
    """The budgets that one key's requests to one model are charged to."""

    budgets: tuple[Budget, ...]
    bucket: int | None
    """The smallest `tpm` among them."""


def purse(who: Authenticated, model: str) -> Purse:
    """The budgets of tenant, model and key, those that exist."""
    tenant, key = who.tenant, who.key
    budgets = [Budget("tenant", tenant.limits)]
    if model in tenant.per_model:
        budgets.append(Budget(f"model:{model}", tenant.per_model[model]))
    if key.limits is not None:
        budgets.append(Budget(f"key:{key.id}", key.limits))
    sizes = [budget.limits.tpm for budget in budgets if budget.limits.tpm is not None]
    return Purse(tuple(budgets), min(sizes, default=None))
