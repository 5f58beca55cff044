"""Rule conditions (R05) as data, and their compilation to closures that look at nothing but what they were given.

Rule: all fields of one condition must hold; an empty condition is no condition and is refused.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase, translate
from re import compile as compile_pattern

from msgspec import Struct

from din_extproc.domain.request import Operation, Priority
from din_extproc.route.expression import FUNCTIONS, VARIABLES, BadExpression, Facts, Matches, compile_expression
from din_extproc.route.flaw import Flaw, Place, did_you_mean


class TokenRange(Struct, frozen=True, gc=False):
    """Bounds on the prompt's estimated tokens; of a list of inputs or documents, on those of all together. None: no such bound."""

    gt: int | None = None
    ge: int | None = None
    lt: int | None = None
    le: int | None = None

    @property
    def lowest(self) -> int:
        """The least number of tokens inside."""
        return max(0, -1 if self.gt is None else self.gt + 1, self.ge or 0)

    @property
    def highest(self) -> int | None:
        """The largest number of tokens inside, None without an upper bound."""
        bounds = [bound for bound in (None if self.lt is None else self.lt - 1, self.le) if bound is not None]
        return min(bounds) if bounds else None


class RuleCondition(Struct, frozen=True, kw_only=True):
    """When a rule applies. None and empty fields ask for nothing."""

    always: bool = False
    path: tuple[Operation, ...] = ()
    estimated_tokens: TokenRange | None = None
    header: dict[str, tuple[str, ...] | bool] = {}
    """Name in lower case -> one of these values exactly; True: any value; False: the header is absent."""
    model: tuple[str, ...] = ()
    """The name the client asked for: patterns, `*` and `?` as in a shell."""
    tenant: tuple[str, ...] = ()
    priority: tuple[Priority, ...] = ()
    stream: bool | None = None
    any: "tuple[RuleCondition, ...]" = ()
    all: "tuple[RuleCondition, ...]" = ()
    negated: "RuleCondition | None" = None
    """Written `not`."""
    cel: str = ""


class Rule(Struct, frozen=True):
    """Requests that meet the condition go to the pool; when it can't answer, to the fallback."""

    id: str
    when: RuleCondition
    pool: str
    fallback: str = ""


class Known(Struct, frozen=True):
    """What conditions may refer to."""

    tenants: Collection[str]
    names: Collection[str]
    """Aliases and physical models."""


def thresholds(conditions: Iterable[RuleCondition]) -> frozenset[int]:
    """Token counts at which one of the conditions turns. Those inside CEL expressions are not known."""
    found: set[int] = set()
    for condition in conditions:
        if condition.estimated_tokens is not None:
            found |= {condition.estimated_tokens.lowest, (condition.estimated_tokens.highest or 0) + 1} - {0, 1}
        found |= thresholds((*condition.any, *condition.all, *([] if condition.negated is None else [condition.negated])))
    return frozenset(found)


def compile_condition(condition: RuleCondition, place: Place, known: Known) -> tuple[Matches, list[Flaw]]:
    """The condition as one function, and every flaw in it. A flawed condition matches nothing."""
    flaws: list[Flaw] = []
    parts = [*_on_intent(condition, place, known, flaws), *_on_request(condition, place, known, flaws)]
    for name, nested, joined in (("any", condition.any, _any_of), ("all", condition.all, _all_of)):
        if nested:
            compiled = [compile_condition(inner, (*place, name, index), known) for index, inner in enumerate(nested)]
            flaws += [flaw for _, found in compiled for flaw in found]
            parts.append(joined(tuple(matches for matches, _ in compiled)))
    if condition.negated is not None:
        inner, found = compile_condition(condition.negated, (*place, "not"), known)
        flaws += found
        parts.append(lambda facts: not inner(facts))
    if condition.cel:
        expression = compile_expression(condition.cel)
        if isinstance(expression, BadExpression):
            where = f" (line {expression.line}, column {expression.column} of the expression)" if expression.line else ""
            flaws.append(Flaw((*place, "cel"), expression.message + where, _known_names(expression)))
        else:
            parts.append(expression)
    if condition.always:
        parts.append(always)
    if not parts and not flaws:
        flaws.append(Flaw(place, "a condition that asks for nothing", "write `when: always` for a rule that takes everything"))
    return (_all_of(tuple(parts)) if all(flaw.warning for flaw in flaws) else _never), flaws


