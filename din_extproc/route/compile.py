"""Compiles pools, aliases, rules and tenants to one route table, or reports all their flaws at once.

Everything that does not depend on a request is computed here: the models of each tenant, the rules that concern each name.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import Pool
from din_extproc.domain.request import BUILT_IN, Operation
from din_extproc.domain.tenant import Tenant, matches_pattern
from din_extproc.route.aliases import Alias, Reach, resolve_aliases
from din_extproc.route.flaw import Flaw, Place, did_you_mean
from din_extproc.route.rules import KnownNames, Rule, compile_condition, find_dead_patterns, match_always
from din_extproc.route.table import CompiledRule, RouteTable, RouteTarget
from din_extproc.route.versions import ANY, parse_constraint


class Compiled(Struct, frozen=True):
    """The table, None if a flaw prevents it; warnings come with a table."""

    table: RouteTable | None
    flaws: tuple[Flaw, ...]


def compile_routes(
    pools: Sequence[Pool],
    aliases: Sequence[Alias],
    rules: Sequence[Rule],
    tenants: Sequence[Tenant],
    operations: Mapping[str, Operation] = BUILT_IN,
) -> Compiled:
    """Compile the routes. The order of pools, rules and an alias's models matters; that of aliases and tenants does not.

    `operations`: every one, by path.
    """
    by_name = {pool.name: pool for pool in pools}
    models = tuple(dict.fromkeys(model for pool in pools for model in pool.models))
    views = {(pool.name, model): pool if model == pool.model else pool.for_adapter(model) for pool in pools for model in pool.models}
    reaches, flaws = resolve_aliases(aliases, models)
    known = KnownNames(frozenset(tenant.id for tenant in tenants), (*models, *reaches), frozenset(operations.values()))
    compiled, found = _compile_rules(rules, by_name, known)
    flaws += found
    flaws += _find_cycles(rules)
    flaws += _find_shadowed(rules, by_name)
    flaws += _find_adapter_clashes(pools)
    flaws += _find_dead_grants(tenants, (*models, *reaches))
    if not all(flaw.warning for flaw in flaws):
        return Compiled(None, tuple(flaws))
    names: dict[str, tuple[bool, Reach]] = {model: (False, {model: ""}) for model in models}
    names |= {alias: (True, reach) for alias, reach in reaches.items()}
    targets = {name: _build_target(name, is_alias, reach, compiled, views) for name, (is_alias, reach) in names.items()}
    return Compiled(RouteTable(targets, compiled), tuple(flaws))


def _build_target(
    name: str,
    is_alias: bool,  # noqa: FBT001
    reach: Reach,
    rules: Sequence[CompiledRule],
    views: Mapping[tuple[str, str], Pool],
) -> RouteTarget:
    """Return the rules that concern the name, followed by each of its pools as a default. A pool serves its model and its adapters."""
    preference = {model: rank for rank, model in enumerate(reach)}
    serving = sorted((pool for (_, model), pool in views.items() if model in reach), key=lambda pool: preference[pool.model])
    concerned = [_view_rule(rule, model, views) for rule in rules for model in rule.pool.models if model in reach]
    return RouteTarget(
        name=name,
        alias=is_alias,
        models={model: parse_constraint(version) or ANY for model, version in reach.items()},
        rules=(*concerned, *(CompiledRule("", match_always, pool, None) for pool in serving)),
    )


def _view_rule(rule: CompiledRule, model: str, views: Mapping[tuple[str, str], Pool]) -> CompiledRule:
    """Return the rule for the model or an adapter of its pool. A fallback with the same adapter serves that, any other its own model."""
    if model == rule.pool.model:
        return rule
    fallback = None if rule.fallback is None else views.get((rule.fallback.name, model), rule.fallback)
    return replace(rule, pool=views[rule.pool.name, model], fallback=fallback)


def _find_adapter_clashes(pools: Sequence[Pool]) -> Iterator[Flaw]:
    """Adapters with the name of a model: a request could mean either."""
    models = {pool.model for pool in pools}
    for pool in pools:
        for index, name in enumerate(pool.adapters.names):
            if name in models:
                place: Place = ("pools", pool.name, "adapters", "names", index)
                yield Flaw(
                    place, f"{name!r} is also a model that a pool serves", "rename the adapter at its engines: its name is its model's"
                )


def _compile_rules(rules: Sequence[Rule], pools: Mapping[str, Pool], known: KnownNames) -> tuple[list[CompiledRule], list[Flaw]]:
    compiled: list[CompiledRule] = []
    flaws: list[Flaw] = []
    times = Counter(rule.id for rule in rules)
    first: dict[str, int] = {}
    for index, rule in enumerate(rules):
        place: Place = ("rules", index)
        if times[rule.id] > 1 and first.setdefault(rule.id, index) != index:
            flaws.append(Flaw((*place, "id"), f"a second rule is called {rule.id!r}", "a rule's id names it in logs and metrics"))
        matches, found = compile_condition(rule.when, (*place, "when"), known)
        flaws += found
        pool = pools.get(rule.pool)
        if pool is None:
            flaws.append(_unknown_pool((*place, "pool"), rule.pool, pools))
        if rule.fallback and rule.fallback not in pools:
            flaws.append(_unknown_pool((*place, "fallback"), rule.fallback, pools))
        if rule.fallback == rule.pool:
            flaws.append(Flaw((*place, "fallback"), "the fallback is the pool itself", "name another pool, or leave it out"))
        if rule.overflow and not rule.fallback:
            flaws.append(Flaw((*place, "overflow"), "there is no fallback that could take what overflows", "name a `fallback`"))
        flaws += _find_remote(rule, pools, place)
        flaws += _find_unserved(rule, pool, pools.get(rule.fallback), place, known)
        if pool is not None:
            compiled.append(CompiledRule(rule.id, matches, pool, pools.get(rule.fallback), rule.when, overflow=rule.overflow))
    return compiled, flaws


def _find_remote(rule: Rule, pools: Mapping[str, Pool], place: Place) -> Iterator[Flaw]:
    """Pools of a rule that keeps requests on the site and would send them to a remote API."""
    for field, name in (("pool", rule.pool), ("fallback", rule.fallback)):
        pool = pools.get(name)
        if rule.stays_on_site and pool is not None and pool.is_remote:
            message = f"rule {rule.id!r} has `stays_on_site`, and pool {name!r} is a remote API"
            yield Flaw((*place, field), message, "name a pool of the site's own nodes, or remove `stays_on_site`")


def _find_unserved(rule: Rule, pool: Pool | None, fallback: Pool | None, place: Place, known: KnownNames) -> Iterator[Flaw]:
    """Paths of a rule's condition that its pool does not serve: no request could be routed by it."""
    for operation in sorted(rule.when.operations() & frozenset(known.operations or ())):
        if pool is not None and not pool.serves(operation):
            message = f"pool {pool.name!r} ({pool.engine}, api {pool.api}) does not serve {operation}: no such request can go there"
            yield Flaw((*place, "when"), message, _served_by(pool))
        elif pool is not None and fallback is not None and not fallback.serves(operation):
            message = f"the fallback {fallback.name!r} does not serve {operation}: those requests have no fallback"
            yield Flaw((*place, "fallback"), message, _served_by(fallback), warning=True)


