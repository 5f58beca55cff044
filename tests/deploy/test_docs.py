"""The documentation site builds without a warning, so no link or anchor is broken, and loads nothing from elsewhere."""

import re
import subprocess
import sys

from tests.deploy.shipped import ROOT


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        "deploy/docs/mkdocs.yml",
        "--site-dir",
        tmp_path,
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, env={"NO_MKDOCS_2_WARNING": "1"})
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//(?!127\.0\.0\.1)([^"]+)"')
    external = {(page.name, found) for page in pages for found in loaded.findall(page.read_text()) if "canonical" not in found}
    assert external == set()


def test_the_readme_stays_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
