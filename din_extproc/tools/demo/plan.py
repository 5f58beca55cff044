"""The addresses of a demo and its `din.yaml`. Pure: ports, keys and nodes are arguments."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from msgspec import Struct

from din_extproc.admit.keys import NewKey

CHAT_ALIAS = "bx-fast-chat"
CHAT_MODEL = "smollm2-135m-instruct"
EMBEDDING_MODEL = "smollm2-135m-embeddings"
CONTEXT_TOKENS = 2048
PARALLEL = 4
TRIAL_RPM = 3
"""Requests per minute of the tenant that demonstrates a limit."""


class DemoNode(Struct, frozen=True):
    """One engine of the demo."""

    id: str
    port: int
    embeds: bool = False


class DemoPlan(Struct, frozen=True):
    """The plan of a demo, made before anything starts. All addresses are on loopback."""

    folder: Path
    listener_port: int
    envoy_admin_port: int
    redis_port: int
    access_log_port: int
    admin_port: int
    nodes: Sequence[DemoNode]
    simulated: bool
    """Whether the nodes are engine simulators instead of real models."""
    key: NewKey
    trial_key: NewKey
    dashboard_key: NewKey

    @property
    def url(self) -> str:
        """The URL that clients call."""
        return f"http://127.0.0.1:{self.listener_port}"

    @property
    def dashboard(self) -> str:
        """The dashboard's address with its key, which stays in the browser."""
        return f"http://127.0.0.1:{self.admin_port}/dashboard#key={self.dashboard_key.text}"

    @property
    def socket(self) -> Path:
        """The socket by which Envoy reaches the sidecar."""
        return self.folder / "ext_proc.sock"


def demo_yaml(plan: DemoPlan) -> str:
    """Return the demo's configuration: two chat nodes in one pool, an embedding node in another, a tenant and one with a tiny limit."""
    engine = "vllm" if plan.simulated else "llamacpp"
    config = {
        "version": 1,
        "gateway": {
            "ext_proc": {"socket": str(plan.socket)},
            "access_log": {"address": f"127.0.0.1:{plan.access_log_port}"},
            "admin": {"address": f"127.0.0.1:{plan.admin_port}"},
            "dashboard": {"keys": [{"id": "dashboard", "hash": plan.dashboard_key.hash}]},
        },
        "store": {"url": f"redis://127.0.0.1:{plan.redis_port}/0"},
        "aliases": {CHAT_ALIAS: {"model": CHAT_MODEL}},
        "pools": {
            "demo-chat": {"model": CHAT_MODEL, "engine": engine, "nodes": _make_nodes(plan, embed=False)},
            "demo-embeddings": {"model": EMBEDDING_MODEL, "engine": engine, "nodes": _make_nodes(plan, embed=True)},
        },
        "rules": [
            {"id": "embedding-fastpath", "when": {"path": ["/v1/embeddings"]}, "pool": "demo-embeddings"},
            {"id": "everything-else", "when": "always", "pool": "demo-chat"},
        ],
        "tenants": [
            _make_tenant("demo", plan.key, {"rpm": 600, "tpm": 200_000, "max_streams": 8}),
            _make_tenant("trial", plan.trial_key, {"rpm": TRIAL_RPM, "tpm": 20_000, "max_streams": 2}),
        ],
        "envoy": {"listener": f"127.0.0.1:{plan.listener_port}", "admin": f"127.0.0.1:{plan.envoy_admin_port}"},
    }
    return yaml.safe_dump(config, sort_keys=False, width=140)


def curl_lines(plan: DemoPlan) -> tuple[tuple[str, str], ...]:
    """Return example commands, each with a title."""
    chat = _format_curl(
        plan, plan.key, '{"model":"bx-fast-chat","messages":[{"role":"user","content":"Say hello."}],"max_tokens":40}', "-si"
    )
    stream = _format_curl(
        plan,
        plan.key,
        '{"model":"bx-fast-chat","stream":true,"messages":[{"role":"user","content":"Tell a story."}],"max_tokens":80}',
        "-sN",
    )
    short = _format_curl(plan, plan.trial_key, '{"model":"bx-fast-chat","messages":[{"role":"user","content":"Hi"}],"max_tokens":1}', "-si")
    header_filter = "grep -iE '^(HTTP|x-ratelimit|retry-after)|rate_limit'"
    loop = f"for i in $(seq {TRIAL_RPM + 1}); do {short} | {header_filter}; done"
    return (("chat", chat), ("stream", stream), (f"over the limit: the trial key may ask {TRIAL_RPM} times a minute", loop))


def _format_curl(plan: DemoPlan, key: NewKey, body: str, options: str) -> str:
    headers = f"-H 'authorization: Bearer {key.text}' -H 'content-type: application/json'"
    return f"curl {options} {plan.url}/v1/chat/completions {headers} -d '{body}'"


def _make_nodes(plan: DemoPlan, *, embed: bool) -> list[dict[str, object]]:
    fixed = {"version": "2.0.0", "dtype": "q4_1", "max_seq_len": CONTEXT_TOKENS, "max_concurrency": PARALLEL}
    return [{"id": node.id, "address": f"127.0.0.1:{node.port}", **fixed} for node in plan.nodes if node.embeds == embed]


def _make_tenant(name: str, key: NewKey, limits: dict[str, int]) -> dict[str, object]:
    return {"id": name, "keys": [{"id": name, "hash": key.hash}], "models": ["bx-*", CHAT_MODEL, EMBEDDING_MODEL], "limits": limits}
