"""`make test-engines`, with a vLLM that runs: here the modelled one stands in for it. llama.cpp is the real one."""

import shlex
import shutil
import subprocess

import pytest

from tests.support import real_engines
from tests.support.engine_fleet import EngineFleet
from tests.support.pages import ROOT

pytestmark = pytest.mark.e2e


def test_an_engine_that_somebody_else_runs_is_asked_beside_the_real_ones(capsys):
    options = {"decode_rate": 200.0, "max_model_len": 4096, "auto_tool_choice": True}
    engines = {"chat": {"model": "org/theirs", **options}, "pooled": {"model": "org/vectors", "runner": "pooling"}}
    with EngineFleet(engines) as fleet:
        theirs = f"{fleet.members['chat'].address}=org/theirs"
        asked = [shutil.which("make"), "--no-print-directory", "--dry-run", "test-engines", f"VLLM={theirs}"]
        line = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        words = shlex.split(line)
        arguments = words[words.index("tests.support.real_engines") + 1 :]
        assert arguments == ["--vllm", theirs]
        assert real_engines.main([*arguments, "--quick", "--vllm-pooling", f"{fleet.members['pooled'].address}=org/vectors"]) == 0
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert rows[0] == ["step", "llama.cpp", "vLLM"]
    results = {step: vllm for step, _, vllm in rows[2:]}
    assert results.pop("killed mid-stream") == "not ours to kill"
    assert results.pop("over-long context") == "400 context_length_exceeded"
    assert results.pop("bad parameter") == "400 invalid_request"
    assert set(results.values()) == {"ok"}
