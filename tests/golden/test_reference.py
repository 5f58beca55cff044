"""The committed reference of din.yaml is what the classes say. `make golden` rewrites it."""

import os
import re
from pathlib import Path

from tests.support.reference import reference

FILE = Path(__file__).parents[2] / "envoy" / "REFERENCE.md"


def test_the_reference_is_what_the_classes_say():
    made = reference()
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        FILE.write_text(made)
    assert FILE.read_text() == made


def test_every_key_of_the_example_stands_in_it():
    keys = set(re.findall(r"^\| `([a-z_0-9]+)` \|", FILE.read_text(), re.MULTILINE))
    example = (FILE.parent / "din.yaml").read_text()
    sections = set(re.findall(r"^([a-z_]+):", example, re.MULTILINE))
    assert sections <= keys
    assert {"message_ms", "body_limit_mib", "on_error", "reached_at", "max_streams", "scheduler"} <= keys
