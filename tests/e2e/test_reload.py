"""A configuration that changes under a running gateway: taken whole or not at all, without a restart, and never silently."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import EngineSim, together
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def sims() -> Iterator[dict[str, EngineSim]]:
    made = {name: EngineSim(model=name, decode_rate=5000.0, prefill_rate=1e6) for name in ("first", "second")}
    with together(made) as running:
        yield running


def config(sims: dict[str, EngineSim], **sections: Any) -> dict[str, Any]:
    pools = {name: {"model": name, "engine": "vllm", "nodes": [node(f"node-{name}", sim.address)]} for name, sim in sims.items()}
    return {
        "aliases": {"m": {"model": "first"}},
        "pools": pools,
        "rules": [{"id": name, "when": {"model": name}, "pool": name} for name in pools],
        "tenants": [tenant("acme"), tenant("trial", rpm=2)],
        **sections,
    }


@pytest.fixture(scope="module")
def running(sims) -> Iterator[Stack]:
    with Stack(config(sims)) as stack:
        yield stack


@pytest.fixture
def stack(running, sims) -> Stack:
    """With the configuration that it was started with."""
    running.write(config(sims))
    running.eventually(lambda: not read_configuration(running)["rejected_successor"], "the sound file is in use")
    running.eventually(lambda: running.chat().headers.get("x-din-node-id") == "node-first", "it decides")
    return running


def read_configuration(stack: Stack) -> dict[str, str]:
    return stack.status()["configuration"]


def lands(stack: Stack, name: str = "m") -> str:
    reply = stack.chat(model=name)
    return reply.headers["x-din-node-id"] if reply.status_code == 200 else reply.json()["error"]["code"]


def test_an_alias_leads_elsewhere_without_a_restart_and_no_request_is_lost_meanwhile(stack, sims):
    seen = [lands(stack)]
    stack.write(config(sims, aliases={"m": {"model": "second"}, "new": {"model": "first"}}))

    def twenty_at_the_new_one() -> bool:
        seen.extend(lands(stack) for _ in range(20))
        return set(seen[-20:]) == {"node-second"}

    stack.eventually(twenty_at_the_new_one, "the alias leads to its new model")
    assert set(seen) == {"node-first", "node-second"}
    assert seen == sorted(seen), "once the new one is in use the old one is not any more"
    assert lands(stack, "new") == "node-first"
    assert stack.sidecar.poll() is None


def test_changed_limits_and_keys_hold_from_the_next_request_on(stack, sims):
    replies = [stack.chat(tenant_name="trial") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    stack.write(config(sims, tenants=[tenant("acme"), tenant("trial", rpm=4), tenant("other")]))
    stack.eventually(lambda: stack.chat(tenant_name="other").status_code == 200, "a new tenant is known")
    replies = [stack.chat(tenant_name="trial") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429], "a raised limit gives what it adds, and no more"
    stack.write(config(sims, tenants=[tenant("acme"), tenant("trial", rpm=1)]))
    stack.eventually(lambda: stack.chat(tenant_name="other").status_code == 401, "a tenant that was taken out is not known")
    refused = stack.chat(tenant_name="trial")
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    assert 1 <= int(refused.headers["retry-after"]) <= 61


BROKEN = {
    "cut off": lambda sound: sound[: len(sound) // 2],
    "a key twice": lambda sound: sound + "\naliases: {}\n",
    "a tab": lambda sound: sound + "\nenvoy2:\n\tlistener: x\n",
    "an unknown field": lambda sound: sound + "\nalaises: {}\n",
    "an alias in a ring": lambda sound: sound.replace("model: first", "model: m", 1),
    "a negative limit": lambda sound: sound.replace("rpm: 2", "rpm: -2", 1),
    "nothing": lambda _: "",
    "no text at all": lambda _: "\x00\x01",
    "a list": lambda _: "- a\n- b\n",
}


def test_a_broken_file_changes_nothing_and_is_reported_with_its_reason(stack):
    used = read_configuration(stack)["fingerprint"]
    sound = stack.config_file.read_text()
    rejected = ""
    for name, breaking in BROKEN.items():
        broken = breaking(sound)
        assert broken != sound, name
        lines = stack.log("sidecar").count("changed configuration rejected")
        stack.config_file.write_text(broken)
        stack.eventually(
            lambda rejected=rejected: read_configuration(stack)["rejected_successor"] not in ("", rejected), f"refused: {name}"
        )
        rejected = read_configuration(stack)["rejected_successor"]
        assert str(stack.config_file) in rejected, name
        assert (read_configuration(stack)["fingerprint"], lands(stack)) == (used, "node-first"), name
        assert stack.log("sidecar").count("changed configuration rejected") == lines + 1, name
    stack.config_file.write_text(sound)
    stack.eventually(lambda: read_configuration(stack)["rejected_successor"] == "", "the sound file is in use again")


def test_a_file_that_is_gone_or_unreadable_changes_nothing(stack):
    used = read_configuration(stack)["fingerprint"]
    away = stack.config_file.with_suffix(".away")
    stack.config_file.rename(away)
    stack.eventually(lambda: read_configuration(stack)["rejected_successor"] != "", "its absence is reported")
    assert (read_configuration(stack)["fingerprint"], lands(stack)) == (used, "node-first")
    stack.config_file.mkdir()
    assert (read_configuration(stack)["fingerprint"], lands(stack)) == (used, "node-first")
    stack.config_file.rmdir()
    away.rename(stack.config_file)
    stack.eventually(lambda: read_configuration(stack)["rejected_successor"] == "", "it is back")


def test_a_symlink_that_is_swapped_is_followed_as_kubernetes_does_it(running, sims):
    """`din.yaml -> ..data/din.yaml`, `..data -> ..1`, and a rename that makes `..data -> ..2`."""
    folder = running.folder
    running.write(config(sims))
    sound = running.config_file.read_text()
    for number, text in ((1, sound), (2, sound.replace("model: first", "model: second", 1))):
        (folder / f"..{number}").mkdir()
        (folder / f"..{number}" / "din.yaml").write_text(text)
    (folder / "..data").symlink_to("..1")
    running.config_file.unlink()
    running.config_file.symlink_to(Path("..data") / "din.yaml")
    running.eventually(lambda: lands(running) == "node-first" and not read_configuration(running)["rejected_successor"], "the link is read")
    (folder / "..data_new").symlink_to("..2")
    (folder / "..data_new").rename(folder / "..data")
    running.eventually(lambda: lands(running) != "node-first", "the swap is noticed")
    assert lands(running) == "node-second"


def test_of_two_changes_in_a_row_the_last_one_holds(stack, sims):
    stack.write(config(sims, aliases={"m": {"model": "second"}}))
    stack.write(config(sims, aliases={"m": {"model": "first"}, "last": {"model": "second"}}))
    stack.eventually(lambda: lands(stack, "last") == "node-second", "the last one is in use")
    assert lands(stack) == "node-first"


def test_a_bad_file_at_the_start_is_reported_line_by_line_and_ends_with_1(stack, tmp_path):
    bad = tmp_path / "din.yaml"
    text = stack.config_file.read_text().replace("rpm: 2", "rpm: -2", 1).replace("access_log_flush_ms: 10", "access_log_flush_ms: 99999")
    bad.write_text(f"{text}\nalaises: {{}}\n")
    for command in (["serve", "--config", bad], ["render", "envoy", "--config", bad], ["check", bad]):
        ended = subprocess.run([sys.executable, "-m", "din_extproc", *command], capture_output=True, text=True, timeout=60, check=False)
        output = ended.stdout + ended.stderr
        assert ended.returncode == 1, output
        assert "tenants[1].limits.rpm: at least 1 is expected" in output
        assert "envoy.access_log_flush_ms: at most 10000 is expected" in output
        assert "alaises: unknown field" in output
        assert "did you mean 'aliases'?" in output
        assert output.count(f"{bad}:") == 3
        assert "Traceback" not in output
