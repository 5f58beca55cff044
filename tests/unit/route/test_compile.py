"""Flaws in routes: all of them at once, each at its place."""

import pytest

from din_extproc.domain.node import Pool
from din_extproc.domain.request import Operation, Priority
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.route.aliases import MAX_CHAIN, Alias, resolve_aliases
from din_extproc.route.compile import compile_routes
from din_extproc.route.rules import Rule, RuleCondition

ALWAYS = RuleCondition(always=True)


def pool(name, model, operations=None):
    return Pool(name=name, model=model, served_model=model, engine="vllm", scheduler="round_robin", nodes=(), operations=operations)


def tenant(name, *models):
    return Tenant(id=name, models=models, priority=Priority.STANDARD, limits=RateLimits(), per_model={})


@pytest.mark.parametrize("order", [1, -1])
def test_a_circle_of_aliases_is_named_once(order):
    aliases = [Alias("a", ("b",)), Alias("b", ("c",)), Alias("c", ("a",))][::order]
    _, flaws = resolve_aliases(aliases, ["m"])
    assert len(flaws) == 1
    assert "a -> b -> c -> a" in flaws[0].message or "c -> a -> b -> c" in flaws[0].message


@pytest.mark.parametrize("target", ["a", "A"])
def test_an_alias_of_itself_is_a_circle_in_any_case(target):
    _, flaws = resolve_aliases([Alias("a", (target,))], ["m"])
    assert [flaw.message for flaw in flaws] == [f"aliases form a cycle: a -> {target}"]


def test_an_alias_may_differ_from_its_model_in_case_alone():
    reaches, flaws = resolve_aliases([Alias("qwen", ("Qwen",))], ["Qwen"])
    assert flaws == []
    assert reaches == {"qwen": {"Qwen": ""}}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("length", [MAX_CHAIN + 1, 30, 3000])
def test_a_long_chain_is_refused_whatever_the_order(length, order):
    aliases = [Alias(f"a{at}", (f"a{at + 1}",)) for at in range(length - 1)] + [Alias(f"a{length - 1}", ("m",))]
    _, flaws = resolve_aliases(aliases[::order], ["m"])
    assert flaws
    assert "more than 8 aliases in a chain" in flaws[0].message


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_of_the_allowed_length_reaches_its_model(order):
    aliases = [Alias(f"a{at}", (f"a{at + 1}",)) for at in range(MAX_CHAIN - 1)] + [Alias(f"a{MAX_CHAIN - 1}", ("m",))]
    reaches, flaws = resolve_aliases(aliases[::order], ["m"])
    assert flaws == []
    assert reaches["a0"] == {"m": ""}


def test_two_ways_to_one_model_are_fine_unless_they_ask_for_different_versions():
    same = [Alias("top", ("x", "y")), Alias("x", ("m",)), Alias("y", ("m",))]
    assert resolve_aliases(same, ["m"]) == ({"top": {"m": ""}, "x": {"m": ""}, "y": {"m": ""}}, [])
    different = [Alias("top", ("x", "y")), Alias("x", ("m",), ">=1"), Alias("y", ("m",))]
    _, flaws = resolve_aliases(different, ["m"])
    assert "under two version constraints" in flaws[0].message


def test_every_flaw_is_reported_at_once_and_at_its_place():
    compiled = compile_routes(
        [pool("p", "m"), pool("q", "m")],
        [Alias("m", ("m",)), Alias("x", ("modle",)), Alias("y", ("m", "n"), listed=True), Alias("z", ("m",), "latest")],
        [
            Rule("r1", ALWAYS, "p", "p"),
            Rule("r1", RuleCondition(cel="1 +"), "pp"),
            Rule("r3", RuleCondition(tenant=("u",)), "q", "none"),
        ],
        [tenant("t", "*")],
    )
    assert compiled.table is None
    assert {(flaw.place, flaw.warning) for flaw in compiled.flaws} == {
        (("aliases", "m"), False),
        (("aliases", "x", "model"), False),
        (("aliases", "y", "models", 1), False),
        (("aliases", "z", "version"), False),
        (("rules", 0, "fallback"), False),
        (("rules", 1, "id"), False),
        (("rules", 1, "when", "cel"), False),
        (("rules", 1, "pool"), False),
        (("rules", 2, "when", "tenant"), False),
        (("rules", 2, "fallback"), False),
        (("rules", 2), True),
    }


@pytest.mark.parametrize("length", [2, 3, 30])
def test_fallbacks_that_run_in_a_circle_are_refused_once_and_named(length):
    names = [f"p{number}" for number in range(length)]
    rules = [Rule(f"r{at}", RuleCondition(model=(name,)), name, names[(at + 1) % length]) for at, name in enumerate(names)]
    compiled = compile_routes([pool(name, name) for name in names], [], rules, [tenant("t", "*")])
    assert compiled.table is None
    (flaw,) = compiled.flaws
    assert flaw.message == f"the fallbacks form a cycle: {' -> '.join([*names, 'p0'])}"
    assert flaw.place == ("rules", length - 1, "fallback")


def test_fallbacks_that_meet_or_follow_one_another_are_no_circle():
    pairs = [("p", "q"), ("q", "s"), ("r", "s"), ("p", "s")]
    rules = [Rule(f"r{at}", RuleCondition(stream=bool(at % 2)), *pair) for at, pair in enumerate(pairs)]
    assert compile_routes([pool(name, name) for name in "pqrs"], [], rules, [tenant("t", "*")]).flaws == ()


def test_a_rule_behind_one_that_takes_everything_is_a_warning_only_when_it_could_never_match():
    embeddings = pool("e", "m", frozenset({Operation.EMBEDDINGS}))
    pools = [embeddings, pool("p", "m"), pool("q", "m"), pool("o", "n")]
    rules = [Rule("only-embeddings", ALWAYS, "e"), Rule("all", ALWAYS, "p"), Rule("other-model", ALWAYS, "o"), Rule("late", ALWAYS, "q")]
    compiled = compile_routes(pools, [], rules, [tenant("t", "*")])
    assert compiled.table is not None
    assert [(flaw.place, flaw.warning) for flaw in compiled.flaws] == [(("rules", 3), True)]


def test_a_pattern_that_matches_nothing_is_a_warning():
    compiled = compile_routes([pool("p", "qwen")], [], [], [tenant("t", "qwne", "*"), tenant("u", "llama-*")])
    assert compiled.table is not None
    assert [(flaw.place, flaw.hint) for flaw in compiled.flaws] == [
        (("tenants", 0, "models", 0), "did you mean 'qwen'?"),
        (("tenants", 1, "models", 0), ""),
    ]
