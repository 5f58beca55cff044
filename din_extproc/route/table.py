"""The immutable route table, which maps one intent to a pool.

A client gets the model that it names or, marked as degraded, a fallback that its tenant may use; never silently another one.

The name, or the name without its last `@constraint`, is an alias or a physical model (one that a pool serves), or it matches an alias with
`*`: the one with the most other characters. A trailing `[1m]`, by which Claude Code asks for a long context, is dropped where no name has
it. Nothing else is stripped or guessed: `vllm/big` is unknown unless an alias has that name. The name stands for a set of physical models,
without those that the tenant may not use. The first rule wins whose pool serves one of them, serves the operation, has a node of an
acceptable version (as far as its nodes are known) and whose condition holds. Without such a rule it is the first such pool, in the order of
the alias's models, then of the configuration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from din_extproc.domain.node import Pool
from din_extproc.domain.request import Intent, Operation, RequestHead
from din_extproc.domain.tenant import Tenant, matches_pattern
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.route.aliases import EVERY_MODEL
from din_extproc.route.expression import Facts, Matches
from din_extproc.route.rule_evaluation import RuleEvaluation, describe_unmet
from din_extproc.route.rules import RuleCondition
from din_extproc.route.versions import ANY, Constraint, combine, parse_constraint

VersionsOf = Callable[[str], frozenset[str]]
"""Returns the model versions that a pool's nodes serve now, by the pool's name; empty when it has no nodes."""

_MAX_PATTERNS = 1024
_MAX_QUOTED = 80
_LONG_CONTEXT = "[1m]"


class CompiledRule(Struct, frozen=True):
    """A rule with its pools and compiled condition."""

    id: str
    """"" for a pool's default after all rules."""
    matches: Matches
    pool: Pool
    fallback: Pool | None
    condition: RuleCondition = RuleCondition(always=True)
    """The source of `matches`."""
    overflow: bool = False
    """The fallback also takes what the pool has no room for, or can't answer in time."""


class RouteTarget(Struct, frozen=True):
    """The resolution of one name."""

    name: str
    alias: bool
    models: dict[str, Constraint]
    """Physical model -> the alias's version constraint on it, the preferred model first."""
    rules: tuple[CompiledRule, ...]
    """The rules whose pool serves one of the models, in order; then each such pool as a default."""


class Routed(Struct, frozen=True, gc=False):
    """The route of a request."""

    rule: str
    """The rule's id, "" for a default."""
    name: str
    """The requested alias or physical model without a version constraint."""
    model: str
    """The physical model."""
    pool: Pool
    versions: Constraint
    """The constraint on the version of a node of `pool`."""
    fallback: Pool | None
    fallback_versions: Constraint
    """The constraint on the version of a node of `fallback`."""
    overflow: bool = False
    """Likewise of the rule."""


class ListedModel(Struct, frozen=True, gc=False):
    """A name that a tenant may request."""

    name: str
    models: tuple[str, ...]
    """The physical models of an alias; empty for a physical model."""
    pools: tuple[str, ...] = ()
    """The pools that may serve the tenant under this name."""

    @property
    def alias(self) -> bool:
        """Whether the name is an alias."""
        return bool(self.models)


