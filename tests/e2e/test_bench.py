"""`din-extproc bench` against real deployments: one that costs little, and some that are slow for one reason each."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline import BaselineOptions, compare
from din_extproc.tools.bench.baseline_figures import BaselineFailed, BaselineLoad
from din_extproc.tools.bench.history import BaselineComparison
from din_extproc.tools.bench.split import SplitMeasurements, SplitOptions, make_report, measure
from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, key_of, node, tenant

pytestmark = pytest.mark.e2e
QUICK = BaselineLoad(prompts=8, at_once=4, tokens=6, rounds=2)
UNUSED_ADDRESS = "127.0.0.1:9"


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineSim]]:
    """The slow one takes eight times as long for each token; both take far longer than a gateway on a busy machine."""
    rates = {"quick": 40.0, "slow": 5.0}
    sims = {name: EngineSim(model="m", decode_rate=rate, prefill_rate=1e6) for name, rate in rates.items()}
    with together(sims) as running:
        yield running


@pytest.fixture(scope="module")
def stack(engines: dict[str, EngineSim]) -> Iterator[Stack]:
    quick, slow = engines["quick"].address, engines["slow"].address
    config = {
        "pools": {
            "fast": {"model": "m", "served_model": "m", "engine": "vllm", "nodes": [node("quick", quick)]},
            "mixed": {
                "model": "other", "served_model": "m", "engine": "vllm", "scheduler": "round_robin",
                "nodes": [node("quick-too", quick), node("slow", slow)],
            },
            "gone": {"model": "away", "engine": "vllm", "nodes": [node("nobody", UNUSED_ADDRESS)]},
            "native": {"model": "lama", "engine": "ollama", "api": "native", "nodes": [node("lama-1", UNUSED_ADDRESS)]},
        },
        "tenants": [tenant("acme"), {**tenant("trial", max_streams=1), "queue": {"max_wait_ms": 4000}}, tenant("other", rpm=1)],
    }  # fmt: skip
    with Stack(config) as running:
        yield running


def settings_of(stack: Stack) -> Settings:
    settings = load(stack.config_file, {})
    assert isinstance(settings, Settings), str(settings)
    return settings


def compared(stack: Stack, model: str, key: str = "acme", node_id: str = "") -> BaselineComparison:
    return compare(settings_of(stack), BaselineOptions(url=stack.url, key=key_of(key), model=model, node=node_id, load=QUICK))


def bench(stack: Stack, *arguments: str | Path) -> Result:
    environment = {"DIN_KEY": key_of("acme"), "DIN_CONFIG": str(stack.config_file)}
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env=environment)


def test_a_gateway_that_costs_little_is_no_bottleneck(stack: Stack, engines: dict[str, EngineSim]):
    engines["quick"].forget()
    found = compared(stack, "m")
    assert found.sound, found.lines()
    assert found.reason is None
    assert (found.node, found.pool) == ("quick", "fast")
    assert found.direct.failed == found.through.failed == 0
    assert found.direct.requests == found.through.requests == 16
    assert found.shares is not None
    assert found.shares.requests == 16
    assert found.shares.node_ms > found.shares.decided_ms > 0
    assert found.configuration == settings_of(stack).fingerprint
    assert not found.notes
    _, requests = engines["quick"].seen()
    asked = [(dict(each["headers"]), each["body"]) for each in requests if each["path"] == "/v1/chat/completions"]
    directly = [body for headers, body in asked if headers["x-din-trace-id"].startswith("direct-")]
    through = [body for headers, body in asked if headers["x-din-trace-id"].startswith("bench-")]
    assert sorted(directly) == sorted(through)
    assert key_of("acme") not in str([headers for headers, _ in asked])


def test_slow_nodes_are_named_as_the_reason(stack: Stack):
    found = compared(stack, "other", node_id="quick-too")
    assert not found.sound, found.lines()
    assert found.reason is not None
    assert found.reason.part == "node", found.lines()


def test_a_queue_is_named_as_the_reason(stack: Stack):
    found = compared(stack, "m", key="trial")
    assert not found.sound, found.lines()
    assert found.reason is not None
    assert found.reason.part == "queue", found.lines()
    assert found.shares is not None
    assert found.shares.waited_ms > found.shares.node_ms


def test_limits_that_refuse_are_named_as_the_reason(stack: Stack):
    found = compared(stack, "m", key="other")
    assert not found.sound
    assert found.reason is not None
    assert found.reason.part == "errors"
    assert "rate_limit_exceeded" in found.reason.cause


@pytest.mark.parametrize(
    ("model", "node_id", "words"),
    [
        ("away", "", "node nobody at 127.0.0.1:9 does not answer: "),
        ("m", "slow", "slow is not a node of pool fast, which serves m: quick"),
        ("lama", "", "have another API than OpenAI's"),
        ("nothing", "", "a chat with nothing would be refused: "),
    ],
)
def test_what_can_not_be_measured_says_why(stack: Stack, model: str, node_id: str, words: str):
    with pytest.raises(BaselineFailed, match=words):
        compared(stack, model, node_id=node_id)


def test_without_an_admin_port_the_ratio_stands_alone(stack: Stack, tmp_path: Path):
    file = tmp_path / "din.yaml"
    file.write_text(stack.config_file.read_text().replace(f"address: 127.0.0.1:{stack.admin_port}", f"address: {UNUSED_ADDRESS}"))
    settings = load(file, {})
    assert isinstance(settings, Settings), str(settings)
    found = compare(settings, BaselineOptions(url=stack.url, key=key_of("acme"), model="m", load=QUICK))
    assert found.sound
    assert found.shares is None
    assert "times inside the gateway are unknown" in found.notes[0]


def test_results_are_kept_and_compared_over_time(stack: Stack, tmp_path: Path):
    file = tmp_path / "kept.jsonl"
    quick = ("--url", stack.url, "--model", "m", "--prompts", "4", "--tokens", "8", "--rounds", "1", "--history", file)
    first = bench(stack, "baseline", *quick)
    assert first.exit_code == 0, first.stderr
    assert "the network gives" in first.stdout
    second = bench(stack, "baseline", *quick, "--json")
    assert json.loads(second.stdout)["node"] == "quick"
    result = bench(stack, "history", "--history", file, "--tolerance", "0.99")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 3
    assert "throughput " in result.stdout.splitlines()[-1]
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    kept[-1]["through"]["tokens_per_s"] = kept[0]["through"]["tokens_per_s"] / 2
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert bench(stack, "history", "--history", file).exit_code == 1


def test_a_gateway_that_is_not_there_is_one_line_and_exit_code_1(stack: Stack, tmp_path: Path):
    done = bench(stack, "baseline", "--url", f"http://{UNUSED_ADDRESS}", "--model", "m", "--history", tmp_path / "kept.jsonl")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9 does not answer: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "kept.jsonl").exists()
    assert bench(stack, "history", "--history", tmp_path / "none").exit_code == 1
    assert bench(stack, "baseline", "--url", "x", "--rounds", "0").exit_code == 2


def test_the_admin_port_shows_exchanges_to_who_knows_their_trace_id(stack: Stack):
    reply: dict[str, Any] = {}

    def is_recorded() -> bool:
        with stack.client() as client:
            reply.update(client.get(f"{stack.admin_url}/exchanges?trace=client-named-1").json())
        return bool(reply["exchanges"])

    assert stack.chat(stream=True, headers={"x-din-trace-id": "client-named-1"}).status_code == 200
    stack.eventually(is_recorded, "the exchange is shown")
    (result,) = reply["exchanges"]
    assert (result["pool"], result["outcome"], result["status"]) == ("fast", "completed", 200)
    assert 0 <= result["received_ms"] <= result["sent_ms"] <= result["first_token_ms"] <= result["node_ended_ms"] <= result["ended_ms"]
    assert 0 < result["decided_ms"] < result["sent_ms"] + 1
    with stack.client() as client:
        refused = client.get(f"{stack.admin_url}/exchanges?trace=short")
    assert refused.status_code == 400
    assert refused.json()["code"] == "trace_missing"


SPLIT = SplitOptions(url="", key=key_of("acme"), model="m", tokens=(1, 8, 40), repeats=1, clock_requests=16)


def asked(stack: Stack, **changed: Any) -> tuple[SplitMeasurements, SplitOptions]:
    options = replace(SPLIT, url=stack.url, **changed)
    return asyncio.run(measure(settings_of(stack), options)), options


def test_the_parts_of_streams_add_up_to_what_the_client_saw(stack: Stack):
    found = make_report(*asked(stack))
    assert found.sound, found.lines()
    assert [split.tokens for split in found.splits] == [1, 8, 40]
    for split in found.splits:
        assert sum(split.parts.values()) == pytest.approx(split.total_ms + split.gap_ms, abs=1.0)
        assert 0 < split.parts["decision"] < split.total_ms
        assert split.parts["node"] > 0
        assert split.ttft_ms is not None
    assert found.splits[2].parts["node"] > found.splits[2].total_ms / 2  # a second of forty tokens
    assert found.splits[2].tpot_ms == pytest.approx(25.0, rel=0.5)
    assert found.clocks[0].whose == "gateway"
    assert found.clocks[1].whose in {"quick", "quick-too"}


def test_the_command_takes_a_list_of_lengths(stack: Stack):
    ran = bench(stack, "split", "--url", stack.url, "--model", "m", "--tokens", "1,20", "--repeats", "1", "--json")
    assert ran.exit_code in (0, 1), ran.output
    assert [split["tokens"] for split in json.loads(ran.stdout)["splits"]] == [1, 20]


def test_a_node_s_clock_that_is_300_ms_off_is_found_and_named(stack: Stack, engines: dict[str, EngineSim]):
    engines["quick"].fail("clock:ms=300")
    try:
        found = make_report(*asked(stack, tokens=(1,)))
    finally:
        engines["quick"].fail("")
    assert not found.sound
    (off,) = [clock for clock in found.clocks if clock.off]
    assert off.whose.startswith("quick")
    assert (off.low_ms or 0) <= 300 <= (off.high_ms or 0)


def test_a_client_s_clock_that_is_300_ms_off_is_found_and_named(stack: Stack):
    split_report, options = asked(stack, tokens=(1, 8))
    early = [tuple(replace(each, began_at=each.began_at - 0.3) for each in some) for some in (split_report.exchanges, split_report.others)]
    found = make_report(replace(split_report, exchanges=early[0], others=early[1]), options)
    assert [clock.whose for clock in found.clocks if clock.off] == ["client"]
    assert not found.adds_up
    assert all(split.gap_ms > 200 for split in found.splits)
    assert all(sum(split.parts.values()) == pytest.approx(split.total_ms, abs=50) for split in found.splits)


def test_a_wait_in_the_queue_is_a_part_of_its_own(stack: Stack):
    over = threading.Event()

    def keep_busy() -> None:
        while not over.is_set():
            stack.chat(tenant_name="trial", max_tokens=6)

    others = [threading.Thread(target=keep_busy) for _ in range(2)]
    for other in others:
        other.start()
    try:
        found = make_report(*asked(stack, key=key_of("trial"), tokens=(1,), repeats=3, clock_requests=0))
    finally:
        over.set()
        for other in others:
            other.join()
    assert max(split.parts["queue"] for split in found.splits) > 25, found.lines()


def test_on_the_command_line_the_split_is_a_table_and_a_picture(stack: Stack, tmp_path: Path):
    quick = ("--url", stack.url, "--model", "m", "--tokens", "2", "--repeats", "1", "--clock-requests", "8")
    done = bench(stack, "split", *quick, "--svg", tmp_path / "split.svg")
    assert done.exit_code == 0, done.output
    assert "the parts add up within 50 ms" in done.stdout.splitlines()[-1]
    assert (tmp_path / "split.svg").read_text().startswith("<svg ")
    split_report = json.loads(bench(stack, "split", *quick, "--json").stdout)
    assert split_report["splits"][0]["node_says"] is False
    assert bench(stack, "split", "--url", f"http://{UNUSED_ADDRESS}", "--model", "m").exit_code == 1
    assert bench(stack, "split", "--url", stack.url, "--model", "nothing").exit_code == 1
