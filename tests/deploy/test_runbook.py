"""Every alert has its section in the runbook, and what is recorded for autoscaling is made from metrics that are there."""

import re

import yaml

from din_extproc.observe import instruments
from tests.deploy.shipped import DEPLOY

RULES = [
    rule
    for file in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
HEADINGS = set(re.findall(r"^## (Din\w+)$", (DEPLOY / "docs" / "pages" / "operations" / "runbook.md").read_text(), re.MULTILINE))


def test_every_alert_has_a_section():
    assert {rule["alert"] for rule in RULES if "alert" in rule} <= HEADINGS


def test_what_engines_scale_by_is_made_from_our_metrics():
    [recorded] = [rule for rule in RULES if "record" in rule]
    values = yaml.safe_load((DEPLOY / "helm" / "din-extproc" / "values.yaml").read_text())
    assert recorded["record"] == values["autoscaling"]["queueMetric"]
    known = {each.prometheus for each in instruments.ALL} | {instruments.label(name) for each in instruments.ALL for name in each.labels}
    assert set(re.findall(r"\b(?:din|gen_ai)_\w+", recorded["expr"])) <= known


def test_links_of_the_guides_lead_somewhere():
    root = DEPLOY.parent
    pages = [root / "SECURITY.md", root / "README.md"]
    links = {(page, target) for page in pages for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text())}
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []
