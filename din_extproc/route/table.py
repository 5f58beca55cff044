"""Which pool serves an intent: an immutable table, asked once per request.

Rule: a client that names a model is served that model or, marked as degraded, a fallback that its tenant may use; never silently another.

How a name is read: the name as it stands, or without its last `@constraint`, is an alias or a physical model (one that a pool
serves). Nothing else is stripped or guessed: `vllm/big` is an unknown name unless an alias is called that. The name stands for a set
of physical models; those that the tenant may not use are out. The first rule whose pool serves one of the rest, serves the
operation, has a node of an acceptable version (as far as the pool's nodes are known) and whose condition holds, wins. Without
such a rule it is the first such pool: in the order of the alias's models, then of the configuration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from din_extproc.domain.node import Pool
from din_extproc.domain.request import Intent, Operation, RequestHead
from din_extproc.domain.tenant import Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.route.expression import Facts, Matches
from din_extproc.route.rule_evaluation import RuleEvaluation, unmet
from din_extproc.route.rules import RuleCondition
from din_extproc.route.versions import ANY, Constraint, combine, parse_constraint

VersionsOf = Callable[[str], frozenset[str]]
"""The model versions that a pool's nodes serve right now, by the pool's name; empty when it has none."""

_NOTHING: frozenset[str] = frozenset()
_SHOWN = 80


class CompiledRule(Struct, frozen=True):
    """A rule whose pools are at hand."""

    id: str
    """"" for a pool that takes what no rule took."""
    matches: Matches
    pool: Pool
    fallback: Pool | None
    condition: RuleCondition = RuleCondition(always=True)
    """What `matches` was compiled from."""


class RouteTarget(Struct, frozen=True):
    """What one name stands for."""

    name: str
    alias: bool
    models: dict[str, Constraint]
    """Physical model -> the alias's version constraint on it, the preferred model first."""
    rules: tuple[CompiledRule, ...]
    """Those whose pool serves one of the models, in order; then each such pool without a rule."""


class Routed(Struct, frozen=True, gc=False):
    """Where a request goes."""

    rule: str
    """The rule's id, "" when none matched."""
    name: str
    """The alias or physical model asked for, without a version constraint."""
    model: str
    """The physical model."""
    pool: Pool
    versions: Constraint
    """What the version of a node of `pool` has to meet."""
    fallback: Pool | None
    fallback_versions: Constraint
    """What the version of a node of `fallback` has to meet."""


class ListedModel(Struct, frozen=True, gc=False):
    """A name that a tenant may ask for."""

    name: str
    models: tuple[str, ...]
    """The physical models an alias stands for; empty for a physical model."""

    @property
    def alias(self) -> bool:
        """Whether the name is a logical one."""
        return bool(self.models)


