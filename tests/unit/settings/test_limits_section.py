"""Limits as written: of tenants, of classes, of all tenants together."""

import pytest

from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import GlobalLimits, Queueing, RateLimits, ScopeLimits
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

SMALL = """
version: 1
pools:
  p:
    model: m
    engine: vllm
    nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }]
tenants: [{ id: t, models: ["*"]%s }]
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "din.yaml"
        path.write_text(text)
        return load(path, {})

    return write


def test_a_tenant_s_classes_have_ceilings_and_its_limits_can_be_in_shadow_mode(written):
    settings = written(SMALL % ", limits: { tpm: 100, enforce: false, per_priority: { batch: { tpm: 10 } } }")
    assert isinstance(settings, Settings)
    (tenant,) = settings.tenants
    assert (tenant.enforce, tenant.per_priority) == (False, {Priority.BATCH: RateLimits(tpm=10)})


def test_all_tenants_together_are_limited_by_model_and_class_with_a_reserved_share(written):
    per_model = "{ m: { max_streams: 8, per_priority: { batch: { max_streams: 2 } } } }"
    text = f"limits: {{ tpm: 1000, reserved_for_critical: 0.2, per_model: {per_model} }}"
    settings = written(SMALL % "" + text)
    assert isinstance(settings, Settings)
    model = ScopeLimits(RateLimits(max_streams=8), {Priority.BATCH: RateLimits(max_streams=2)})
    assert settings.global_limits == GlobalLimits(ScopeLimits(RateLimits(tpm=1000), {}, 0.2), {"m": model})
    assert settings.global_limits.total.non_critical_limits == RateLimits(tpm=800)


def test_limits_of_all_tenants_name_physical_models(written):
    refused = written(SMALL % "" + "limits: { per_model: { mm: { tpm: 5 } } }")
    assert isinstance(refused, ConfigRejected)
    assert "no pool serves a model 'mm'" in str(refused)


@pytest.mark.parametrize(("one_slot", "sound"), [("true", True), ("false", False)])
def test_in_a_cluster_limits_of_all_tenants_need_all_keys_in_one_slot(written, one_slot, sound):
    store = f"store: {{ url: 'redis+cluster://10.0.0.1:7000', one_slot: {one_slot} }}\n"
    settings = written(SMALL % "" + store + "limits: { tpm: 5 }")
    assert isinstance(settings, Settings) == sound
    assert sound or "store.one_slot" in str(settings)
    assert isinstance(written(SMALL % "" + store + "limits: { enforce: false }"), Settings), "nothing is limited there"
    long_tail = (SMALL % "").replace("    engine", "    long_tail: { over_s: 30, timeout_s: 60 }\n    engine")
    settings = written(long_tail + store)
    assert isinstance(settings, Settings) == sound
    assert sound or "pools.p.long_tail" in str(settings)


def test_a_tenant_s_queue_takes_from_the_defaults_what_it_does_not_say(written):
    settings = written(SMALL % ", queue: { weight: 4 }" + "defaults: { queue: { max_wait_ms: 700, size: 9 } }")
    assert isinstance(settings, Settings)
    assert settings.tenants[0].queueing == Queueing(max_wait_ms=700, size=9, weight=4)


@pytest.mark.parametrize(("message_ms", "sound"), [(5000, True), (4999, False)])
def test_nobody_waits_longer_than_envoy_does(written, message_ms, sound):
    envoy = f"envoy: {{ timeouts: {{ message_ms: {message_ms} }} }}"
    settings = written(SMALL % ", queue: { max_wait_ms: 4000 }" + envoy)
    assert isinstance(settings, Settings) == sound
    assert sound or "at most 3999" in str(settings)


@pytest.mark.parametrize("field", ["rpm", "tpm", "max_streams"])
def test_a_ceiling_is_refused_beyond_what_redis_counts_exactly(written, field):
    for section in ("limits: { %s }", "defaults: { limits: { %s } }"):
        assert isinstance(written(SMALL % "" + section % f"{field}: 10000000000"), Settings)
        for number in (10**10 + 1, 2**63, 10**30):
            refused = written(SMALL % "" + section % f"{field}: {number}")
            assert isinstance(refused, ConfigRejected)
            assert f"{field}, at most 10000000000 is expected".replace(",", ":") in str(refused)


@pytest.mark.parametrize(
    "wrong", ["max_seq_len: 4294967296", "max_concurrency: 1000000001", "max_seq_len: 100000000000000000000000000000000"]
)
def test_a_node_s_numbers_are_refused_beyond_what_envoy_takes(written, wrong):
    refused = written(SMALL.replace("max_seq_len: 4096", wrong if "seq" in wrong else f"max_seq_len: 4096, {wrong}") % "")
    assert isinstance(refused, ConfigRejected)
    assert "at most 1000000000 is expected" in str(refused)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("envoy: { timeouts: { message_ms: 1 } }", "gives up after 1 ms"),
        ("store: { timeout_ms: 4999 }", ""),
        ("store: { timeout_ms: 5000 }", "store.timeout_ms: Redis is waited for 5000 ms"),
        ("envoy: { timeouts: { message_ms: 50 } }", "envoy.timeouts.message_ms: Redis is waited for 50 ms"),
        ("envoy: { listener: '[::]:9090' }", "`envoy.listener` and `gateway.admin.address` can't both be [::]:9090 and 127.0.0.1:9090"),
        ("envoy: { listener: '10.0.0.9:9090' }", ""),
    ],
)
def test_what_redis_envoy_and_the_sidecar_do_to_each_other_is_found_before_anything_starts(written, more, expected):
    settings = written(SMALL % "" + more)
    assert isinstance(settings, Settings) == (not expected)
    assert expected in str(settings)


def test_envoys_on_other_machines_may_have_the_same_ports(written):
    gateway = "gateway: { reached_at: sidecar.example, ext_proc: { address: '0.0.0.0:50051' } }\n"
    assert isinstance(written(SMALL % "" + gateway + "envoy: { listener: '0.0.0.0:50051' }"), Settings)
