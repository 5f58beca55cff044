"""Why a rule took a request or did not, in words, for people who ask.

Rule: whether a condition holds is asked of the condition as it is compiled for service; here it is only said.
"""

from msgspec import Struct

from din_extproc.route.expression import Facts, failure
from din_extproc.route.rules import Known, RuleCondition, TokenRange, compile_condition


class RuleEvaluation(Struct, frozen=True):
    """One rule that was looked at."""

    rule: str
    """"" for a pool that takes what no rule took."""
    pool: str
    took: bool
    why: tuple[str, ...]
    """What spoke against it; empty when it took the request."""


def unmet(condition: RuleCondition, facts: Facts) -> tuple[str, ...]:
    """Each part of a condition that the request does not meet."""
    return tuple(said for part, said in _parts(condition, facts) if not _holds(part, facts))


def _holds(condition: RuleCondition, facts: Facts) -> bool:
    matches, _ = compile_condition(condition, (), Known(_tenants(condition), ()))
    return matches(facts)


def _tenants(condition: RuleCondition) -> frozenset[str]:
    nested = (*condition.any, *condition.all, *([] if condition.negated is None else [condition.negated]))
    return frozenset(condition.tenant).union(*map(_tenants, nested))


def _parts(condition: RuleCondition, facts: Facts) -> list[tuple[RuleCondition, str]]:
    """Each field alone, with what there is to say when it does not hold."""
    intent, tenant = facts.intent, facts.tenant
    parts = [
        (RuleCondition(path=condition.path), f"the path is {intent.operation.value}"),
        (RuleCondition(estimated_tokens=condition.estimated_tokens), _length(condition.estimated_tokens, intent.estimate.tokens)),
        (RuleCondition(model=condition.model), f"the name is {facts.model!r}, not {' or '.join(condition.model)}"),
        (RuleCondition(tenant=condition.tenant), f"the tenant is {tenant.id}"),
        (RuleCondition(priority=condition.priority), f"the priority is {tenant.priority_of(intent.priority).value}"),
        (RuleCondition(stream=condition.stream), f"it {'is' if intent.stream else 'is not'} a stream"),
        (RuleCondition(cel=condition.cel), _expression(condition.cel, facts)),
    ]
    parts += [
        (RuleCondition(header={name: wanted}), f"{name} is {facts.headers[name]!r}" if name in facts.headers else f"{name} is not there")
        for name, wanted in condition.header.items()
    ]
    if condition.any:
        reasons = "; ".join(", ".join(unmet(inner, facts)) for inner in condition.any)
        parts.append((RuleCondition(any=condition.any), f"none of its alternatives holds: {reasons}"))
    parts += [(RuleCondition(all=(inner,)), ", ".join(unmet(inner, facts))) for inner in condition.all]
    if condition.negated is not None:
        parts.append((RuleCondition(negated=condition.negated), "what it excludes is so"))
    nothing = RuleCondition()
    return [(part, said) for part, said in parts if part != nothing]


def _expression(source: str, facts: Facts) -> str:
    failed = failure(source, facts) if source else ""
    return f"fails ({failed}): {source}" if failed else f"not true: {source}"


def _length(asked: TokenRange | None, tokens: int) -> str:
    if asked is None:
        return ""
    bounds = [f"at least {asked.lowest}"] if asked.lowest else []
    bounds += [] if asked.highest is None else [f"at most {asked.highest}"]
    return f"the prompt has about {tokens} tokens, not {' and '.join(bounds)}"
