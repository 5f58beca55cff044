"""The generated reference pages say what the code says. `make golden` rewrites them."""

import os
import re
from pathlib import Path

import pytest

from tests.support.reference import commands_page, configuration_page, metrics_page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docs" / "pages" / "reference"
PAGES = {"configuration.md": configuration_page, "cli.md": commands_page, "metrics.md": metrics_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    made = PAGES[name]()
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        (FOLDER / name).write_text(made)
    assert (FOLDER / name).read_text() == made


def test_the_reference_has_every_section_of_the_example():
    keys = set(re.findall(r"^\| `([a-z_0-9]+)` \|", (FOLDER / "configuration.md").read_text(), re.MULTILINE))
    sections = set(re.findall(r"^([a-z_]+):", (ROOT / "envoy" / "din.yaml").read_text(), re.MULTILINE))
    assert sections <= keys
    assert {"message_ms", "body_limit_mib", "on_error", "reached_at", "max_streams", "scheduler"} <= keys
