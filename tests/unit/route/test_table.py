"""The route table: who is served by which pool, and who is not."""

import pytest
from msgspec.structs import replace

from din_extproc.domain.node import Endpoint, Node, Pool, RemoteApi
from din_extproc.domain.request import Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.route.aliases import Alias
from din_extproc.route.compile import compile_routes
from din_extproc.route.rules import Rule, RuleCondition, TokenRange
from din_extproc.route.table import Routed

ALWAYS = RuleCondition(always=True)


def pool(name, model, *versions, operations=None):
    nodes = tuple(
        Node(
            id=f"{name}-{number}",
            endpoint=Endpoint("10.0.0.1", 8000 + number),
            model=model,
            version=version,
            dtype="bf16",
            compute_capability="9.0",
            tp_world_size=1,
            max_seq_len=8192,
            max_concurrency=8,
        )
        for number, version in enumerate(versions or ("1.0",))
    )
    return Pool(name=name, model=model, served_model=model, engine="vllm", scheduler="round_robin", nodes=nodes, operations=operations)


def tenant(*models, name="t", priority=Priority.STANDARD):
    return Tenant(id=name, models=models or ("*",), priority=priority, limits=RateLimits(), per_model={})


def intent(model, tokens=100, operation=Operation.CHAT, **fields):
    return Intent(operation=operation, model=model, estimate=Estimate(tokens), **fields)


def table(pools, aliases=(), rules=(), tenants=None):
    compiled = compile_routes(pools, aliases, rules, tenants or [tenant()])
    assert [flaw.message for flaw in compiled.flaws if not flaw.warning] == []
    return compiled.table, PoolMembership.from_pools(pools).get_versions


def ask(routes, what, who=None, headers=None, hour_utc=12):
    table, versions_of = routes
    return table.route(
        what, who or tenant(), RequestHead(method="POST", path=what.operation.value, headers=headers or {}), hour_utc, versions_of
    )


BIG, SMALL, LONG = pool("big-pool", "big", "2025.3.1", "2025.4"), pool("small-pool", "small"), pool("long-pool", "small")


def test_a_physical_name_goes_to_its_first_pool_when_no_rule_speaks():
    routed = ask(table([BIG, SMALL, LONG]), intent("small"))
    assert (routed.rule, routed.name, routed.model, routed.pool.name, routed.fallback) == ("", "small", "small", "small-pool", None)


def test_the_first_rule_whose_pool_serves_the_model_wins():
    rules = [
        Rule("big-first", ALWAYS, "big-pool"),
        Rule("long", RuleCondition(estimated_tokens=TokenRange(gt=16000)), "long-pool", "big-pool"),
        Rule("rest", ALWAYS, "small-pool"),
    ]
    routes = table([BIG, SMALL, LONG], rules=rules)
    assert ask(routes, intent("small", 16001)).rule == "long"
    assert ask(routes, intent("small", 16001)).fallback is BIG
    assert ask(routes, intent("small", 16000)).rule == "rest"
    assert ask(routes, intent("big", 16001)).rule == "big-first"


def test_an_alias_stands_for_its_model_and_carries_its_version():
    routes = table([BIG, SMALL], [Alias("smart", ("big",), "~2025.3")])
    routed = ask(routes, intent("smart"))
    assert (routed.name, routed.model, routed.versions.text) == ("smart", "big", "~2025.3")
    assert routed.versions.allows("2025.3.1")
    assert not routed.versions.allows("2025.4")


def test_rules_choose_among_the_models_of_an_alias():
    aliases = [Alias("auto", ("*",), listed=True), Alias("pair", ("small", "big"), listed=True)]
    rules = [Rule("long", RuleCondition(estimated_tokens=TokenRange(gt=1000)), "big-pool")]
    routes = table([BIG, SMALL], aliases, rules)
    assert ask(routes, intent("auto", 2000)).model == "big"
    assert ask(routes, intent("auto", 10)).model == "big", "the first pool in file order"
    assert ask(routes, intent("pair", 2000)).model == "big"
    assert ask(routes, intent("pair", 10)).model == "small", "the alias's preferred model"


def test_an_alias_of_an_alias_adds_its_constraint():
    routes = table([BIG], [Alias("a", ("b",), "<2026"), Alias("b", ("big",), ">=2025.3")])
    assert ask(routes, intent("a")).versions.text == ">=2025.3,<2026"


def test_an_unknown_name_is_404_and_is_shown_without_harm():
    refusal = ask(table([BIG]), intent("x\n\u001b[2J\ud83d" + "y" * 4000))
    assert refusal.code is RefusalCode.MODEL_NOT_FOUND
    assert refusal.param == "model"
    assert len(refusal.message) < 500
    assert refusal.message.isascii()
    assert refusal.message.isprintable()


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("fast", RefusalCode.MODEL_NOT_ALLOWED),
        ("big", RefusalCode.MODEL_NOT_ALLOWED),
        ("big@>=1", RefusalCode.MODEL_NOT_ALLOWED),
        ("fast@>=1", RefusalCode.MODEL_NOT_ALLOWED),
        ("vllm/big", RefusalCode.MODEL_NOT_FOUND),
    ],
)
def test_no_spelling_reaches_a_denied_model(model, code):
    who = tenant("small")
    routes = table([BIG, SMALL], [Alias("fast", ("big",))], tenants=[who])
    refusal = ask(routes, intent(model), who)
    assert isinstance(refusal, Refusal)
    assert refusal.code is code


