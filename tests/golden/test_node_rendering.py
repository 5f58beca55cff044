"""The complete configuration of the Envoy in front of a node's engine. `make golden` rewrites the expectation."""

import os
from pathlib import Path

import pytest

from din_extproc.roles.configure.render import RenderFailed, render_node
from din_extproc.settings.node import NodeSettings, load_node

SHIPPED = Path(__file__).parent.parent.parent / "envoy"


def test_the_shipped_node_renders_to_its_golden_file_and_envoy_accepts_it():
    settings = load_node(SHIPPED / "node.din.yaml", {})
    assert isinstance(settings, NodeSettings), settings
    rendered = render_node(settings, validate=True)
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        (SHIPPED / "node.yaml").write_text(rendered)
    assert rendered == (SHIPPED / "node.yaml").read_text()


def test_a_node_without_an_envoy_in_front_has_nothing_to_render(tmp_path):
    text = (SHIPPED / "node.din.yaml").read_text().partition("\n# The Envoy in front")[0]
    (tmp_path / "node.yaml").write_text(text)
    (tmp_path / "models.json").write_bytes((SHIPPED / "models.json").read_bytes())
    settings = load_node(tmp_path / "node.yaml", {})
    assert isinstance(settings, NodeSettings), settings
    with pytest.raises(RenderFailed, match="no section `proxy`"):
        render_node(settings)
