"""The dashboard and the alert rules ask only for metrics that there are."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

from refit_protocol.states import SESSION_ENDS
from refit_trainer import Daemon
from refitd.metrics import RefitdMetrics
from tests.conftest import GREEDY, PROMPT
from tests.service.test_metrics import REPORT, SNAPSHOT

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
OPERATING = GRAFANA.parent / "operating.md"
METRIC = re.compile(r"\brefitd_[a-z_]+")
ANY_METRIC = re.compile(r"\b(?:refitd_|vllm:)[a-z_]+")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((GRAFANA / "refitd.json").read_text())
    return parsed


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    listed: list[dict[str, Any]] = group["rules"]
    return listed


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Every series name a scrape can show, histograms by their bucket, sum and count."""
    registry = CollectorRegistry()
    metrics = RefitdMetrics(registry)
    metrics.watch(lambda: SNAPSHOT)
    metrics.refit_committed(REPORT)
    return {family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable.get("definition", "")


def test_every_metric_on_the_dashboard_exists(dashboard: dict[str, Any], exported: set[str]) -> None:
    """A panel that asks for a metric under a wrong name would stay empty without a word."""
    asked = {name for expression in expressions(dashboard) for name in METRIC.findall(expression)}
    assert asked - exported == set()


def test_a_live_scrape_shows_whatever_is_asked_for(
    daemon: Daemon, model: PreTrainedModel, dashboard: dict[str, Any], rules: list[dict[str, Any]]
) -> None:
    """The daemon's own metrics and vLLM's, from a running one, in a text that Prometheus' own parser reads."""
    daemon.refit(model)
    daemon.generate_one(PROMPT, GREEDY)
    url = daemon.status().http_url
    assert url is not None
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    shown = {family.name + suffix for family in families for suffix in SUFFIXES.get(family.type, ("",))}
    asked = [*expressions(dashboard), *(rule["expr"] for rule in rules)]
    names = {name for expression in asked for name in ANY_METRIC.findall(expression)}
    assert any(name.startswith("vllm:") for name in names)
    assert names - shown == set()


def test_alerts_know_why_sessions_end(rules: list[dict[str, Any]]) -> None:
    """A label that no session ever has would keep its alert silent for ever."""
    [rule] = [rule for rule in rules if "refitd_sessions_ended" in rule["expr"]]
    [reasons] = re.findall(r'why=~"([^"]+)"', rule["expr"])
    assert set(reasons.split("|")) <= {event.value for event in SESSION_ENDS}


def test_the_dashboard_is_made_as_grafana_reads_it(dashboard: dict[str, Any]) -> None:
    """Every panel and target goes to the chosen data source, target letters differ, variables used are defined."""
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 36
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = {name for text in json_texts(dashboard) for name in re.findall(r"\$\{?([a-z]+)\}?", text)}
    assert used == variables


def json_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from json_texts(part)


def test_every_metric_has_its_place(dashboard: dict[str, Any], exported: set[str]) -> None:
    """What is worth exporting is worth showing: each metric is on the dashboard, but for those of the load."""
    asked = " ".join(expressions(dashboard))
    families = {name.removesuffix("_bucket") for name in exported if not name.endswith(("_sum", "_count"))}
    elsewhere = {
        "refitd_info",
        "refitd_load_seconds",
        "refitd_load_progress",
        "refitd_restorable",
        "refitd_queued_replies",
    }
    assert {name for name in families if name not in asked} == elsewhere


def test_panels_fit_together(dashboard: dict[str, Any]) -> None:
    """Ids are unique, no two panels overlap, each has a title and says what it shows."""
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_alerts_ask_for_what_there_is_and_are_explained(rules: list[dict[str, Any]], exported: set[str]) -> None:
    """Every rule has an existing metric, a severity and a line in the operator's manual."""
    manual = OPERATING.read_text()
    for rule in rules:
        assert set(METRIC.findall(rule["expr"])) <= exported, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert f"`{rule['alert']}`" in manual