def test_a_rule_or_a_fallback_never_widens_what_a_tenant_may_use():
    who = tenant("small")
    rules = [Rule("to-big", ALWAYS, "big-pool"), Rule("r", ALWAYS, "small-pool", "big-pool")]
    routes = table([BIG, SMALL], [Alias("auto", ("*",))], rules, [who])
    routed = ask(routes, intent("auto"), who)
    assert (routed.model, routed.fallback) == ("small", None)


def test_an_allowed_alias_pattern_allows_the_models_behind_it_under_either_name():
    who = tenant("bx-*")
    routes = table([BIG, SMALL], [Alias("bx-fast", ("small",))], tenants=[who])
    assert ask(routes, intent("bx-fast"), who).model == "small"
    assert ask(routes, intent("small"), who).model == "small"
    assert ask(routes, intent("big"), who).code is RefusalCode.MODEL_NOT_ALLOWED


def test_a_token_narrows_the_models_of_its_tenant_and_never_widens_them():
    routes = table([BIG, SMALL], [Alias("bx-fast", ("small",))], tenants=[tenant("*")])

    def code(granted: str, *narrowed_to: str, model: str = "big") -> RefusalCode | None:
        routed = ask(routes, intent(model), replace(tenant(granted), narrowed_to=narrowed_to))
        return routed.code if isinstance(routed, Refusal) else None

    assert code("*", "b*") is None
    assert [entry.name for entry in routes[0].models_for(replace(tenant("*"), narrowed_to=("bx-*",)))] == ["bx-fast", "small"]
    assert code("*", "bx-*", model="small") is None
    assert code("*", "bx-*") is RefusalCode.MODEL_NOT_ALLOWED
    assert code("small", "*") is RefusalCode.MODEL_NOT_ALLOWED
    assert code("*") is RefusalCode.MODEL_NOT_ALLOWED


def test_constraints_of_name_header_and_alias_all_count():
    routes = table([BIG], [Alias("smart", ("big",), ">=2025")])
    assert ask(routes, intent("smart@<2026", version="~2025.3")).versions.text == ">=2025,<2026,~2025.3"
    assert ask(routes, intent("big@2025.4")).versions.text == "2025.4"


def test_a_name_with_an_at_sign_of_its_own_is_taken_as_it_stands():
    routes = table([BIG], [Alias("big@stable", ("big",), "~2025.3")])
    assert ask(routes, intent("big@stable")).versions.text == "~2025.3"
    assert ask(routes, intent("big@stable@2025.3.1")).versions.text == "~2025.3,2025.3.1"


@pytest.mark.parametrize(
    ("fields", "param"), [({"model": "big@latest"}, "model"), ({"model": "big", "version": "latest"}, "x-din-model-version")]
)
def test_an_unreadable_constraint_is_400_and_names_its_place(fields, param):
    refusal = ask(table([BIG]), intent(**fields))
    assert (refusal.code, refusal.param) == (RefusalCode.INVALID_REQUEST, param)


def test_a_version_that_no_pool_has_is_409():
    refusal = ask(table([BIG]), intent("big", version=">=2027"))
    assert refusal.code is RefusalCode.VERSION_MISMATCH
    assert "2025.3.1, 2025.4" in refusal.message


def test_a_pool_without_the_asked_version_is_passed_over():
    old, new = pool("old", "m", "1.0"), pool("new", "m", "2.0")
    routes = table([old, new], rules=[Rule("all", ALWAYS, "old", "new")])
    assert ask(routes, intent("m")).pool is old
    assert ask(routes, intent("m", version=">=2")).pool is new
    assert ask(routes, intent("m", version="<2")).fallback is None, "the fallback does not have it either"


def test_a_fallback_of_another_model_is_not_for_a_client_that_asked_for_a_version():
    rules = [Rule("all", ALWAYS, "big-pool", "small-pool")]
    routes = table([BIG, SMALL], [Alias("smart", ("big",), ">=2025")], rules)
    degraded = ask(routes, intent("smart"))
    assert degraded.fallback is SMALL
    assert degraded.fallback_versions.allows("1.0"), "the alias's constraint is about another model"
    assert ask(routes, intent("smart@2025.4")).fallback is None


def test_a_pool_serves_its_operations_only():
    embeddings = pool("e", "bge", operations=frozenset({Operation.EMBEDDINGS}))
    routes = table([embeddings, BIG], [Alias("auto", ("*",))], [Rule("r", ALWAYS, "big-pool", "e")])
    assert ask(routes, intent("bge", operation=Operation.EMBEDDINGS)).pool is embeddings
    refusal = ask(routes, intent("bge"))
    assert (refusal.code, refusal.param) == (RefusalCode.INVALID_REQUEST, "model")
    assert ask(routes, intent("auto")).pool is BIG
    assert ask(routes, intent("big")).fallback is None


