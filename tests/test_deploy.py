"""The dashboard, the alert rules and the page on metrics, against the metrics."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_ctx_offload.adapters.catalogue import CONNECTOR_LABEL, METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus-rules.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PAGE = (ROOT / "docs/metrics.md").read_text()

# vLLM's own that are shown beside ours.
VLLMS = {
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
}
SUFFIXES = {"counter": ["_total"], "gauge": [""]}
SUFFIXES["histogram"] = ["_bucket", "_sum", "_count"]
SHOWN = {
    PREFIX + name + suffix: metric
    for name, metric in METRICS.items()
    for suffix in SUFFIXES[metric.kind]
}
BASE_LABELS = {"model_name", "engine", CONNECTOR_LABEL, "instance", "le"}
NAME = re.compile(r"vllm:\w+")
# (labels) after by, without, on, ignoring; and names before a matcher's operator.
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"(vllm:\w+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


EXPRESSIONS = {
    **{
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    },
    **{f"alert {alert['alert']}": alert["expr"] for alert in ALERTS},
}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_names_only_metrics_that_are_shown(where: str) -> None:
    names = set(NAME.findall(EXPRESSIONS[where]))
    assert names
    assert names <= SHOWN.keys() | VLLMS


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_uses_only_labels_that_its_metrics_have(where: str) -> None:
    expression = EXPRESSIONS[where]
    for name, matchers in SELECTOR.findall(expression):
        own = set(SHOWN[name].labels) if name in SHOWN else set()
        assert set(MATCHER.findall(matchers)) <= own | BASE_LABELS
    own = set(
        itertools.chain(
            *(SHOWN[n].labels for n in NAME.findall(expression) if n in SHOWN)
        )
    )
    for group in GROUPING.findall(expression):
        assert {label.strip() for label in group.split(",")} <= own | BASE_LABELS


def test_the_rate_is_taken_of_counters_and_histograms_only() -> None:
    taken = re.compile(r"\b(?:rate|increase)\(\s*(vllm:\w+)")
    for where, expression in EXPRESSIONS.items():
        for name in taken.findall(expression):
            assert name in VLLMS or SHOWN[name].kind != "gauge", where


def test_every_metric_is_on_the_dashboard() -> None:
    text = json.dumps(DASHBOARD)
    assert [name for name in METRICS if PREFIX + name not in text] == []


def test_legends_show_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\w+", " ".join(GROUPING.findall(target["expr"]))))
            assert used <= kept, panel["title"]


def test_panels_have_their_own_place_and_id_and_say_what_they_show() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = itertools.product(
            range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        )
        for cell in cells:
            assert cell not in places, panel["title"]
            assert cell[0] < 24
            places.add(cell)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] for panel in panels())


def test_variables_that_are_used_are_declared() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == declared


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_what_and_why(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert {*alert["annotations"]} == {"summary", "reason"}
    assert alert["annotations"]["reason"].endswith(".")
    assert len(alert["annotations"]["reason"]) > 80


def test_alerts_have_names_of_their_own() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("CtxOffload") for name in names)


ROW = re.compile(
    r"^\| `(vllm:\w+)` \| (\w+) \|([^|]*)\|([^|]+)\|([^|]+)\|$", re.MULTILINE
)


def test_the_page_lists_every_metric_with_its_type_and_labels() -> None:
    listed = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, meaning, high in ROW.findall(PAGE)
        if meaning.strip() and high.strip()
    }
    expected = {
        PREFIX + name + ("_total" if metric.kind == "counter" else ""): (
            metric.kind,
            metric.labels,
        )
        for name, metric in METRICS.items()
    }
    assert listed == expected
