"""Configuration to settings: the shipped example, variables, inheritance, and files that can't be used at all."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from din_extproc.admit.keys import Authenticated, KeyRing
from din_extproc.control.topology import SocketAddress, UnixSocket
from din_extproc.domain.request import GENERATING, POOLING, TOKENIZING, TRANSCRIBING, Estimate, Intent, Operation, Priority, RequestHead
from din_extproc.domain.tenant import RateLimits
from din_extproc.domain.verdict import RefusalCode
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.settings.check import check
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

EXAMPLE = Path(__file__).parents[3] / "envoy" / "din.yaml"

SMALL = """
version: 1
pools:
  p:
    model: m
    engine: vllm
    nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }]
tenants: [{ id: t, models: ["*"] }]
"""


@pytest.fixture
def written(tmp_path):
    def write(text=SMALL, env=None, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content)
        path = tmp_path / "din.yaml"
        path.write_text(text)
        return load(path, env or {})

    return write


@pytest.fixture(scope="module")
def example():
    settings = load(EXAMPLE, {})
    assert isinstance(settings, Settings), settings
    return settings


def test_the_shipped_example_has_nothing_to_complain_about(example):
    assert example.warnings == ()
    assert check(EXAMPLE, {}).text == f"{EXAMPLE}: sound: 4 pools, 6 nodes, 3 models, 2 tenants"


FAST, LONG, REASONING = "cluster-fast-throughput-14b", "cluster-long-context-32k", "cluster-standard-reasoning"
EMBEDDINGS_RULE = ("rerank-embedding-fastpath", "cluster-dedicated-embeddings", None)
LONG_RULE = ("ultra-long-context-router", LONG, REASONING)
LIGHT_RULE = ("lightweight-intent-classifier", FAST, REASONING)
DEFAULT_RULE = ("complex-multi-step-reasoning", REASONING, None)


@pytest.mark.parametrize(
    ("model", "path", "tokens", "tier", "expected"),
    [
        ("bge-m3", Operation.EMBEDDINGS, 100, "", EMBEDDINGS_RULE),
        ("bx-auto", Operation.RERANK, 99_999, "", EMBEDDINGS_RULE),
        ("bx-auto", Operation.CHAT, 16_001, "extraction", LONG_RULE),
        ("bx-auto", Operation.CHAT, 16_000, "", DEFAULT_RULE),
        ("bx-auto", Operation.CHAT, 900, "extraction", LIGHT_RULE),
        ("bx-auto", Operation.CHAT, 499, "", LIGHT_RULE),
        ("bx-auto", Operation.CHAT, 500, "", DEFAULT_RULE),
        ("bx-fast-chat", Operation.CHAT, 20_000, "", LONG_RULE),
        ("bx-fast-chat", Operation.CHAT, 900, "", ("", FAST, None)),
        ("bx-reasoning-pro", Operation.CHAT, 10, "extraction", DEFAULT_RULE),
    ],
)
def test_the_shipped_rules_route_as_their_source_says(example, model, path, tokens, tier, expected):
    intent = Intent(operation=path, model=model, estimate=Estimate(tokens), task_tier=tier)
    head = RequestHead("POST", path.value, {"x-task-tier": tier} if tier else {})
    routed = example.routes.route(intent, example.tenants[0], head, 12, PoolMembership.from_pools(example.pools).get_versions)
    assert (routed.rule, routed.pool.name, routed.fallback and routed.fallback.name) == expected


def test_the_example_s_other_tenant_may_use_the_fast_model_only(example):
    support = example.tenants[1]
    assert [entry.name for entry in example.routes.models_for(support)] == ["bx-auto", "bx-fast-chat", "qwen2.5-14b-instruct"]
    long = Intent(operation=Operation.CHAT, model="bx-fast-chat", estimate=Estimate(20_000))
    assert (
        example.routes.route(long, support, RequestHead("POST", "/", {}), 0, PoolMembership.from_pools(example.pools).get_versions).fallback
        is None
    )
    big = Intent(operation=Operation.CHAT, model="bx-reasoning-pro", estimate=Estimate(10))
    assert (
        example.routes.route(big, support, RequestHead("POST", "/", {}), 0, PoolMembership.from_pools(example.pools).get_versions).code
        is RefusalCode.MODEL_NOT_ALLOWED
    )


def test_the_example_s_keys_are_the_ones_beside_them(example):
    ring = KeyRing(example.keys)
    documented = [line.split()[1] for line in EXAMPLE.read_text().splitlines() if line.strip().startswith("# din_")]
    found = [ring.authenticate(f"Bearer {key}", "", 0.0) for key in documented]
    assert all(isinstance(who, Authenticated) for who in found)
    assert [who.tenant.id for who in found] == ["finance", "support"]


def test_the_example_inherits_from_catalogue_and_defaults(example):
    fast, long, reasoning, _ = example.pools
    assert {(node.max_seq_len, node.dtype, node.version, node.tp_world_size) for node in fast.nodes} == {(8192, "bf16", "2025.3.1", 1)}
    assert long.nodes[0].max_seq_len == 32768
    assert [(node.version, node.tp_world_size, str(node.endpoint)) for node in reasoning.nodes] == [
        ("2025.3.1", 4, "10.0.0.21:8000"),
        ("2025.12.0", 4, "[fd00::22]:8000"),
    ]
    finance, support = example.tenants
    assert finance.priority is Priority.CRITICAL
    assert finance.per_model == {"llama-3.3-70b-instruct": RateLimits(tpm=80000)}
    assert support.limits == RateLimits(rpm=60, tpm=20000, max_streams=4)
    assert example.catalog.model("llama-3.3-70b-instruct").output_tokens_default == 700
    assert example.catalog.model("unknown") is None


def test_the_example_gives_envoy_its_topology(example):
    topology = example.make_topology("-- lua")
    assert topology.ext_proc == (UnixSocket("/run/din/ext_proc.sock"),)
    assert topology.access_log == SocketAddress("127.0.0.1", 50052)
    assert topology.body_limit_bytes == 32 << 20
    assert topology.pools == example.pools
    assert topology.usage_lua == "-- lua"
    assert topology.fail_open_pool is None


def test_an_unquoted_variable_is_read_as_yaml_and_a_quoted_one_is_text(written):
    text = SMALL + "gateway:\n  workers: ${N:-3}\n  node_number: ${NUMBER}\nstore:\n  url: ${URL:-redis://127.0.0.1:6379/0}\n"
    settings = written(text, {"NUMBER": "7"})
    assert (settings.gateway.workers, settings.gateway.node_number) == (3, 7)
    settings = written(text.replace("model: m", 'model: "a-${N}-$${x}"').replace("$${x}", "b"), {"NUMBER": "7", "N": "2"})
    assert (settings.gateway.workers, settings.pools[0].model) == (2, "a-2-b")


def test_a_variable_in_flow_style_must_be_quoted(written):
    assert "stands in quotes" in str(written(SMALL + "gateway: { workers: ${N:-3} }\n"))


def test_a_password_comes_from_the_environment_and_never_into_a_text(written):
    settings = written(SMALL + 'store: { url: "${REDIS}" }\n', {"REDIS": "redis://user:hunter2@[::1]:6380/3"})
    assert settings.store.url.get_secret_value() == "redis://user:hunter2@[::1]:6380/3"
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    "url", ["redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/main/0", "redis+cluster://10.0.0.1:7000", "unix:///run/redis.sock"]
)
def test_every_kind_of_redis_is_taken(written, url):
    assert written(SMALL + f'store: {{ url: "{url}" }}\n').store.url.get_secret_value() == url


def test_a_url_that_is_none_is_refused_without_its_password(written):
    rejected = str(written(SMALL + 'store: { url: "mongodb://user:hunter2@db/0" }\n'))
    assert "store.url" in rejected
    assert "hunter2" not in rejected


def test_more_workers_have_a_socket_each(written):
    settings = written(SMALL + "gateway: { workers: 2, ext_proc: { socket: /run/x.sock } }\n")
    assert settings.gateway.worker_addresses == (UnixSocket("/run/x.sock.0"), UnixSocket("/run/x.sock.1"))
    rejected = written(SMALL + "gateway: { workers: 2, ext_proc: { address: '127.0.0.1:50051' } }\n")
    assert "a socket of its own" in str(rejected)


def test_what_listens_everywhere_is_reached_on_loopback(written):
    settings = written(SMALL + "gateway: { ext_proc: { address: '0.0.0.0:50051' }, access_log: { address: '[::]:50052' } }\n")
    topology = settings.make_topology("")
    assert (topology.ext_proc, topology.access_log) == ((SocketAddress("127.0.0.1", 50051),), SocketAddress("::1", 50052))
    assert settings.gateway.worker_addresses == (SocketAddress("0.0.0.0", 50051),)


def test_two_listeners_on_one_address_are_refused(written):
    assert "addresses of their own" in str(written(SMALL + "gateway: { admin: { address: '127.0.0.1:50052' } }\n"))


def test_a_tenant_s_limits_replace_the_defaults_one_by_one(written):
    text = (
        SMALL.replace('models: ["*"]', 'models: ["*"], limits: { rpm: 5, tpm: null }')
        + "defaults: { limits: { rpm: 60, tpm: 100, max_streams: 4 } }\n"
    )
    assert written(text).tenants[0].limits == RateLimits(rpm=5, tpm=None, max_streams=4)


@pytest.mark.parametrize(
    ("written_as", "moment"),
    [
        ("2027-05-01", datetime(2027, 5, 1, tzinfo=UTC)),
        ("2027-05-01T12:00:00Z", datetime(2027, 5, 1, 12, tzinfo=UTC)),
        ("2027-05-01 12:00:00", datetime(2027, 5, 1, 12, tzinfo=UTC)),
        ("2027-05-01T12:00:00+02:00", datetime(2027, 5, 1, 10, tzinfo=UTC)),
    ],
)
def test_a_key_expires_at_a_moment_in_utc(written, written_as, moment):
    digest = "sha256$0011223344556677$" + "0" * 64
    settings = written(SMALL.replace("id: t,", f'id: t, keys: [{{ id: k, hash: "{digest}", expires: {written_as} }}],'))
    assert settings.keys[0][1][0].expires == moment


def test_switching_parts_off_says_false(written):
    settings = written(SMALL + "fail_open: false\nenvoy: { health_check: false }\n")
    assert settings.fail_open_pool is None
    assert settings.make_topology("").health_check is None
    assert written(SMALL + "fail_open: { pool: p }\n").make_topology("").fail_open_pool == "p"
    assert "no pool is called 'q'" in str(written(SMALL + "fail_open: { pool: q }\n"))


@pytest.mark.parametrize(
    ("address", "retry", "why"),
    [
        ("10.0.0.2:8000", "", None),
        ("10.0.0.1:8000", "", "one address is not asked twice"),
        ("10.0.0.2:8000", "envoy: {retry: {to_fallback: false}}", "`envoy.retry.to_fallback` is off"),
    ],
)
def test_a_rule_whose_requests_can_not_move_in_flight_is_a_warning(written, address, retry, why):
    fallback = (
        f'  q: {{ model: m, engine: ollama, nodes: [{{ id: n2, address: "{address}", version: "1", dtype: q4, max_seq_len: 4096 }}] }}'
    )
    text = SMALL.replace("tenants:", f"{fallback}\nrules: [{{ id: r, when: always, pool: p, fallback: q }}]\n{retry}\ntenants:")
    found = [warning.message for warning in written(text).warnings if "in flight" in warning.message]
    assert len(found) == (why is not None)
    assert why is None or why in found[0]


def test_a_stream_has_a_minute_to_begin_unless_the_pool_says_otherwise(written):
    [pool] = written().pools
    assert pool.timeouts.first_byte_ms == 60_000
    [patient] = written(SMALL.replace("engine: vllm", "engine: vllm\n    timeouts: { first_byte_s: null }")).pools
    assert patient.timeouts.first_byte_ms is None


def test_a_pools_policy_for_sensitive_data_that_ext_authz_passes_by_is_a_warning(written):
    text = SMALL.replace("engine: vllm", "engine: vllm\n    sensitive_data: { policy: block }")
    assert not [each for each in written(text).warnings if "ext_authz" in each.message]
    [found] = [each for each in written(text + "gateway: { ext_authz: {} }\n").warnings if "ext_authz" in each.message]
    assert "pool 'p'" in found.message


def test_warnings_come_with_the_settings(written):
    settings = written()
    assert [warning.message for warning in settings.warnings] == ["tenant 't' has no key: nobody can use it"]


def test_a_catalogue_s_tokenizer_is_found_beside_it(written, tmp_path):
    (tmp_path / "tokens").mkdir()
    models = '{"models": [{"model_name": "m", "model_version": "1.0", "dtype": "bf16", "max_seq_len": 10, "tokenizer": "tokens"}]}'
    settings = written(SMALL + "catalog: { source: models.json }\n", models=models)
    assert settings.catalog.model("m").tokenizer == str(tmp_path / "tokens")


def test_a_fingerprint_changes_with_configuration_and_catalogue(written):
    models = '{"models": [{"model_name": "m", "model_version": "1.0", "dtype": "bf16", "max_seq_len": 10}]}'
    text = SMALL + "catalog: { source: models.json }\n"
    first = written(text, models=models).fingerprint
    assert written(text, models=models).fingerprint == first
    assert written(text + "# \n", models=models).fingerprint != first
    assert written(text, models=models.replace("10", "11")).fingerprint != first


def test_an_anchor_repeats_a_whole_value(written):
    text = SMALL.replace("  p:\n", "  p: &p\n").replace("tenants", "defaults: { limits: &few { rpm: 3 } }\ntenants")
    settings = written(text.replace('models: ["*"]', 'models: ["*"], limits: *few'))
    assert settings.tenants[0].limits.rpm == 3


def test_files_that_can_t_be_read_say_so_in_one_line(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # \xe9\n")
    (tmp_path / "control.yaml").write_bytes(b"version: 1\n\x00")
    messages = {name: str(load(tmp_path / name, {})) for name in ("missing.yaml", ".", "latin.yaml", "control.yaml")}
    assert "can't be read: no such file or directory" in messages["missing.yaml"]
    assert "can't be read: is a directory" in messages["."]
    assert "not UTF-8 text (byte 13)" in messages["latin.yaml"]
    assert "control characters are not allowed" in messages["control.yaml"]
    assert {text.count("\n") for text in messages.values()} == {1}


def test_a_file_without_permission_is_reported(tmp_path):
    path = tmp_path / "din.yaml"
    path.write_text(SMALL)
    path.chmod(0)
    loaded = load(path, {})
    if os.access(path, os.R_OK):
        assert isinstance(loaded, Settings), "root reads everything"
    else:
        assert "permission denied" in str(loaded)


def test_a_deeply_nested_file_is_refused(written):
    assert "not YAML" in str(written("version: " + "[" * 20_000))
    catalogue = written(SMALL + "catalog: { source: models.json }\n", models="[" * 100_000)
    assert isinstance(catalogue, ConfigRejected)


def test_anchors_can_t_multiply_without_end(written):
    text = "version: 1\na: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for name, before in zip("bcdefg", "abcdef", strict=True):
        text += f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    assert "the file holds too much" in str(written(text))


def test_ipv6_nodes_keep_their_brackets_everywhere(written):
    settings = written(SMALL.replace("10.0.0.1:8000", "[fd00:0:0::10]:8000"))
    assert str(settings.pools[0].nodes[0].endpoint) == "[fd00::10]:8000"


def test_a_circle_of_aliases_is_refused_at_load(written):
    rejected = written(SMALL + "aliases: { a: { model: b }, b: { models: [c] }, c: { model: a } }\n")
    assert isinstance(rejected, ConfigRejected)
    assert "a -> b -> c -> a" in str(rejected)


ELSEWHERE = "gateway: { reached_at: %s, ext_proc: { %s }, access_log: { address: '0.0.0.0:50052' }, xds: { address: '0.0.0.0:50053' } }\n"


def test_envoys_elsewhere_reach_the_sidecar_under_the_host_that_is_given(written):
    settings = written(SMALL + ELSEWHERE % ("din.example.svc", "address: '0.0.0.0:50051'"))
    topology = settings.make_topology("", settings.make_xds_source("envoy-1"))
    assert topology.ext_proc == (SocketAddress("din.example.svc", 50051),)
    assert topology.access_log == SocketAddress("din.example.svc", 50052)
    assert topology.discovery.address == SocketAddress("din.example.svc", 50053)


@pytest.mark.parametrize(
    ("host", "listens", "complaint"),
    [
        ("din.example.svc", "socket: /run/din/x.sock", "ext_proc.address"),
        ("'din:80'", "address: '0.0.0.0:50051'", "without a port"),
        ("http://din", "address: '0.0.0.0:50051'", "without a port"),
    ],
)
def test_a_host_that_no_envoy_could_use_is_refused(written, host, listens, complaint):
    assert complaint in str(written(SMALL + ELSEWHERE % (host, listens)))


def test_a_pool_is_spoken_to_in_openais_words_unless_it_says_otherwise(written):
    (pool,) = written().pools
    assert (pool.api, pool.unmappable) == ("openai", "refuse")
    assert pool.operations == GENERATING | POOLING | TOKENIZING | TRANSCRIBING | {Operation.COUNT_TOKENS}
    native = SMALL.replace("engine: vllm", "engine: ollama\n    api: native\n    unmappable: drop")
    (pool,) = written(native).pools
    assert (pool.api, pool.unmappable) == ("native", "drop")
    assert pool.operations == {Operation.CHAT, Operation.COMPLETIONS, Operation.EMBEDDINGS}


@pytest.mark.parametrize(
    ("lines", "operations"),
    [
        ("engine: tgi", {Operation.CHAT, Operation.COMPLETIONS, Operation.MESSAGES}),
        ("engine: triton", {Operation.CHAT, Operation.COMPLETIONS, Operation.MESSAGES, Operation.EMBEDDINGS}),
        ("engine: triton\n    operations: generate", {Operation.CHAT, Operation.COMPLETIONS, Operation.MESSAGES}),
        ("engine: triton\n    api: native\n    operations: pooling", {Operation.EMBEDDINGS, Operation.RERANK}),
        (
            "engine: vllm\n    operations: [generate, /v1/rerank]",
            GENERATING | TOKENIZING | {Operation.COUNT_TOKENS, Operation.RERANK},
        ),
    ],
)
def test_a_pool_serves_what_it_says_and_its_engine_has(written, lines, operations):
    (pool,) = written(SMALL.replace("engine: vllm", lines)).pools
    assert pool.operations == operations


def test_a_rule_whose_pool_does_not_serve_its_path_is_refused(written):
    rule = "rules:\n  - { id: ranks, when: { path: [/v1/rerank, /v1/embeddings] }, pool: p }\n"
    rejected = written(SMALL.replace("engine: vllm", "engine: triton") + rule)
    assert isinstance(rejected, ConfigRejected)
    assert "pool 'p' (triton, api openai) does not serve /v1/rerank: no such request can go there" in str(rejected)
    assert "/v1/embeddings: no such request" not in str(rejected)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("engine: vllm\n    api: native", "vllm has no interface of its own"),
        ("engine: triton\n    api: native\n    operations: /v1/chat/completions", "triton does not have /v1/chat/completions natively"),
        ("engine: triton\n    operations: /v1/rerank", "triton does not have /v1/rerank in its OpenAI interface"),
    ],
)
def test_a_native_interface_that_an_engine_has_not_is_a_problem(written, line, complaint):
    rejected = written(SMALL.replace("engine: vllm", line))
    assert isinstance(rejected, ConfigRejected)
    assert complaint in str(rejected)


@pytest.mark.parametrize(
    ("node", "listener", "sound"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", False),
        ("127.0.0.1:8000", "0.0.0.0:8000", False),
        ("[::1]:8000", "[::]:8000", False),
        ("10.0.0.1:8000", "0.0.0.0:8000", True),
        ("10.0.0.1:8000", "10.0.0.1:8001", True),
    ],
)
def test_a_node_is_not_where_envoy_itself_listens(written, node, listener, sound):
    loaded = written(SMALL.replace("10.0.0.1:8000", node) + f'envoy: {{ listener: "{listener}" }}\n')
    assert isinstance(loaded, Settings) == sound
    assert sound or "pools.p.nodes[0].address: here Envoy itself listens" in str(loaded)


@pytest.mark.parametrize(("line", "messages"), [
    ('network: "réal time/é"', "network: 'réal time/é' is not a name"),
    ("limits: { reserved_for_critical: 1.5 }", "limits.reserved_for_critical: less than 1.0 is expected"),
    ("gateway: { ext_authz: { longest_s: quick } }", "gateway.ext_authz.longest_s: a number is expected, not a text"),
    ("version: 1000000000000000000000000000000", "version: the number is too large"),
])  # fmt: skip
def test_a_mistake_is_reported_once_without_pydantic_s_wording(written, line, messages):
    refused = written(SMALL.replace("version: 1\n", f"{line}\n" if line.startswith("version") else f"version: 1\n{line}\n"))
    assert isinstance(refused, ConfigRejected)
    [problem] = [each for each in refused.problems if not each.warning]
    assert f"{problem.path}: {problem.message}".startswith(messages)


def test_a_pools_compute_capability_is_exact_or_a_minimum_that_its_listed_nodes_meet(written):
    sized = SMALL.replace("max_seq_len: 4096", 'compute_capability: "8.6", max_seq_len: 4096')
    assert sized != SMALL
    (pool,) = written(sized.replace("engine: vllm", 'engine: vllm\n    compute_capability: ">=8.0"')).pools
    assert pool.compute_capability == ">=8.0"
    refused = str(written(sized.replace("engine: vllm", 'engine: vllm\n    compute_capability: "9.0"')))
    assert "of this pool has compute_capability 8.6" in refused


IDENTITIES = """
identity:
  jwt: [{ issuer: "https://a.example", audiences: [x], jwks: { file: missing.json } }]
  certificates: [{ name: "*.corp.example", tenant: tt }]
"""


def test_identities_that_can_t_work_are_reported(written):
    rejected = written(SMALL + IDENTITIES)
    assert isinstance(rejected, ConfigRejected)
    messages = {problem.message.rpartition("/")[2]: problem.warning for problem in rejected.problems}
    assert messages == {
        "missing.json is no file here; Envoy needs it when it starts": True,
        "no tenant is called 'tt'": False,
        "Envoy asks no client for a certificate, so it can verify none": True,
    }
    assert isinstance(written(SMALL + IDENTITIES + "  tenant_defaults: { models: [m] }\n"), Settings)
    unlisted = written(SMALL.replace('tenants: [{ id: t, models: ["*"] }]', "") + IDENTITIES + "  tenant_defaults: { models: [m] }\n")
    assert isinstance(unlisted, Settings)
    assert (unlisted.find_tenant("team-1").id, unlisted.find_tenant("team-1").listed) == ("team-1", False)


def test_an_alias_may_be_a_pattern(written):
    settings = written(SMALL + "aliases: { 'claude-*': { model: m } }\n")
    assert settings.routes.preferred_model("claude-sonnet-4-5") == "m"
    assert isinstance(written(SMALL + "aliases: { 'claude?': { model: m } }\n"), ConfigRejected)