def test_what_a_tenant_may_ask_for_is_listed_with_aliases_marked():
    who = tenant("bx-*", "big")
    routes = table(
        [BIG, SMALL], [Alias("bx-fast", ("small",)), Alias("auto", ("*",)), Alias("bx-all", ("big", "small"))], tenants=[who, tenant()]
    )
    listed = [(entry.name, entry.alias, entry.models) for entry in routes[0].models_for(who)]
    assert listed == [
        ("auto", True, ("big", "small")),
        ("bx-all", True, ("big", "small")),
        ("bx-fast", True, ("small",)),
        ("big", False, ()),
        ("small", False, ()),
    ]
    only_small = table([BIG, SMALL], [Alias("auto", ("*",))], tenants=[tenant("small")])
    assert [(entry.name, entry.models) for entry in only_small[0].models_for(tenant("small"))] == [("auto", ("small",)), ("small", ())]


def test_the_time_of_day_can_choose_the_pool():
    rules = [Rule("night", RuleCondition(cel="hour_utc >= 20"), "long-pool")]
    routes = table([SMALL, LONG], rules=rules)
    assert ask(routes, intent("small"), hour_utc=21).pool is LONG
    assert isinstance(ask(routes, intent("small"), hour_utc=9), Routed)
    assert ask(routes, intent("small"), hour_utc=9).pool is SMALL


def test_a_tenant_that_stays_on_the_site_reaches_no_remote_api_by_any_way():
    api = RemoteApi(host="api.example", port=443, base_path="/v1", tls=True, ca="/ca.pem", credential_header=("authorization", "Bearer "))
    cloud = pool("cloud", "cloud-model")
    cloud = replace(cloud, nodes=tuple(replace(node, remote=api) for node in cloud.nodes))
    rules = [Rule("near", RuleCondition(model=("small",)), "small-pool", "cloud")]
    stays = replace(tenant(name="stays"), stays_on_site=True)
    routes = table([SMALL, cloud], rules=rules, tenants=[tenant(), stays])
    assert ask(routes, intent("small")).fallback is cloud
    kept = ask(routes, intent("small"), stays)
    assert (kept.pool, kept.fallback) == (SMALL, None)
    refused = ask(routes, intent("cloud-model"), stays)
    assert isinstance(refused, Refusal)
    assert refused.code is RefusalCode.MODEL_NOT_ALLOWED
    assert [listed.name for listed in routes[0].models_for(stays)] == ["small"]
    assert [listed.name for listed in routes[0].models_for(tenant())] == ["cloud-model", "small"]
    strict = [replace(rules[0], stays_on_site=True)]
    (flaw,) = (flaw for flaw in compile_routes([SMALL, cloud], (), strict, [tenant()]).flaws if not flaw.warning)
    assert flaw.place == ("rules", 0, "fallback")


PATTERNS = [Alias("claude-*", ("small",)), Alias("claude-opus-*", ("big",), "~2025.3"), Alias("g*", ("big",))]
CLAUDE = [*PATTERNS, Alias("claude-opus-4", ("small",))]


@pytest.mark.parametrize(
    ("asked", "name", "model", "versions"),
    [
        ("claude-sonnet-4-5-20250929", "claude-*", "small", ""),
        ("claude-opus-4-1", "claude-opus-*", "big", "~2025.3"),
        ("claude-opus-4", "claude-opus-4", "small", ""),
        ("claude-sonnet-4-5[1m]", "claude-*", "small", ""),
        ("small[1m]", "small", "small", ""),
        ("gpt-5@2025.4", "g*", "big", "2025.4"),
    ],
)
def test_of_the_aliases_that_match_the_most_specific_one_applies(asked, name, model, versions):
    routed = ask(table([BIG, SMALL], CLAUDE), intent(asked))
    assert (routed.name, routed.model, routed.versions.text) == (name, model, versions)


def test_a_name_that_no_alias_matches_stays_unknown():
    for asked in ("Claude-opus-4", "xclaude-opus-4", "claude", "tiny[1m]"):
        assert ask(table([BIG, SMALL], CLAUDE), intent(asked)).code is RefusalCode.MODEL_NOT_FOUND


def test_a_tenant_is_allowed_an_alias_with_a_pattern_by_its_name():
    routes = table([BIG, SMALL], PATTERNS, tenants=[tenant("claude-opus-*")])
    assert ask(routes, intent("claude-opus-9"), tenant("claude-opus-*")).model == "big"
    assert ask(routes, intent("claude-sonnet-4"), tenant("claude-opus-*")).code is RefusalCode.MODEL_NOT_ALLOWED
    [listed] = routes[0].models_for(tenant("claude-opus-*"), "claude-opus-9")
    assert (listed.name, listed.models) == ("claude-opus-9", ("big",))
    assert routes[0].models_for(tenant("claude-opus-*"), "claude-sonnet-4") == ()