class RouteTable:
    """An immutable route table; `compile_routes` builds it.

    Args:
        targets: Every name that can be requested.
        rules: All rules, in order.
    """

    __slots__ = ("_allowed", "_patterns", "_rules", "_targets")

    def __init__(self, targets: Mapping[str, RouteTarget], rules: Sequence[CompiledRule]) -> None:
        self._rules = tuple(rules)
        self._targets = dict(targets)
        patterns = sorted((name for name in targets if EVERY_MODEL in name), key=lambda name: (name.count(EVERY_MODEL) - len(name), name))
        self._patterns = tuple((name, targets[name]) for name in patterns)
        """Aliases with `*`, the most specific one first."""
        self._allowed: dict[tuple[str, ...], frozenset[str]] = {}
        """By patterns of names: tenants and tokens that have them may use these physical models."""

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The physical models of each name that stands for more than one."""
        return {name: tuple(target.models) for name, target in self._targets.items() if len(target.models) > 1}

    @property
    def fallbacks(self) -> tuple[tuple[Pool, Pool], ...]:
        """Each distinct pair of a pool and its fallback in the rules."""
        pairs = {(rule.pool.name, rule.fallback.name): (rule.pool, rule.fallback) for rule in self._rules if rule.fallback is not None}
        return tuple(pairs.values())

    def route(self, intent: Intent, tenant: Tenant, head: RequestHead, hour_utc: int, versions_of: VersionsOf) -> Routed | Refusal:
        """Return the route of a request, or a refusal.

        Args:
            intent: The request's intent.
            tenant: The authenticated tenant.
            head: Headers for rules that read them.
            hour_utc: 0-23, for rules that read the time of day.
            versions_of: Returns the versions in service now.
        """
        resolved = self._resolve(intent, tenant)
        if isinstance(resolved, Refusal):
            return resolved
        target, allowed, constraint = resolved
        facts = Facts(intent, tenant, head.headers, hour_utc, target.name)
        operation = intent.operation
        for rule in target.rules:
            pool = rule.pool
            served = pool.model in allowed and (pool.operations is None or operation in pool.operations)
            if served and _may_go(tenant, pool) and rule.matches(facts):
                versions = _combined_constraint(target, pool.model, constraint)
                if constraint is ANY or _has_version(versions_of(pool.name), versions):
                    fallback = _usable_fallback(
                        fallback=rule.fallback if _may_go(tenant, rule.fallback) else None,
                        operation=operation,
                        target=target,
                        allowed=allowed,
                        constraint=constraint,
                        versions_of=versions_of,
                    )
                    fallback_versions = ANY if fallback is None else _combined_constraint(target, fallback.model, constraint)
                    return Routed(
                        rule=rule.id,
                        name=target.name,
                        model=pool.model,
                        pool=pool,
                        versions=versions,
                        fallback=fallback,
                        fallback_versions=fallback_versions,
                        overflow=rule.overflow,
                    )
        return _refuse_unserved(target, intent, tenant, allowed=allowed, constraint=constraint, versions_of=versions_of)

    def evaluate_rules(
        self, intent: Intent, tenant: Tenant, head: RequestHead, hour_utc: int, versions_of: VersionsOf
    ) -> tuple[RuleEvaluation, ...]:
        """Evaluate every rule up to the one that matches, with the reasons why the others do not."""
        resolved = self._resolve(intent, tenant)
        if isinstance(resolved, Refusal):
            return ()
        target, allowed, constraint = resolved
        facts = Facts(intent, tenant, head.headers, hour_utc, target.name)
        evaluations = []
        concerned: dict[str, list[CompiledRule]] = {}
        for each in target.rules:  # for the model or the adapter of the rule's pool that the name stands for
            concerned.setdefault(each.id, []).append(each)
        own = (each for rule in self._rules for each in concerned.get(rule.id, [rule]))
        for rule in (*own, *concerned.get("", ())):
            why = tuple(
                _find_objections(rule=rule, target=target, allowed=allowed, constraint=constraint, facts=facts, versions_of=versions_of)
            )
            evaluations.append(RuleEvaluation(rule.id, rule.pool.name, not why, why))
            if not why:
                break
        return tuple(evaluations)

    def models_for(self, tenant: Tenant, name: str = "") -> tuple[ListedModel, ...]:
        """Return every name that the tenant may request, aliases first, each group sorted; with a name, that one if it may be."""
        allowed = self._allowed_models(tenant)
        target, suffix = self._find_target(name)
        named = self._targets if not name else {} if target is None or suffix else {name: target}
        usable = [(each, target) for each, target in named.items() if any(_may_serve(rule, tenant, allowed) for rule in target.rules)]
        listed = (
            ListedModel(
                each,
                tuple(model for model in target.models if model in allowed) if target.alias else (),
                tuple(dict.fromkeys(rule.pool.name for rule in target.rules if _may_serve(rule, tenant, allowed))),
            )
            for each, target in usable
        )
        return tuple(sorted(listed, key=lambda entry: (not entry.alias, entry.name)))

    def rules_for(self, requested: str) -> tuple[CompiledRule, ...]:
        """Return the rules that may match a request for the name, in order, then its pools' defaults; none for an unknown name."""
        target, _ = self._find_target(requested)
        return () if target is None else target.rules

    def preferred_model(self, requested: str) -> str | None:
        """Return the preferred physical model of a name; None for an unknown name."""
        target, _ = self._find_target(requested)
        return None if target is None else next(iter(target.models))

    def _resolve(self, intent: Intent, tenant: Tenant) -> tuple[RouteTarget, frozenset[str], Constraint] | Refusal:
        """Return the name's target, the models that the tenant may use, and the client's version constraint."""
        target, suffix = self._find_target(intent.model)
        if target is None:
            return Refusal(RefusalCode.MODEL_NOT_FOUND, f"The model {_quote(intent.model)} does not exist.", param="model")
        allowed = self._allowed_models(tenant)
        if allowed.isdisjoint(target.models):
            return Refusal(RefusalCode.MODEL_NOT_ALLOWED, f"The key may not use the model {_quote(target.name)}.", param="model")
        if not suffix and not intent.version:
            return target, allowed, ANY
        constraint = _client_constraint(suffix, intent.version)
        return constraint if isinstance(constraint, Refusal) else (target, allowed, constraint)

    def _allowed_models(self, tenant: Tenant) -> frozenset[str]:
        """Return the physical models that the tenant may use under any name, and its token too."""
        allowed = self._matching_models(tenant.models)
        return allowed if tenant.narrowed_to is None else allowed & self._matching_models(tenant.narrowed_to)

    def _matching_models(self, patterns: tuple[str, ...]) -> frozenset[str]:
        found = self._allowed.get(patterns)
        if found is None:
            if len(self._allowed) >= _MAX_PATTERNS:  # patterns of tokens are without number
                self._allowed.clear()
            named = (target for name, target in self._targets.items() if any(matches_pattern(name, pattern) for pattern in patterns))
            found = self._allowed[patterns] = frozenset(model for target in named for model in target.models)
        return found

    def _find_target(self, requested: str) -> tuple[RouteTarget | None, str]:
        """Return the target, and the version constraint after the last `@` unless the whole name is known."""
        target = self._targets.get(requested)
        if target is not None:
            return target, ""
        name, _, suffix = requested.rpartition("@")
        if name in self._targets:
            return self._targets[name], suffix
        for pattern, matched in self._patterns:
            if matches_pattern(name or requested, pattern):
                return matched, suffix if name else ""
        return self._find_target(requested.removesuffix(_LONG_CONTEXT)) if requested.endswith(_LONG_CONTEXT) else (None, suffix)


