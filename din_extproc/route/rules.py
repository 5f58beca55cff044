"""Rule conditions as data, and their compilation to closures.

All fields of a condition must hold; an empty condition is refused.
"""

from collections.abc import Callable, Collection, Iterable
from fnmatch import translate
from operator import attrgetter
from re import compile as compile_pattern

from msgspec import Struct

from din_extproc.domain.request import Intent, Operation, Priority
from din_extproc.domain.tenant import matches_pattern
from din_extproc.route.expression import FUNCTIONS, VARIABLES, BadExpression, Facts, Matches, compile_expression
from din_extproc.route.flaw import Flaw, Place, did_you_mean


class TokenRange(Struct, frozen=True, gc=False):
    """Bounds on the prompt's estimated tokens, over all inputs or documents together. None: no bound."""

    gt: int | None = None
    ge: int | None = None
    lt: int | None = None
    le: int | None = None

    @property
    def min_tokens(self) -> int:
        """The smallest number of tokens inside the bounds."""
        return max(0, -1 if self.gt is None else self.gt + 1, self.ge or 0)

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens inside the bounds, None without an upper bound."""
        bounds = [bound for bound in (None if self.lt is None else self.lt - 1, self.le) if bound is not None]
        return min(bounds) if bounds else None


class RuleCondition(Struct, frozen=True, kw_only=True):
    """When a rule applies. None and empty fields are not checked."""

    always: bool = False
    path: tuple[str, ...] = ()
    """Canonical paths of operations."""
    estimated_tokens: TokenRange | None = None
    timeout_ms: TokenRange | None = None
    """The client's deadline in milliseconds; a request without one counts as longer than every bound."""
    budget_tokens: TokenRange | None = None
    """The most tokens that the client wants to spend; a request that does not say counts likewise."""
    budget_cost: TokenRange | None = None
    """Likewise in money, in 10**-9 of the currency."""
    header: dict[str, tuple[str, ...] | bool] = {}
    """Header name in lower case -> one of these exact values; True: any value; False: absent."""
    model: tuple[str, ...] = ()
    """Patterns for the requested name, with `*` and `?` as in a shell."""
    tenant: tuple[str, ...] = ()
    priority: tuple[Priority, ...] = ()
    stream: bool | None = None
    any: "tuple[RuleCondition, ...]" = ()
    all: "tuple[RuleCondition, ...]" = ()
    negated: "RuleCondition | None" = None
    """`not` in the configuration."""
    cel: str = ""

    def operations(self) -> frozenset[str]:
        """Every path that the condition names; of `any` and `all` too, of `not` none."""
        return frozenset(self.path).union(*(inner.operations() for inner in (*self.any, *self.all)))


class Rule(Struct, frozen=True):
    """Sends matching requests to the pool, or to the fallback when the pool can't serve them."""

    id: str
    when: RuleCondition
    pool: str
    fallback: str = ""
    stays_on_site: bool = False
    """Neither of the two may be a remote API."""
    overflow: bool = False
    """The fallback also takes what the pool has no room for, or can't answer in time."""


class KnownNames(Struct, frozen=True):
    """Names that conditions may refer to."""

    tenants: Collection[str]
    names: Collection[str]
    """Aliases and physical models."""
    operations: Collection[str] | None = None
    """Paths of operations. None: not checked."""


def find_thresholds(conditions: Iterable[RuleCondition]) -> frozenset[int]:
    """Return the token counts at which one of the conditions changes, except those inside CEL expressions."""
    found: set[int] = set()
    for condition in conditions:
        if condition.estimated_tokens is not None:
            found |= {condition.estimated_tokens.min_tokens, (condition.estimated_tokens.max_tokens or 0) + 1} - {0, 1}
        found |= find_thresholds((*condition.any, *condition.all, *([] if condition.negated is None else [condition.negated])))
    return frozenset(found)


def compile_condition(condition: RuleCondition, place: Place, known: KnownNames) -> tuple[Matches, list[Flaw]]:
    """Compile a condition to one function, and return all its flaws. A flawed condition matches nothing."""
    flaws: list[Flaw] = []
    parts = [*_match_intent(condition, place, known, flaws), *_match_request(condition, place, known, flaws)]
    for name, nested, joined in (("any", condition.any, _match_any), ("all", condition.all, _match_all)):
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
            flaws.append(Flaw((*place, "cel"), expression.message + where, _list_known_names(expression)))
        else:
            parts.append(expression)
    if condition.always:
        parts.append(match_always)
    if not parts and not flaws:
        flaws.append(Flaw(place, "the condition is empty", "write `when: always` for a rule that takes everything"))
    return (_match_all(tuple(parts)) if all(flaw.warning for flaw in flaws) else _match_never), flaws


