"""node.yaml: what it says, what the catalogue adds, and what is wrong with it, at its line."""

import json
from pathlib import Path

import pytest

from din_extproc.domain.node import Endpoint
from din_extproc.schedule.batch import BatchLimits
from din_extproc.settings.node import NodeSettings, load_node
from din_extproc.settings.problems import ConfigRejected

SHIPPED = Path(__file__).parent.parent.parent.parent / "envoy" / "node.din.yaml"
SMALLEST = """\
version: 1
node: { id: gpu-1, address: 10.0.0.7:8000, model: m, version: 2025.3.1 }
engine: { kind: KIND, address: 127.0.0.1:8000 }
registry: { addresses: [http://127.0.0.1:9091/] }
catalog: { source: models.json }
"""
ENTRY = {"model_name": "m", "model_version": "2025.3.1", "dtype": "fp8", "max_seq_len": 4096, "tensor_parallel": 2}


def written(folder, text=SMALLEST, kind="vllm", **entry):
    (folder / "models.json").write_text(json.dumps({"models": [{**ENTRY, **entry}]}))
    (folder / "node.yaml").write_text(text.replace("KIND", kind))
    return load_node(folder / "node.yaml", {})


def problems(loaded):
    assert isinstance(loaded, ConfigRejected), loaded
    return [(problem.path, problem.message) for problem in loaded.problems]


def test_what_the_node_does_not_say_the_catalogue_does(tmp_path):
    settings = written(tmp_path)
    assert (settings.node.dtype, settings.node.max_seq_len, settings.node.tp_world_size) == ("fp8", 4096, 2)
    assert settings.registries == ("http://127.0.0.1:9091",)
    assert (settings.served_model, settings.proxy, settings.window) == ("m", None, None)


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("vllm", "http://127.0.0.1:8000/metrics"),
        ("triton", "http://127.0.0.1:8002/metrics"),
        ("tensorrt_llm", "http://127.0.0.1:8000/prometheus/metrics"),
        ("ollama", "http://127.0.0.1:8000/api/ps"),
    ],
)
def test_every_engine_has_its_metrics_where_it_usually_has_them(tmp_path, kind, url):
    assert written(tmp_path, kind=kind).metrics_url == url


def test_weights_that_the_catalogue_knows_must_be_somewhere(tmp_path):
    assert problems(written(tmp_path, sha256="0" * 64)) == [("weights", "the catalogue knows the weights' sha256")]
    settings = written(tmp_path, SMALLEST + "weights: { path: w }\n", sha256="0" * 64)
    assert (settings.weights, settings.sha256) == (tmp_path / "w", "0" * 64)


def test_a_version_that_the_catalogue_does_not_know_is_reported(tmp_path):
    assert problems(written(tmp_path, model_version="2024.1")) == [("node.version", "the catalogue has 'm' in versions 2024.1")]


def test_without_a_catalogue_the_node_says_everything(tmp_path):
    text = SMALLEST.replace("catalog: { source: models.json }\n", "")
    assert ("node", "dtype is missing") in problems(written(tmp_path, text))
    full = text.replace("version: 2025.3.1", "version: 2025.3.1, dtype: bf16, max_seq_len: 100")
    assert written(tmp_path, full).node.tp_world_size == 1


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("kind: VLLM", "engine.kind"),
        ("addresses: [ftp://x]", "registry.addresses[0]"),
        ("address: 0.0.0.0:8000", "node.address"),
        ("adress: 10.0.0.7:8000", "node.adress"),
    ],
)
def test_what_is_wrong_is_reported_at_its_place(tmp_path, wrong, place):
    name = wrong.partition(":")[0]
    right = {"kind": "kind: KIND", "addresses": "addresses: [http://127.0.0.1:9091/]"}.get(name, "address: 10.0.0.7:8000")
    assert place in [found for found, _ in problems(written(tmp_path, SMALLEST.replace(right, wrong, 1)))]


def test_the_shipped_example_is_sound_and_batches(tmp_path):
    settings = load_node(SHIPPED, {})
    assert isinstance(settings, NodeSettings), settings
    assert settings.window == BatchLimits(8192, 0.05)
    topology = settings.make_topology()
    assert topology.pools[0].nodes[0].endpoint == Endpoint("127.0.0.1", 8000)
    assert str(topology.agent.host) == "127.0.0.1"
    assert topology.timeouts.message_ms > 50


def test_a_batch_window_can_be_switched_off(tmp_path):
    settings = written(tmp_path, SMALLEST + "proxy: { batch: false }\n")
    assert (settings.window, settings.proxy is None) == (None, False)
