"""The demo's configuration is valid, and its command lines are valid shell."""

import json
import shlex

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, KeyRing, make_key
from din_extproc.domain.request import Operation
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.demo.plan import CHAT_ALIAS, DemoNode, DemoPlan, curl_lines, demo_yaml


def plan(folder, *, simulated: bool = False) -> DemoPlan:
    nodes = [DemoNode("node-a", 8001), DemoNode("node-b", 8002), DemoNode("node-c", 8003, embeds=True)]
    keys = {name: make_key(name, bytes(range(first, first + ENTROPY_BYTES))) for first, name in enumerate(("demo", "trial", "dashboard"))}
    return DemoPlan(
        folder=folder,
        listener_port=10000,
        envoy_admin_port=10001,
        redis_port=6390,
        access_log_port=50052,
        admin_port=9090,
        nodes=nodes,
        simulated=simulated,
        key=keys["demo"],
        trial_key=keys["trial"],
        dashboard_key=keys["dashboard"],
    )


@pytest.mark.parametrize("simulated", [True, False])
def test_the_demo_s_configuration_is_sound(tmp_path, simulated):
    made = plan(tmp_path, simulated=simulated)
    file = tmp_path / "din.yaml"
    file.write_text(demo_yaml(made))
    settings = load(file, {})
    assert isinstance(settings, Settings), settings
    assert settings.warnings == ()
    assert {pool.name: len(pool.nodes) for pool in settings.pools} == {"demo-chat": 2, "demo-embeddings": 1}
    who = KeyRing(settings.keys).authenticate(f"Bearer {made.trial_key.text}", "", 0.0)
    assert who.tenant.id == "trial"
    assert who.tenant.may_use(CHAT_ALIAS)
    assert settings.gateway.worker_addresses[0].path == str(made.socket)
    assert Operation.EMBEDDINGS.value in demo_yaml(made)


def test_the_command_lines_are_a_shell_s_and_their_bodies_json(tmp_path):
    lines = curl_lines(plan(tmp_path))
    assert len(lines) == 3
    for _, line in lines:
        words = shlex.split(line)
        body = json.loads(words[words.index("-d") + 1])
        assert body["model"] == CHAT_ALIAS