def _served_by(pool: Pool) -> str:
    return f"it serves {', '.join(sorted(pool.operations or ())) or 'nothing'}; see its `operations`, `engine` and `api`"


def _find_cycles(rules: Sequence[Rule]) -> list[Flaw]:
    """Return a flaw for each cycle of fallbacks: if all of its pools failed, each would be another's fallback."""
    ways: dict[str, list[tuple[str, int]]] = {}
    for index, rule in enumerate(rules):
        if rule.fallback and rule.fallback != rule.pool:
            ways.setdefault(rule.pool, []).append((rule.fallback, index))
    flaws: list[Flaw] = []
    named: set[frozenset[str]] = set()
    settled: set[str] = set()
    for start, first in ways.items():
        path: list[str] = [start]
        branches = [iter(first)]
        while branches:
            step = next(branches[-1], None)
            if step is None:
                branches.pop()
                settled.add(path.pop())
                continue
            pool, index = step
            if pool in path:
                cycle = path[path.index(pool) :]
                if frozenset(cycle) not in named:
                    named.add(frozenset(cycle))
                    cycle_text = " -> ".join((*cycle, pool))
                    hint = "let one of them fall back to a pool that needs none"
                    flaws.append(Flaw(("rules", index, "fallback"), f"the fallbacks form a cycle: {cycle_text}", hint))
            elif pool not in settled and pool in ways:
                path.append(pool)
                branches.append(iter(ways[pool]))
    return flaws


def _unknown_pool(place: Place, name: str, pools: Mapping[str, Pool]) -> Flaw:
    return Flaw(place, f"no pool is called {name!r}", did_you_mean(name, pools), missing=("pools", name))


def _find_shadowed(rules: Sequence[Rule], pools: Mapping[str, Pool]) -> list[Flaw]:
    """Return a warning for each rule that is unreachable because an earlier rule takes everything that its pool can serve."""
    flaws: list[Flaw] = []
    catch_alls: list[tuple[str, Pool]] = []
    for index, rule in enumerate(rules):
        pool = pools.get(rule.pool)
        if pool is None:
            continue
        catch_all = next((catch_all for catch_all, taken in catch_alls if taken.model == pool.model and _covers(taken, pool)), None)
        if catch_all is not None:
            message = f"rule {rule.id!r} is never reached: {catch_all!r} before it takes every request for {pool.model!r}"
            flaws.append(Flaw(("rules", index), message, "move it up", warning=True))
        if rule.when.always:
            catch_alls.append((rule.id, pool))
    return flaws


def _covers(wide: Pool, narrow: Pool) -> bool:
    """Return whether `wide` serves every operation and version of `narrow`."""
    operations = wide.operations is None or (narrow.operations is not None and narrow.operations <= wide.operations)
    return operations and {node.version for node in narrow.nodes} <= {node.version for node in wide.nodes}


def _find_dead_grants(tenants: Sequence[Tenant], names: Sequence[str]) -> list[Flaw]:
    """Return a flaw for each pattern of a tenant's models that matches no name."""
    dead: dict[str, bool] = {}
    flaws: list[Flaw] = []
    for at, tenant in enumerate(tenants):
        for index, pattern in enumerate(tenant.models):
            if pattern not in dead:
                dead[pattern] = not any(matches_pattern(name, pattern) for name in names)
            if dead[pattern]:
                flaws += find_dead_patterns((pattern,), ("tenants", at, "models", index), names)
    return flaws