def _on_intent(condition: RuleCondition, place: Place, known: Known, flaws: list[Flaw]) -> list[Matches]:
    parts: list[Matches] = []
    if condition.path:
        operations = frozenset(condition.path)
        if Operation.MODELS in operations:
            flaws.append(Flaw((*place, "path"), f"{Operation.MODELS.value} is answered by the gateway and never routed"))
        parts.append(lambda facts: facts.intent.operation in operations)
    if condition.estimated_tokens is not None:
        low, high = condition.estimated_tokens.lowest, condition.estimated_tokens.highest
        if high is not None and low > high:
            flaws.append(Flaw((*place, "estimated_tokens"), "no number of tokens is inside these bounds"))
        parts.append(_at_least(low) if high is None else _between(low, high))
    if condition.stream is not None:
        stream = condition.stream
        parts.append(lambda facts: facts.intent.stream is stream)
    if condition.model:
        flaws += dead_patterns(condition.model, (*place, "model"), known.names)
        pattern = compile_pattern("|".join(map(translate, condition.model))).match
        parts.append(lambda facts: pattern(facts.model) is not None)
    return parts


def _on_request(condition: RuleCondition, place: Place, known: Known, flaws: list[Flaw]) -> list[Matches]:
    parts: list[Matches] = [_header(name, wanted) for name, wanted in condition.header.items()]
    if condition.tenant:
        ids = frozenset(condition.tenant)
        flaws += [
            Flaw((*place, "tenant"), f"no tenant is called {name!r}", did_you_mean(name, known.tenants), missing=("tenants", name))
            for name in condition.tenant
            if name not in known.tenants
        ]
        parts.append(lambda facts: facts.tenant.id in ids)
    if condition.priority:
        priorities = frozenset(condition.priority)
        parts.append(lambda facts: facts.tenant.priority_of(facts.intent.priority) in priorities)
    return parts


def _header(name: str, wanted: tuple[str, ...] | bool) -> Matches:  # noqa: FBT001 - as the configuration says it
    if isinstance(wanted, bool):
        return lambda facts: (name in facts.headers) is wanted
    if len(wanted) == 1:
        value = wanted[0]
        return lambda facts: facts.headers.get(name) == value
    values = frozenset(wanted)
    return lambda facts: facts.headers.get(name) in values


def _at_least(low: int) -> Matches:
    return lambda facts: facts.intent.estimate.tokens >= low


def _between(low: int, high: int) -> Matches:
    return lambda facts: low <= facts.intent.estimate.tokens <= high


def _any_of(parts: tuple[Matches, ...]) -> Matches:
    def matches(facts: Facts) -> bool:
        for part in parts:  # noqa: SIM110 - a generator costs more than the conditions
            if part(facts):
                return True
        return False

    return matches


def _all_of(parts: tuple[Matches, ...]) -> Matches:
    if len(parts) == 1:
        return parts[0]

    def matches(facts: Facts) -> bool:
        for part in parts:  # noqa: SIM110 - a generator costs more than the conditions
            if not part(facts):
                return False
        return True

    return matches


def always(facts: Facts) -> bool:  # noqa: ARG001 - the shape of a condition
    """The condition that everything meets."""
    return True


def _never(facts: Facts) -> bool:  # noqa: ARG001 - the shape of a condition
    return False


def _known_names(expression: BadExpression) -> str:
    return f"variables: {', '.join(VARIABLES)}; functions: {', '.join(FUNCTIONS)}" if expression.unknown else ""


def dead_patterns(patterns: tuple[str, ...], place: Place, names: Collection[str]) -> list[Flaw]:
    """A warning for each pattern that matches neither an alias nor a model."""
    return [
        Flaw(place, f"{pattern!r} matches no model and no alias", did_you_mean(pattern, names), missing=("models", pattern), warning=True)
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
