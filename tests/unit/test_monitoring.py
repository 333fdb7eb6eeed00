"""The dashboard for Grafana and the alerts for Prometheus name what `/metrics` shows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "memserve.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to each series."""


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Each name that Prometheus stores, with its labels."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    found = {}
    for family in reference.metric_families():
        labels = {label for sample in family.samples for label in sample.labels}
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_series_exists_with_its_labels(expression: str, series: dict[str, set[str]]) -> None:
    names = re.findall(r"\bmemserve_\w+", expression)
    assert names and not [name for name in names if name not in series], "/metrics does not show these"
    known = SCRAPED.union(*(series[name] for name in names), {"le"} if "_bucket" in expression else set())
    filtered = {label for inside in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)=", inside)}
    grouped = {label.strip() for inside in re.findall(r"by \(([^)]*)\)", expression) for label in inside.split(",")}
    described = [series[name] for name in names if series[name]]
    if described:  # a family whose labels come with its first sample shows none here
        assert filtered | grouped <= known | ({"status", "route", "cause", "limit"} & filtered.union(grouped))


def test_counters_are_read_as_rates(series: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        for name in re.findall(r"\bmemserve_\w+(?:_total|_bucket)\b", expression):
            if name != "memserve_router_metadata_failures_total":  # there: whether there ever was one
                assert re.search(rf"(?:rate|increase)\({name}\b", expression), (name, expression)


def test_a_panel_has_a_place_of_its_own_and_a_word_about_it() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert panel["description"].endswith(".") and panel["datasource"]["uid"] == "${datasource}"


def test_parentheses_of_expressions_close() -> None:
    for expression in EXPRESSIONS:
        depth = 0
        for sign in expression:
            depth += (sign in "([{") - (sign in ")]}")
            assert depth >= 0, expression
        assert depth == 0, expression


def test_each_alert_has_a_severity_and_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["alert"].startswith("Memserve")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))


def test_options_that_alerts_advise_exist() -> None:
    known = (ROOT / "docs" / "reference" / "REFERENCE.md").read_text()
    for rule in rules():
        for option in re.findall(r"--[a-z][a-z-]+", rule["annotations"]["action"]):
            assert f"`{option}`" in known, option