class RouteTable:
    """Made by `compile_routes`; never changed afterwards.

    Args:
        targets: Every name that can be asked for.
        allowed: Tenant id -> the physical models that it may use.
        rules: All rules, in order.
    """

    __slots__ = ("_allowed", "_rules", "_targets")

    def __init__(self, targets: Mapping[str, RouteTarget], allowed: Mapping[str, frozenset[str]], rules: Sequence[CompiledRule]) -> None:
        self._rules = tuple(rules)
        self._targets = dict(targets)
        self._allowed = dict(allowed)

    @property
    def fallbacks(self) -> tuple[tuple[Pool, Pool], ...]:
        """Every pair of a pool and a fallback that a rule names, once."""
        pairs = {(rule.pool.name, rule.fallback.name): (rule.pool, rule.fallback) for rule in self._rules if rule.fallback is not None}
        return tuple(pairs.values())

    def route(self, intent: Intent, tenant: Tenant, head: RequestHead, hour_utc: int, versions_of: VersionsOf) -> Routed | Refusal:
        """The pool for one request.

        Args:
            intent: What it wants.
            tenant: Who asks.
            head: For rules that look at headers.
            hour_utc: 0-23, for rules that look at the time of day.
            versions_of: What is in service now.
        """
        question = self._question(intent, tenant)
        if isinstance(question, Refusal):
            return question
        target, allowed, asked = question
        facts = Facts(intent, tenant, head.headers, hour_utc, target.name)
        operation = intent.operation
        for rule in target.rules:
            pool = rule.pool
            if pool.model in allowed and (pool.operations is None or operation in pool.operations) and rule.matches(facts):
                versions = _on(target, pool.model, asked)
                if asked is ANY or _has_version(versions_of(pool.name), versions):
                    fallback = _usable(
                        fallback=rule.fallback, operation=operation, target=target, allowed=allowed, asked=asked, versions_of=versions_of
                    )
                    fallback_versions = ANY if fallback is None else _on(target, fallback.model, asked)
                    return Routed(
                        rule=rule.id,
                        name=target.name,
                        model=pool.model,
                        pool=pool,
                        versions=versions,
                        fallback=fallback,
                        fallback_versions=fallback_versions,
                    )
        return _unserved(target, intent, allowed, asked, versions_of)

    def tried(
        self, intent: Intent, tenant: Tenant, head: RequestHead, hour_utc: int, versions_of: VersionsOf
    ) -> tuple[RuleEvaluation, ...]:
        """Every rule that `route` comes by, and every rule before the one that takes the request, with what spoke against it."""
        question = self._question(intent, tenant)
        if isinstance(question, Refusal):
            return ()
        target, allowed, asked = question
        facts = Facts(intent, tenant, head.headers, hour_utc, target.name)
        trials = []
        for rule in (*self._rules, *(rule for rule in target.rules if not rule.id)):
            why = tuple(_against(rule=rule, target=target, allowed=allowed, asked=asked, facts=facts, versions_of=versions_of))
            trials.append(RuleEvaluation(rule.id, rule.pool.name, not why, why))
            if not why:
                break
        return tuple(trials)

    def models_for(self, tenant: Tenant) -> tuple[ListedModel, ...]:
        """Every name that the tenant may ask for, aliases first, each group sorted."""
        allowed = self._allowed.get(tenant.id, _NOTHING)
        usable = [target for target in self._targets.values() if not allowed.isdisjoint(target.models)]
        listed = (
            ListedModel(target.name, tuple(model for model in target.models if model in allowed) if target.alias else ())
            for target in usable
        )
        return tuple(sorted(listed, key=lambda entry: (not entry.alias, entry.name)))

    def rules_of(self, asked_for: str) -> tuple[CompiledRule, ...]:
        """The rules that may take a request for the name, in order, then each of its pools; none when the name stands for nothing."""
        target, _ = self._target(asked_for)
        return () if target is None else target.rules

    def preferred(self, asked_for: str) -> str | None:
        """The physical model that the name stands for first; None when it stands for nothing."""
        target, _ = self._target(asked_for)
        return None if target is None else next(iter(target.models))

    def _question(self, intent: Intent, tenant: Tenant) -> tuple[RouteTarget, frozenset[str], Constraint] | Refusal:
        """What the name stands for, the models that the tenant may use, and the version that the client asks for."""
        target, suffix = self._target(intent.model)
        if target is None:
            return Refusal(RefusalCode.MODEL_NOT_FOUND, f"The model {_shown(intent.model)} does not exist.", param="model")
        allowed = self._allowed.get(tenant.id, _NOTHING)
        if allowed.isdisjoint(target.models):
            return Refusal(RefusalCode.MODEL_NOT_ALLOWED, f"The key may not use the model {_shown(target.name)}.", param="model")
        if not suffix and not intent.version:
            return target, allowed, ANY
        asked = _asked(suffix, intent.version)
        return asked if isinstance(asked, Refusal) else (target, allowed, asked)

    def _target(self, asked_for: str) -> tuple[RouteTarget | None, str]:
        """The target, and the version constraint after the last `@` of a name that is none as it stands."""
        target = self._targets.get(asked_for)
        if target is not None:
            return target, ""
        name, _, suffix = asked_for.rpartition("@")
        return self._targets.get(name), suffix


