"""The registry's section, the file of node tokens, and pools whose nodes register."""

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, NodeTokens, make_node_token, parse_hash
from din_extproc.domain.node import Endpoint
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from tests.support.stack import tenant

TOKEN = make_node_token("gpu_7", bytes(ENTROPY_BYTES))
OTHER = make_node_token("gpu-8", bytes([1]) * ENTROPY_BYTES)
SECTION = "gateway: { registry: { http_address: 127.0.0.1:50061, node_tokens_file: tokens.yaml } }"


def loaded(tmp_path, *sections, pool="dtype: bf16", tokens=f'gpu_7: "{TOKEN.hash}"\n'):
    key = tenant("acme")["keys"][0]
    who = f"tenants: [{{ id: acme, models: ['*'], keys: [{{ id: acme, hash: \"{key['hash']}\" }}] }}]"
    (tmp_path / "tokens.yaml").write_text(tokens)
    config = tmp_path / "din.yaml"
    config.write_text("\n".join(["version: 1", *sections, f"pools: {{ p: {{ model: m, engine: vllm, {pool} }} }}", who]))
    return load(config, {})


def problems(outcome):
    assert isinstance(outcome, ConfigRejected)
    return [(problem.path, problem.message) for problem in outcome.problems]


def test_a_pool_may_have_no_node_yet_when_nodes_can_register(tmp_path):
    settings = loaded(tmp_path, SECTION, pool="dtype: fp8, tp_world_size: 2, min_seq_len: 4096")
    assert not isinstance(settings, ConfigRejected), settings
    pool = settings.pools[0]
    assert (pool.nodes, pool.dtype, pool.tp_world_size, pool.min_seq_len) == ((), "fp8", 2, 4096)
    assert NodeTokens(settings.node_tokens).find_owner(f"Bearer {TOKEN.text}") == "gpu_7"
    assert str(tmp_path / "tokens.yaml") in settings.files


def test_without_a_registry_a_pool_needs_nodes_and_with_one_any_dtype_may_join(tmp_path):
    assert problems(loaded(tmp_path)) == [("pools.p", "no node: nothing can be sent there")]
    settings = loaded(tmp_path, SECTION, pool="tp_world_size: 2")
    assert (settings.pools[0].dtype, settings.pools[0].tp_world_size) == ("", 2)


def test_a_pool_that_contradicts_its_listed_nodes_is_refused(tmp_path):
    nodes = "nodes: [{ id: a, address: '10.0.0.1:8000', version: '1.0', dtype: bf16, max_seq_len: 4096 }]"
    found = problems(loaded(tmp_path, SECTION, pool=f"dtype: fp8, {nodes}"))
    assert found == [("pools.p.dtype", "node 'a' of this pool has dtype bf16")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("node_tokens_file: tokens.yaml", "`address` (gRPC), `http_address`, or both"),
        ("http_address: 127.0.0.1:50061, node_tokens_file: tokens.yaml, heartbeat_s: 3, dead_after_s: 5", "at least twice"),
        ("http_address: 127.0.0.1:9090, node_tokens_file: tokens.yaml", "addresses of their own"),
        ("address: 127.0.0.1:50061, http_address: 127.0.0.1:50061, node_tokens_file: tokens.yaml", "addresses of their own"),
        ("http_address: 127.0.0.1:50061, node_tokens_file: absent.yaml", "can't be read"),
    ],
)
def test_a_registry_that_can_not_work_is_refused(tmp_path, fields, expected):
    assert any(expected in message for _, message in problems(loaded(tmp_path, f"gateway: {{ registry: {{ {fields} }} }}")))


def test_a_broken_file_of_tokens_is_reported_line_by_line_without_what_it_holds(tmp_path):
    outcome = loaded(tmp_path, SECTION, tokens='gpu_7: "secret"\n"a b": "sha256$00$00"\n')
    assert [(problem.line, problem.file) for problem in outcome.problems] == [(line, str(tmp_path / "tokens.yaml")) for line in (1, 2)]
    assert "secret" not in str(outcome)
    assert problems(loaded(tmp_path, SECTION, tokens="[1]"))[0][1] == "lines `node-id: sha256$...` are expected"


def test_a_token_is_its_own_nodes_and_nothing_else_is_one():
    tokens = NodeTokens({"gpu_7": parse_hash(TOKEN.hash)})
    assert tokens.find_owner(f"bearer  {TOKEN.text} ") == "gpu_7"
    assert tokens.find_owner(f"Bearer {OTHER.text}") is None
    for text in ("", "Bearer", "Bearer din_", f"Basic {TOKEN.text}", "Bearer " + "x" * 10_000, "Bearer din_gpu_7_", TOKEN.text):
        assert tokens.find_owner(text) is None


def test_a_token_can_hold_for_some_addresses_only(tmp_path):
    text = f'gpu_7: {{ hash: "{TOKEN.hash}", addresses: ["10.0.0.0/24", "fd00::/64", "10.9.9.9:8000"] }}\ngpu-8: "{OTHER.hash}"\n'
    settings = loaded(tmp_path, SECTION, tokens=text)
    assert not isinstance(settings, ConfigRejected), settings
    assert NodeTokens(settings.node_tokens).find_owner(f"Bearer {TOKEN.text}") == "gpu_7"
    reach = settings.node_reaches["gpu_7"]
    for address, allowed in (
        ("10.0.0.7:1", True),
        ("10.0.1.7:1", False),
        ("[fd00::7]:1", True),
        ("[fd01::7]:1", False),
        ("10.9.9.9:8000", True),
        ("10.9.9.9:8001", False),
    ):
        assert reach.allows(Endpoint.parse(address)) is allowed, address
    assert "gpu-8" not in settings.node_reaches


@pytest.mark.parametrize("addresses", ["[]", "10.0.0.0/24", '["10.0.0.0/33"]', '["host:8000"]', "[7]"])
def test_addresses_of_a_token_that_are_none_are_refused(tmp_path, addresses):
    text = f'gpu_7: {{ hash: "{TOKEN.hash}", addresses: {addresses} }}\n'
    [(place, _)] = problems(loaded(tmp_path, SECTION, tokens=text))
    assert place == "gpu_7.addresses"