def _match_intent(condition: RuleCondition, place: Place, known: KnownNames, flaws: list[Flaw]) -> list[Matches]:
    parts: list[Matches] = []
    if condition.path:
        operations = frozenset(condition.path)
        if Operation.MODELS in operations:
            flaws.append(Flaw((*place, "path"), f"{Operation.MODELS.value} is answered by the gateway and never routed"))
        routed = known.operations
        unknown = [] if routed is None else [path for path in condition.path if path not in routed]
        flaws += [Flaw((*place, "path"), f"{path!r} is not a path that is routed", did_you_mean(path, routed or ())) for path in unknown]
        parts.append(lambda facts: facts.intent.operation in operations)
    if condition.estimated_tokens is not None:
        low, high = condition.estimated_tokens.min_tokens, condition.estimated_tokens.max_tokens
        if high is not None and low > high:
            flaws.append(Flaw((*place, "estimated_tokens"), "no number of tokens is inside these bounds"))
        parts.append(_match_at_least(low) if high is None else _match_between(low, high))
    for name, bounds in (
        ("timeout_ms", condition.timeout_ms),
        ("budget_tokens", condition.budget_tokens),
        ("budget_cost", condition.budget_cost),
    ):
        if bounds is not None:
            if bounds.max_tokens is not None and bounds.min_tokens > bounds.max_tokens:
                flaws.append(Flaw((*place, name), "nothing is inside these bounds"))
            parts.append(_match_limit(attrgetter(name), bounds.min_tokens, bounds.max_tokens))
    if condition.stream is not None:
        stream = condition.stream
        parts.append(lambda facts: facts.intent.stream is stream)
    if condition.model:
        flaws += find_dead_patterns(condition.model, (*place, "model"), known.names)
        pattern = compile_pattern("|".join(translate(pattern.replace("[", "[[]")) for pattern in condition.model)).match
        parts.append(lambda facts: pattern(facts.model) is not None)
    return parts


def _match_request(condition: RuleCondition, place: Place, known: KnownNames, flaws: list[Flaw]) -> list[Matches]:
    parts: list[Matches] = [_match_header(name, wanted) for name, wanted in condition.header.items()]
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


def _match_header(name: str, wanted: tuple[str, ...] | bool) -> Matches:  # noqa: FBT001 - as the configuration says it
    if isinstance(wanted, bool):
        return lambda facts: (name in facts.headers) is wanted
    if len(wanted) == 1:
        value = wanted[0]
        return lambda facts: facts.headers.get(name) == value
    values = frozenset(wanted)
    return lambda facts: facts.headers.get(name) in values


def _match_at_least(low: int) -> Matches:
    return lambda facts: facts.intent.estimate.tokens >= low


def _match_between(low: int, high: int) -> Matches:
    return lambda facts: low <= facts.intent.estimate.tokens <= high


def _match_limit(read: Callable[[Intent], int | None], least: int, most: int | None) -> Matches:
    """Match a limit that the client sets; None counts as above every bound."""

    def matches(facts: Facts) -> bool:
        limit = read(facts.intent)
        if limit is None:
            return most is None
        return limit >= least and (most is None or limit <= most)

    return matches


def _match_any(parts: tuple[Matches, ...]) -> Matches:
    def matches(facts: Facts) -> bool:
        for part in parts:  # noqa: SIM110 - a generator costs more than the conditions
            if part(facts):
                return True
        return False

    return matches


def _match_all(parts: tuple[Matches, ...]) -> Matches:
    if len(parts) == 1:
        return parts[0]

    def matches(facts: Facts) -> bool:
        for part in parts:  # noqa: SIM110 - a generator costs more than the conditions
            if not part(facts):
                return False
        return True

    return matches


def match_always(facts: Facts) -> bool:  # noqa: ARG001 - the shape of a condition
    """Match every request."""
    return True


def _match_never(facts: Facts) -> bool:  # noqa: ARG001 - the shape of a condition
    return False


def _list_known_names(expression: BadExpression) -> str:
    return f"variables: {', '.join(VARIABLES)}; functions: {', '.join(FUNCTIONS)}" if expression.unknown else ""


def find_dead_patterns(patterns: tuple[str, ...], place: Place, names: Collection[str]) -> list[Flaw]:
    """Return a warning for each pattern that matches neither an alias nor a model."""
    return [
        Flaw(place, f"{pattern!r} matches no model and no alias", did_you_mean(pattern, names), missing=("models", pattern), warning=True)
        for pattern in patterns
        if not any(matches_pattern(name, pattern) for name in names)
    ]
