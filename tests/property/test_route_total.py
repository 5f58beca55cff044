"""Whatever a client writes, the route table answers, and never with a model that the tenant may not use."""

from hypothesis import given
from hypothesis import strategies as st

from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.request import Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.route.aliases import Alias
from din_extproc.route.compile import compile_routes
from din_extproc.route.rules import Rule, RuleCondition, TokenRange
from din_extproc.route.versions import parse_constraint


def _pool(name, model, version):
    node = Node(
        id=f"{name}-1",
        endpoint=Endpoint("10.0.0.1", 8000),
        model=model,
        version=version,
        dtype="bf16",
        compute_capability="9.0",
        tp_world_size=1,
        max_seq_len=8192,
        max_concurrency=8,
    )
    return Pool(name=name, model=model, served_model=model, engine="vllm", scheduler="round_robin", nodes=(node,))


TENANTS = [
    Tenant(id=name, models=models, priority=Priority.STANDARD, limits=RateLimits(), per_model={})
    for name, models in {"all": ("*",), "small": ("small",), "aliased": ("fast",), "none": ("nothing",)}.items()
]
ALLOWED = {"all": {"small", "big"}, "small": {"small"}, "aliased": {"small"}, "none": set(), "stranger": {"small", "big"}}
UNLISTED_TENANT = Tenant(id="stranger", models=("*",), priority=Priority.BATCH, limits=RateLimits(), per_model={})
POOLS = [_pool("s", "small", "1.2"), _pool("b", "big", "2025.3"), _pool("s2", "small", "1.3")]
MEMBERS = PoolMembership.from_pools(POOLS)
TABLE = compile_routes(
    POOLS,
    [Alias("fast", ("small",), ">=1"), Alias("auto", ("*",))],
    [
        Rule("long", RuleCondition(estimated_tokens=TokenRange(gt=1000)), "b", "s"),
        Rule("tier", RuleCondition(cel='headers["x-task-tier"] == "x" || int(task_tier) > 0'), "s2", "b"),
        Rule("rest", RuleCondition(header={"x-a": False}), "s"),
    ],
    TENANTS,
).table

names = st.sampled_from(["small", "big", "fast", "auto", "big@", "fast@>=1", "auto@^2025", "@", ""]) | st.text()
texts = st.sampled_from(["", "*", ">=1", "~2025.3", "<"]) | st.text()
intents = st.builds(
    Intent,
    operation=st.sampled_from(Operation),
    model=st.one_of(names, st.tuples(names, texts).map("@".join)),
    estimate=st.builds(Estimate, tokens=st.integers(min_value=0)),
    output_tokens=st.none() | st.integers(min_value=0),
    stream=st.booleans(),
    task_tier=st.text(),
    version=texts,
    priority=st.none() | st.sampled_from(Priority),
)


@given(
    intents,
    st.sampled_from([*TENANTS, UNLISTED_TENANT]),
    st.dictionaries(st.sampled_from(["x-task-tier", "x-a"]), st.text()),
    st.integers(0, 23),
)
def test_every_intent_is_routed_to_an_allowed_model_or_refused_with_a_true_explanation(intent, tenant, headers, hour_utc):
    asked = (intent, tenant, RequestHead(method="POST", path=intent.operation.value, headers=headers), hour_utc, MEMBERS.get_versions)
    routed, tried = TABLE.route(*asked), TABLE.evaluate_rules(*asked)
    assert [(trial.rule, trial.pool) for trial in tried if trial.matched] == (
        [] if isinstance(routed, Refusal) else [(routed.rule, routed.pool.name)]
    )
    assert all("".join(trial.reasons) for trial in tried if not trial.matched)
    if isinstance(routed, Refusal):
        assert routed.message.isprintable()
        return
    assert routed.model in ALLOWED[tenant.id]
    assert routed.pool.model == routed.model
    assert routed.versions.allows(routed.pool.nodes[0].version)
    if routed.fallback is not None:
        assert routed.fallback.model in ALLOWED[tenant.id]
        assert routed.fallback is not routed.pool


@given(st.text() | st.text(alphabet="0123456789.,<>=!~^* vrc@", max_size=40), st.text())
def test_any_text_is_a_constraint_or_none_and_any_version_is_answered(text, version):
    constraint = parse_constraint(text)
    assert constraint is None or constraint.allows(version) in {True, False}