def _against(
    rule: CompiledRule, target: RouteTarget, allowed: frozenset[str], asked: Constraint, facts: Facts, versions_of: VersionsOf
) -> Iterator[str]:
    """What speaks against a rule, in the order in which `route` looks."""
    pool = rule.pool
    if pool.model not in target.models:
        yield f"its pool serves {pool.model}, which {_shown(target.name)} does not stand for"
        return
    if pool.model not in allowed:
        yield f"the tenant may not use {pool.model}"
    if pool.operations is not None and facts.intent.operation not in pool.operations:
        yield f"its pool does not serve {facts.intent.operation.value}"
    yield from unmet(rule.condition, facts)
    versions = _on(target, pool.model, asked)
    if asked is not ANY and not _has_version(versions_of(pool.name), versions):
        yield f"no node of its pool serves a version that meets {versions.text}"


def _usable(
    fallback: Pool | None, operation: Operation, target: RouteTarget, allowed: frozenset[str], asked: Constraint, versions_of: VersionsOf
) -> Pool | None:
    """The fallback, None when the tenant, the operation or the version that the client asked for rules it out."""
    if fallback is None or fallback.model not in allowed:
        return None
    if fallback.operations is not None and operation not in fallback.operations:
        return None
    if asked is ANY:
        return fallback
    served = fallback.model in target.models and _has_version(versions_of(fallback.name), _on(target, fallback.model, asked))
    return fallback if served else None


def _on(target: RouteTarget, model: str, asked: Constraint) -> Constraint:
    """What the alias and the client together ask of the model's version. A model outside the target is asked nothing."""
    own = target.models.get(model, ANY)
    if asked is ANY:
        return own
    if own is ANY:
        return asked
    return combine(own.text, asked.text) or asked


def _has_version(offered: frozenset[str], versions: Constraint) -> bool:
    """Whether a request can find its version here; a pool without a node now is asked, so that its refusal tells the reason."""
    return not offered or any(versions.allows(version) for version in offered)


def _asked(suffix: str, header: str) -> Constraint | Refusal:
    """What the client asks of the version: after the `@`, in the header, or both."""
    for text, param, where in ((suffix, "model", "after the @ of the model"), (header, "x-din-model-version", "in x-din-model-version")):
        if parse_constraint(text) is None:
            return Refusal(
                RefusalCode.INVALID_REQUEST, f"The text {where} is not a version constraint such as `>=2025.3,<2026`.", param=param
            )
    return combine(suffix, header) or Refusal(
        RefusalCode.INVALID_REQUEST, "The version constraints are too long.", param="x-din-model-version"
    )


def _unserved(target: RouteTarget, intent: Intent, allowed: frozenset[str], asked: Constraint, versions_of: VersionsOf) -> Refusal:
    pools = [rule.pool for rule in target.rules if not rule.id and rule.pool.model in allowed]
    serving = [pool for pool in pools if pool.operations is None or intent.operation in pool.operations]
    if not serving:
        return Refusal(
            RefusalCode.INVALID_REQUEST, f"The model {_shown(target.name)} does not serve {intent.operation.value}.", param="model"
        )
    offered = ", ".join(sorted({version for pool in serving for version in versions_of(pool.name)}))
    message = f"No node serves a version of {_shown(target.name)} that meets {asked.text!r}; in service: {offered}."
    return Refusal(RefusalCode.VERSION_MISMATCH, message, param="x-din-model-version" if intent.version else "model")


def _shown(name: str) -> str:
    """A client's text inside a message: short, and with nothing in it that a terminal or a log would act on."""
    return f"`{ascii(name[:_SHOWN])[1:-1]}`"
