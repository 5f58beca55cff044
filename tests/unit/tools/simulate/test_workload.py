"""Workload files: errors are reported before the run, with line and remedy."""

import re
from pathlib import Path

import pytest

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings
from din_extproc.tools.simulate.workload import Workload, load_workload

DIN = Path(__file__).parents[4] / "envoy" / "din.yaml"
GOOD = """
seconds: 60
nodes:
  cluster-fast-throughput-14b: { count: 4, decode_rate: 80 }
  cluster-long-context-32k: [{ count: 1 }, { prefill_rate: 16000 }]
requests:
  - { rate: 2, prompt_tokens: 300 }
  - { name: heavy, rate: 0.5, tenant: support, model: bx-fast-chat, prompt_tokens: { median: 3000, spread: 0.5 }, max_tokens: 500 }
failures:
  - { node: gpu-07~2, kind: stall, at_s: 10, for_s: 30 }
slo: { first_token_p99_s: 2, errors: 0.01 }
"""


@pytest.fixture(scope="module")
def settings() -> Settings:
    loaded = load(DIN, {})
    assert isinstance(loaded, Settings)
    return loaded


def read(tmp_path: Path, settings: Settings, text: str, **given) -> Workload | ConfigRejected:
    file = tmp_path / "workload.yaml"
    file.write_text(text)
    return load_workload(file, {}, given, settings)


def test_a_workload_is_read_with_its_defaults(tmp_path, settings):
    workload = read(tmp_path, settings, GOOD)
    assert isinstance(workload, Workload), str(workload)
    first, second = workload.sources
    assert (first.name, first.who.tenant.id, first.model, first.prompt.median) == ("requests[0]", "finance", "bx-auto", 300)
    assert (second.who.tenant.id, second.max_tokens, second.prompt.spread) == ("support", 500, 0.5)
    assert (workload.seconds, workload.warm_up_s, workload.seed, workload.gateways) == (60, 6, 1, 1)
    assert workload.slo.first_token_p99_s == 2


def test_the_example_of_the_documentation_is_sound(tmp_path, settings):
    page = (DIN.parents[1] / "deploy" / "docs" / "pages" / "howto" / "size-a-pool.md").read_text()
    [example] = re.findall(r"```yaml\n(seconds: .*?)```", page, re.DOTALL)
    workload = read(tmp_path, settings, example)
    assert isinstance(workload, Workload), str(workload)
    assert [source.name for source in workload.sources] == ["chat", "reports"]


def test_what_the_command_line_gives_stands_before_what_the_file_says(tmp_path, settings):
    given = {"seconds": 30, "nodes.cluster-fast-throughput-14b.count": 9, "slo.errors": 0.5}
    workload = read(tmp_path, settings, GOOD, **given)
    assert isinstance(workload, Workload)
    assert (workload.seconds, workload.kinds["cluster-fast-throughput-14b"][0].count, workload.slo.errors) == (30, 9, 0.5)
    alone = load_workload(None, {}, {"requests": [{"rate": 1, "prompt_tokens": 10}]}, settings)
    assert isinstance(alone, Workload)


@pytest.mark.parametrize(
    ("change", "line", "expected"),
    [
        (("rate: 2", "rate: -2"), 7, "requests[0].rate"),
        (("rate: 2, ", ""), 7, "requests[0].rate: is missing"),
        (("rate: 2", "rates: 2"), 7, "did you mean 'rate'?"),
        (("tenant: support", "tenant: suport"), 8, "did you mean 'support'?"),
        (("model: bx-fast-chat", "model: bx-fast-chta"), 8, "did you mean 'bx-fast-chat'?"),
        (("cluster-long-context-32k:", "cluster-long-context:"), 5, "did you mean 'cluster-long-context-32k'?"),
        (("gpu-07~2", "gpu-07~3"), 10, "there is no node 'gpu-07~3'"),
        (("kind: stall", "kind: stalls"), 10, "failures[0].kind"),
        (("spread: 0.5", "spread: 0.5, most: 10"), 8, "the median lies between least and most"),
        (("{ count: 1 }", "{ prefixes: 2 }"), 5, "only the last kind can do without a count"),
        (("name: heavy", "name: requests.0, prefixes: chat"), 8, "no prefixes are called 'chat'"),
        (("seconds: 60", "seconds: 60\nwarm_up_s: 60"), 3, "as long as the whole run"),
        (("errors: 0.01", "errors: 2"), 11, "slo.errors"),
    ],
)
def test_what_is_wrong_is_reported_with_its_line(tmp_path, settings, change, line, expected):
    assert change[0] in GOOD
    rejected = read(tmp_path, settings, GOOD.replace(*change))
    assert isinstance(rejected, ConfigRejected)
    assert expected in str(rejected)
    assert f"workload.yaml:{line}:" in str(rejected), str(rejected)


def test_everything_is_reported_at_once(tmp_path, settings):
    rejected = read(tmp_path, settings, GOOD.replace("rate: 2", "rate: 0").replace("at_s: 10", "at_s: -1").replace("seed", "sed"))
    assert isinstance(rejected, ConfigRejected)
    assert len(rejected.problems) == 2


def test_no_file_an_empty_one_and_none_with_requests_are_reported(tmp_path, settings):
    missing = load_workload(tmp_path / "nowhere.yaml", {}, {}, settings)
    assert "can't be read" in str(missing)
    assert "empty" in str(read(tmp_path, settings, "# nothing\n"))
    assert "give --rate" in str(load_workload(None, {}, {}, settings))


def test_a_value_put_in_place_is_checked_like_one_of_the_file():
    for path, value, expected in (
        ("pools.cluster-fast-throughput-14b.scheduler", "round_rubin", "round_rubin"),
        ("pools.cluster-fast-throughput-14b.nodes.5.id", "x", "the list has no entry 5, only 0 to 1"),
        ("version.x", 1, "x is beyond a single value"),
        ("heath.breaker", False, "did you mean 'health'?"),
    ):
        rejected = load(DIN, {}, None, {path: value})
        assert isinstance(rejected, ConfigRejected), path
        assert expected in str(rejected)
    changed = load(DIN, {}, None, {"pools.cluster-fast-throughput-14b.scheduler": "round_robin", "health.failover_threshold.batch": 9})
    assert isinstance(changed, Settings)
    assert (changed.pools[0].scheduler, changed.health.failover_threshold.batch) == ("round_robin", 9)