def _find_objections(
    rule: CompiledRule, target: RouteTarget, allowed: frozenset[str], constraint: Constraint, facts: Facts, versions_of: VersionsOf
) -> Iterator[str]:
    """Yield the reasons against a rule in the order in which `route` checks them."""
    pool = rule.pool
    if pool.model not in target.models:
        yield f"its pool serves {pool.model}, which {_quote(target.name)} does not stand for"
        return
    if not _may_go(facts.tenant, pool):
        yield "its pool is a remote API, and the tenant's requests stay on the site"
    if pool.model not in allowed:
        yield f"the tenant may not use {pool.model}"
    if not pool.serves(facts.intent.operation):
        yield f"its pool does not serve {facts.intent.operation.value}"
    yield from describe_unmet(rule.condition, facts)
    versions = _combined_constraint(target, pool.model, constraint)
    if constraint is not ANY and not _has_version(versions_of(pool.name), versions):
        yield f"no node of its pool serves a version that meets {versions.text}"


def _usable_fallback(
    fallback: Pool | None,
    operation: Operation,
    target: RouteTarget,
    allowed: frozenset[str],
    constraint: Constraint,
    versions_of: VersionsOf,
) -> Pool | None:
    """Return the fallback, or None if the tenant, the operation or the client's version constraint excludes it."""
    if fallback is None or fallback.model not in allowed:
        return None
    if not fallback.serves(operation):
        return None
    if constraint is ANY:
        return fallback
    served = fallback.model in target.models and _has_version(
        versions_of(fallback.name), _combined_constraint(target, fallback.model, constraint)
    )
    return fallback if served else None


def _combined_constraint(target: RouteTarget, model: str, constraint: Constraint) -> Constraint:
    """Return the combined version constraint of alias and client; a model outside the target has none of the alias."""
    own = target.models.get(model, ANY)
    if constraint is ANY:
        return own
    if own is ANY:
        return constraint
    return combine(own.text, constraint.text) or constraint


def _has_version(offered: frozenset[str], versions: Constraint) -> bool:
    """Return whether a node may serve the version. A pool without nodes counts, so that its refusal names the reason."""
    return not offered or any(versions.allows(version) for version in offered)


def _client_constraint(suffix: str, header: str) -> Constraint | Refusal:
    """Return the client's version constraint: after the `@`, in the header, or both combined."""
    for text, param, where in ((suffix, "model", "after the @ of the model"), (header, "x-din-model-version", "in x-din-model-version")):
        if parse_constraint(text) is None:
            return Refusal(
                RefusalCode.INVALID_REQUEST, f"The text {where} is not a version constraint such as `>=2025.3,<2026`.", param=param
            )
    return combine(suffix, header) or Refusal(
        RefusalCode.INVALID_REQUEST, "The version constraints are too long.", param="x-din-model-version"
    )


def _may_serve(rule: CompiledRule, tenant: Tenant, allowed: frozenset[str]) -> bool:
    return rule.pool.model in allowed and _may_go(tenant, rule.pool)


def _may_go(tenant: Tenant, pool: Pool | None) -> bool:
    """Return whether requests of the tenant may go to the pool, as far as it leaves the site."""
    return not tenant.stays_on_site or pool is None or not pool.is_remote


def _refuse_unserved(
    target: RouteTarget, intent: Intent, tenant: Tenant, *, allowed: frozenset[str], constraint: Constraint, versions_of: VersionsOf
) -> Refusal:
    pools = [rule.pool for rule in target.rules if not rule.id and rule.pool.model in allowed and _may_go(tenant, rule.pool)]
    if not pools:
        message = f"The key may not use the model {_quote(target.name)}: its requests do not leave the site."
        return Refusal(RefusalCode.MODEL_NOT_ALLOWED, message, param="model")
    serving = [pool for pool in pools if pool.serves(intent.operation)]
    if not serving:
        return Refusal(
            RefusalCode.INVALID_REQUEST, f"The model {_quote(target.name)} does not serve {intent.operation.value}.", param="model"
        )
    offered = ", ".join(sorted({version for pool in serving for version in versions_of(pool.name)}))
    message = f"No node serves a version of {_quote(target.name)} that meets {constraint.text!r}; in service: {offered}."
    return Refusal(RefusalCode.VERSION_MISMATCH, message, param="x-din-model-version" if intent.version else "model")


def _quote(name: str) -> str:
    """Quote a client's text for a message: shortened, with control characters escaped."""
    return f"`{ascii(name[:_MAX_QUOTED])[1:-1]}`"
