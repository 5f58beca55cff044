"""Explains in words why a rule matched a request or not.

The compiled condition decides whether a part holds; this module only describes it.
"""

from msgspec import Struct

from din_extproc.domain.price import UNITS
from din_extproc.route.expression import Facts, describe_failure
from din_extproc.route.rules import KnownNames, RuleCondition, TokenRange, compile_condition


class RuleEvaluation(Struct, frozen=True):
    """The evaluation of one rule."""

    rule: str
    """"" for a pool's default after all rules."""
    pool: str
    matched: bool
    reasons: tuple[str, ...]
    """The conditions that the request does not meet; empty when the rule matched."""


def describe_unmet(condition: RuleCondition, facts: Facts) -> tuple[str, ...]:
    """Return a description of each part of a condition that the request does not meet."""
    return tuple(text for part, text in _describe_parts(condition, facts) if not _is_met(part, facts))


def _is_met(condition: RuleCondition, facts: Facts) -> bool:
    matches, _ = compile_condition(condition, (), KnownNames(_collect_tenants(condition), ()))
    return matches(facts)


def _collect_tenants(condition: RuleCondition) -> frozenset[str]:
    nested = (*condition.any, *condition.all, *([] if condition.negated is None else [condition.negated]))
    return frozenset(condition.tenant).union(*map(_collect_tenants, nested))


def _describe_parts(condition: RuleCondition, facts: Facts) -> list[tuple[RuleCondition, str]]:
    """Split a condition into its fields, each with its description when it does not hold."""
    intent, tenant = facts.intent, facts.tenant
    parts = [
        (RuleCondition(path=condition.path), f"the path is {intent.operation.value}"),
        (RuleCondition(estimated_tokens=condition.estimated_tokens), _describe_length(condition.estimated_tokens, intent.estimate.tokens)),
        (
            RuleCondition(timeout_ms=condition.timeout_ms),
            "it has no deadline" if intent.timeout_ms is None else f"its deadline is {intent.timeout_ms} ms",
        ),
        (
            RuleCondition(budget_tokens=condition.budget_tokens),
            "it has no budget in tokens" if intent.budget_tokens is None else f"its budget is {intent.budget_tokens} tokens",
        ),
        (
            RuleCondition(budget_cost=condition.budget_cost),
            "it has no budget in money" if intent.budget_cost is None else f"its budget is {intent.budget_cost / UNITS:g}",
        ),
        (RuleCondition(model=condition.model), f"the name is {facts.model!r}, not {' or '.join(condition.model)}"),
        (RuleCondition(tenant=condition.tenant), f"the tenant is {tenant.id}"),
        (RuleCondition(priority=condition.priority), f"the priority is {tenant.priority_of(intent.priority).value}"),
        (RuleCondition(stream=condition.stream), f"it {'is' if intent.stream else 'is not'} a stream"),
        (RuleCondition(cel=condition.cel), _describe_expression(condition.cel, facts)),
    ]
    parts += [
        (RuleCondition(header={name: wanted}), f"{name} is {facts.headers[name]!r}" if name in facts.headers else f"{name} is not there")
        for name, wanted in condition.header.items()
    ]
    if condition.any:
        reasons = "; ".join(", ".join(describe_unmet(inner, facts)) for inner in condition.any)
        parts.append((RuleCondition(any=condition.any), f"none of its alternatives holds: {reasons}"))
    parts += [(RuleCondition(all=(inner,)), ", ".join(describe_unmet(inner, facts))) for inner in condition.all]
    if condition.negated is not None:
        parts.append((RuleCondition(negated=condition.negated), "its excluded condition holds"))
    nothing = RuleCondition()
    return [(part, text) for part, text in parts if part != nothing]


def _describe_expression(source: str, facts: Facts) -> str:
    failed = describe_failure(source, facts) if source else ""
    return f"fails ({failed}): {source}" if failed else f"not true: {source}"


def _describe_length(wanted: TokenRange | None, tokens: int) -> str:
    if wanted is None:
        return ""
    bounds = [f"at least {wanted.min_tokens}"] if wanted.min_tokens else []
    bounds += [] if wanted.max_tokens is None else [f"at most {wanted.max_tokens}"]
    return f"the prompt has about {tokens} tokens, not {' and '.join(bounds)}"
