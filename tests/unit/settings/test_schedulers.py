"""A pool's scheduler and its options, as they are written and as they are refused."""

import pytest
import yaml

from din_extproc.domain.node import LongTail
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected

NODE = {"id": "n1", "address": "10.0.0.1:8000", "version": "1.0", "dtype": "bf16", "max_seq_len": 4096}


@pytest.fixture
def pool(tmp_path):
    def make(gateway=None, **fields):
        path = tmp_path / "din.yaml"
        document = {
            "version": 1,
            "gateway": gateway or {},
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [NODE], **fields}},
            "tenants": [{"id": "t", "models": ["*"]}],
        }
        path.write_text(yaml.safe_dump(document))
        settings = load(path, {})
        return str(settings) if isinstance(settings, ConfigRejected) else settings.pools[0]

    return make


@pytest.mark.parametrize("name", ["round_robin", "token_available", "latency_ewma", "predicted_time", "prefix_affinity"])
def test_a_scheduler_is_named_with_or_without_options(pool, name):
    for written in (name, {"name": name}):
        made = pool(scheduler=written)
        assert (made.scheduler, made.scheduler_options) == (name, {})


def test_options_are_the_schedulers_own(pool):
    assert pool(scheduler={"name": "latency_ewma", "half_life_s": 30}).scheduler_options == {"half_life_s": 30}
    assert pool(scheduler={"name": "prefix_affinity", "headroom": 2.5}).scheduler_options == {"headroom": 2.5}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("token_avalable", "'token_avalable' is not a scheduler: round_robin, token_available"),
        ({"half_life_s": 3}, "None is not a scheduler"),
        (7, "7 is not a scheduler"),
        ({"name": "latency_ewma", "half_life_s": 0}, "half_life_s: Expected `float` > 0"),
        ({"name": "latency_ewma", "half_life_s": "long"}, "half_life_s: Expected `float`, got `str`"),
        ({"name": "latency_ewma", "headroom": 2}, "unknown field `headroom`; the options of latency_ewma are: half_life_s"),
        ({"name": "round_robin", "turns": 2}, "the options of round_robin are: none"),
        ({"name": "prefix_affinity", "headroom": 0.5}, "headroom: Expected `float` >= 1"),
    ],
)
def test_what_is_no_scheduler_or_no_option_is_reported_at_its_place(pool, written, expected):
    problems = pool(scheduler=written)
    assert expected in problems
    assert "pools.p.scheduler" in problems


def test_the_long_tails_share_is_the_same_for_every_number_of_workers(pool):
    assert pool(long_tail={"over_s": 30, "timeout_s": 600}).long_tail == LongTail(over_s=30, share=0.25, timeout_ms=600_000)
    shared = pool({"workers": 4}, long_tail={"over_s": 30, "share": 0.5, "timeout_s": 0.5})
    assert shared.long_tail == LongTail(over_s=30, share=0.5, timeout_ms=500)
    assert pool().long_tail is None


def test_a_long_tail_that_can_not_be_meant_is_refused(pool):
    problems = pool(long_tail={"over_s": 0, "share": 2})
    for place in ("over_s", "share", "timeout_s"):
        assert f"pools.p.long_tail.{place}" in problems
