"""A small configuration with two models behind one name, read as a whole."""

from pathlib import Path

from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

DIN = """
version: 1
aliases: { auto: { models: [small, large] } }
pools:
  a: { model: small, engine: vllm, nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1", dtype: bf16, max_seq_len: 4096 }] }
  b: { model: large, engine: vllm, nodes: [{ id: n2, address: "10.0.0.2:8000", version: "1", dtype: bf16, max_seq_len: 4096 }] }
rules: [{ id: r, when: always, pool: a }]
tenants: [{ id: t, models: ["*"], keys: [{ id: k, hash: "sha256$00112233445566778899aabbccddeeff$%s" }] }]
""" % ("0" * 64)


def read(folder: Path, more: str) -> Settings | ConfigRejected:
    """Return the configuration with more sections."""
    (folder / "din.yaml").write_text(DIN + more)
    return load(folder / "din.yaml", {})
