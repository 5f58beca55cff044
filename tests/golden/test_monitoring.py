"""The dashboards and alert rules in `deploy/` are those of the metrics. `make golden` rewrites them."""

import json
import os
import re
from pathlib import Path

import yaml

from din_extproc.observe import instruments as of
from din_extproc.roles.configure.monitoring import monitoring_files, write_monitoring
from tests.support.promql import metrics_of, queries_in, sample_names

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KNOWN = {name for each in of.ALL for name in sample_names(each)}


def queries() -> dict[str, str]:
    """Every query of every file, by where it stands."""
    return {where: query for name, text in monitoring_files().items() for where, query in queries_in(name, text).items()}


def test_the_files_in_deploy_are_what_the_code_says():
    if os.environ.get("DIN_REWRITE_GOLDENS") == "1":
        write_monitoring(DEPLOY)
    assert {name: (DEPLOY / name).read_text() for name in monitoring_files()} == monitoring_files()


def test_every_metric_in_every_query_is_one_of_ours_and_every_one_of_ours_is_asked_for():
    asked = {where: metrics_of(query) for where, query in queries().items()}
    assert {where: names - KNOWN for where, names in asked.items() if names - KNOWN} == {}
    assert all(asked.values())
    used = set().union(*asked.values())
    unseen = {each.name for each in of.ALL if not set(sample_names(each)) & used}
    assert unseen == set()


def test_labels_in_queries_are_those_of_their_metrics():
    labels = {name: {of.label(attribute) for attribute in each.labels} for each in of.ALL for name in sample_names(each)}
    for where, query in queries().items():
        for name, inner in re.findall(r"([a-z_]+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~", inner)) <= labels[name], where
        grouped = {text.strip() for by in re.findall(r"by \(([^)]*)\)", query) for text in by.split(",")} - {"le"}
        assert grouped <= set().union(*(labels[name] for name in metrics_of(query))), where


def test_a_dashboard_s_panels_do_not_overlap_and_legends_name_labels_that_are_there():
    for name, text in monitoring_files().items():
        if not name.endswith(".json"):
            continue
        panels = json.loads(text)["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(panels)
        for panel in panels:
            for target in panel["targets"]:
                grouped = {text.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for text in by.split(",")}
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, panel["title"]


def test_alerts_have_names_of_their_own_and_say_where_to_look():
    (group,) = yaml.safe_load(monitoring_files()["prometheus/rules/din-extproc.yml"])["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    assert all(rule["annotations"]["description"].startswith("Look at: ") for rule in group["rules"])
