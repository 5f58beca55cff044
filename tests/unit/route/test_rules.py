"""Rule conditions, declarative and CEL."""

import pytest

from din_extproc.domain.request import Estimate, Intent, Operation, Priority
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.route.expression import BadExpression, Facts, compile_expression
from din_extproc.route.rule_evaluation import describe_unmet
from din_extproc.route.rules import KnownNames, RuleCondition, TokenRange, compile_condition

KNOWN = KnownNames(frozenset({"finance", "hr"}), ("bx-fast", "big"))


def facts(headers=None, model="bx-fast", hour_utc=12, tenant_priority=Priority.STANDARD, **fields):
    fields = {"operation": Operation.CHAT, "model": model, "estimate": Estimate(fields.pop("tokens", 100))} | fields
    tenant = Tenant(id="finance", models=("*",), priority=tenant_priority, limits=RateLimits(), per_model={})
    return Facts(Intent(**fields), tenant, headers or {}, hour_utc, model)


def holds(condition, **what):
    matches, flaws = compile_condition(condition, ("rules", 0, "when"), KNOWN)
    assert flaws == []
    return matches(facts(**what))


@pytest.mark.parametrize(
    ("condition", "matching", "other"),
    [
        (RuleCondition(path=(Operation.EMBEDDINGS, Operation.RERANK)), {"operation": Operation.RERANK}, {}),
        (RuleCondition(estimated_tokens=TokenRange(gt=100)), {"tokens": 101}, {"tokens": 100}),
        (RuleCondition(estimated_tokens=TokenRange(ge=100)), {"tokens": 100}, {"tokens": 99}),
        (RuleCondition(estimated_tokens=TokenRange(lt=100)), {"tokens": 99}, {"tokens": 100}),
        (RuleCondition(estimated_tokens=TokenRange(le=100)), {"tokens": 100}, {"tokens": 101}),
        (RuleCondition(estimated_tokens=TokenRange(gt=10, le=20)), {"tokens": 11}, {"tokens": 10}),
        (RuleCondition(timeout_ms=TokenRange(lt=2000)), {"timeout_ms": 1999}, {"timeout_ms": 2000}),
        (RuleCondition(timeout_ms=TokenRange(le=2000)), {"timeout_ms": 2000}, {"timeout_ms": None}),
        (RuleCondition(timeout_ms=TokenRange(ge=2000)), {"timeout_ms": None}, {"timeout_ms": 1999}),
        (RuleCondition(cel="timeout_ms > 0 && timeout_ms < 2000"), {"timeout_ms": 100}, {}),
        (RuleCondition(budget_tokens=TokenRange(lt=2000)), {"budget_tokens": 1999}, {}),
        (RuleCondition(budget_cost=TokenRange(ge=10_000_000)), {"budget_cost": 10_000_000}, {"budget_cost": 9_999_999}),
        (
            RuleCondition(cel="timeout_ms < 2000 && budget_cost >= 0.01"),
            {"timeout_ms": 100, "budget_cost": 10_000_000},
            {"timeout_ms": 100},
        ),
        (
            RuleCondition(cel="budget_tokens > 0 && estimated_tokens + output_tokens > budget_tokens"),
            {"budget_tokens": 9, "tokens": 10},
            {},
        ),
        (RuleCondition(header={"x-task-tier": ("extraction",)}), {"headers": {"x-task-tier": "extraction"}}, {}),
        (RuleCondition(header={"x-a": ("1", "2")}), {"headers": {"x-a": "2"}}, {"headers": {"x-a": "3"}}),
        (RuleCondition(header={"x-a": True}), {"headers": {"x-a": ""}}, {}),
        (RuleCondition(header={"x-a": False}), {}, {"headers": {"x-a": "1"}}),
        (RuleCondition(model=("bx-*",)), {}, {"model": "big"}),
        (RuleCondition(tenant=("finance",)), {}, None),
        (RuleCondition(priority=(Priority.BATCH,)), {"priority": Priority.BATCH}, {}),
        (RuleCondition(priority=(Priority.CRITICAL,)), {"tenant_priority": Priority.CRITICAL}, {"priority": Priority.CRITICAL}),
        (RuleCondition(stream=True), {"stream": True}, {}),
        (RuleCondition(stream=False), {}, {"stream": True}),
        (RuleCondition(any=(RuleCondition(stream=True), RuleCondition(estimated_tokens=TokenRange(lt=9)))), {"tokens": 1}, {}),
        (
            RuleCondition(all=(RuleCondition(stream=True), RuleCondition(estimated_tokens=TokenRange(lt=9)))),
            {"tokens": 1, "stream": True},
            {"stream": True},
        ),
        (RuleCondition(negated=RuleCondition(stream=True)), {}, {"stream": True}),
        (RuleCondition(stream=True, model=("big",)), {"stream": True, "model": "big"}, {"stream": True}),
        (RuleCondition(always=True), {}, None),
        (RuleCondition(cel='model.startsWith("bx-") && estimated_tokens < 200'), {}, {"tokens": 200}),
        (RuleCondition(cel="output_tokens > 50"), {"output_tokens": 51}, {}),
        (RuleCondition(cel='headers["x-a"] == "1"'), {"headers": {"x-a": "1", "x-b": "2"}}, {}),
        (RuleCondition(cel='headers.exists(name, name == "x-b")'), {"headers": {"x-b": "2"}}, {"headers": {"x-a": "1"}}),
        (RuleCondition(cel='"x-a" in headers || stream'), {"headers": {"x-a": "1"}}, {}),
        (
            RuleCondition(cel='priority == "batch" && task_tier == "t" && tenant == "finance"'),
            {"priority": Priority.BATCH, "task_tier": "t"},
            {},
        ),
        (
            RuleCondition(cel="path in ['/v1/embeddings'] && hour_utc == 3"),
            {"operation": Operation.EMBEDDINGS, "hour_utc": 3},
            {"hour_utc": 3},
        ),
    ],
)
def test_a_condition_holds_for_what_it_says_and_not_for_the_rest(condition, matching, other):
    assert holds(condition, **matching)
    if other is not None:
        assert not holds(condition, **other)


@pytest.mark.parametrize(
    "expression", ["1 / estimated_tokens == 0", 'headers["x"] == "1"', "int(task_tier) > 1", "[1][output_tokens] == 1"]
)
def test_an_expression_that_fails_on_a_request_does_not_match(expression):
    matches = compile_expression(expression)
    if isinstance(matches, BadExpression):
        assert "fails" in matches.message
    else:
        assert matches(facts(tokens=0, output_tokens=7)) is False


@pytest.mark.parametrize(
    ("expression", "message", "line", "column"),
    [
        ("tenant ==", "syntax error: mismatched input end", 1, 10),
        ("tenant == 'a' &&\n  hour_utc >> 3", "syntax error", 2, 13),
        ("tenant == 'a' && tennant == 'b'", "'tennant' is neither a variable nor a function", 1, 18),
        ("true ||\n bogus(tenant)", "'bogus' is neither a variable nor a function", 2, 2),
        ("estimated_tokens", "not a boolean but of type int", 0, 0),
        ("tenant + 1 == 2", "the expression fails: ", 0, 0),
        ("estimated_tokens.startsWith('a')", "the expression fails: ", 0, 0),
        ("", "syntax error", 1, 1),
        ("model.matches('(')", "'(' is not a pattern: unclosed group", 1, 15),
        ("stream &&\n  headers['x'].matches(r\"[a\")", "'[a' is not a pattern: unclosed character class", 2, 24),
        ("tenant == 'a' && model . matches ( '(?=x)' )", "look-around", 1, 36),
        ("['a', '('].exists(each, model.matches(each))", "'(' is not a pattern: unclosed group", 0, 0),
    ],
)
def test_an_expression_that_can_only_fail_is_refused_with_its_place(expression, message, line, column):
    bad = compile_expression(expression)
    assert message in bad.message
    assert (bad.line, bad.column) == (line, column)


def test_a_pattern_is_only_looked_at_where_it_is_one():
    for source in (
        "model == \".matches('(')\"",
        "model.matches('^[(]$') // .matches('(')\n",
        "model.matches(task_tier)",
        "model.matches('\\\\(')",
    ):
        assert not isinstance(compile_expression(source), BadExpression), source


def test_the_reason_of_an_expression_that_did_not_match_has_its_error():
    for source, expected in (
        ("headers['x'] == '1'", "fails (there is no 'x'): headers['x'] == '1'"),
        ("'a'.matches(model)", "fails ('(' is not a pattern: unclosed group): 'a'.matches(model)"),
        ("stream", "not true: stream"),
    ):
        assert describe_unmet(RuleCondition(cel=source), facts(model="(")) == (expected,)


@pytest.mark.parametrize(
    ("condition", "place", "message"),
    [
        (RuleCondition(), (), "condition is empty"),
        (RuleCondition(any=(RuleCondition(), RuleCondition(cel="x"))), ("any", 0), "condition is empty"),
        (RuleCondition(all=(RuleCondition(stream=True), RuleCondition(cel="x"))), ("all", 1, "cel"), "'x' is neither"),
        (RuleCondition(negated=RuleCondition(tenant=("finnance",))), ("not", "tenant"), "no tenant is called 'finnance'"),
        (RuleCondition(path=(Operation.MODELS,)), ("path",), "never routed"),
        (RuleCondition(estimated_tokens=TokenRange(gt=5, lt=6)), ("estimated_tokens",), "no number of tokens"),
        (RuleCondition(model=("bx-fats",)), ("model",), "matches no model"),
    ],
)
def test_a_flaw_is_found_however_deep_it_stands(condition, place, message):
    _, flaws = compile_condition(condition, ("rules", 3, "when"), KNOWN)
    assert flaws[0].place == ("rules", 3, "when", *place)
    assert message in flaws[0].message
