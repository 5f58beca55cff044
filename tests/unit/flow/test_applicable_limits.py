"""Which budgets a request is charged to."""

from din_extproc.admit.keys import Authenticated
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import ApiKey, Budget, GlobalLimits, RateLimits, ScopeLimits, Tenant
from din_extproc.flow.view import NO_GLOBAL_LIMITS, select_applicable_limits


def who(key: RateLimits | None = None, **fields) -> Authenticated:
    tenant = Tenant(id="finance", models=("*",), priority=Priority.CRITICAL, limits=RateLimits(tpm=1000), per_model={}, **fields)
    return Authenticated(tenant, ApiKey(id="k", salt=b"", digest=b"", limits=key))


def test_a_plain_tenant_has_one_budget():
    assert select_applicable_limits(who(), "m", Priority.STANDARD, NO_GLOBAL_LIMITS).budgets == (Budget("tenant", RateLimits(tpm=1000)),)


def test_key_class_and_tenant_are_charged_together_and_the_smallest_bucket_is_known():
    owner = who(RateLimits(tpm=700), per_priority={Priority.BATCH: RateLimits(tpm=300, max_streams=1)})
    charged = select_applicable_limits(owner, "m", Priority.BATCH, NO_GLOBAL_LIMITS)
    assert [budget.scope for budget in charged.budgets] == ["tenant", "priority:batch", "key:k"]
    assert charged.bucket == 300
    assert [budget.scope for budget in select_applicable_limits(owner, "m", Priority.STANDARD, NO_GLOBAL_LIMITS).budgets] == [
        "tenant",
        "key:k",
    ]


def test_what_tenants_share_is_charged_at_network_and_model_level_and_per_class():
    global_limits = GlobalLimits(
        ScopeLimits(RateLimits(tpm=10_000), {Priority.BATCH: RateLimits(rpm=5)}, reserved_for_critical=0.25),
        {"m": ScopeLimits(RateLimits(max_streams=8), {}, reserved_for_critical=0.5), "other": ScopeLimits(RateLimits(rpm=1))},
    )
    batch = select_applicable_limits(who(), "m", Priority.BATCH, global_limits).budgets[1:]
    assert batch == (
        Budget("network", RateLimits(tpm=10_000), shared=True),
        Budget("network:priority:batch", RateLimits(rpm=5), shared=True),
        Budget("network:below_critical", RateLimits(tpm=7500), shared=True),
        Budget("network:model:m", RateLimits(max_streams=8), shared=True),
        Budget("network:model:m:below_critical", RateLimits(max_streams=4), shared=True),
    )
    critical = select_applicable_limits(who(), "m", Priority.CRITICAL, global_limits).budgets[1:]
    assert [budget.scope for budget in critical] == ["network", "network:model:m"], "the reserved share is theirs"


def test_limits_in_shadow_mode_do_not_bound_a_reservation():
    charged = select_applicable_limits(
        who(RateLimits(tpm=10), enforce=False), "m", Priority.STANDARD, GlobalLimits(ScopeLimits(RateLimits(tpm=500)))
    )
    assert [budget.enforced for budget in charged.budgets] == [False, False, True]
    assert charged.bucket == 500
