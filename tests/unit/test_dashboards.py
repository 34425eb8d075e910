"""What a dashboard must keep to be of use in anybody's Grafana: the rules of Grafana's dashboard
linter, and some of our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from monitoring.rules import COMPONENT
from tests.monitoring.dashboards import Dashboard, Panel, Query, dashboards
from tests.monitoring.promql import substituted

DASHBOARDS = dashboards()
GRID_WIDTH = 24
KINDS = {"timeseries", "stat", "table"}
APPLY_LIMIT_BYTES = 262_144
"""What `kubectl apply` may store of an object in its last-applied annotation."""
UNITS = {"short", "percentunit", "percent", "s", "bytes", "Bps", "sci"}
COUNTERS_OF_GAUGE_NAMES = {"nats_stream_first_seq", "nats_stream_last_seq", "nats_varz_in_bytes", "nats_varz_out_bytes"}

each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS.keys())


def _queries(dashboard: Dashboard) -> Iterator[tuple[Panel, Query]]:
    for panel in dashboard.panels():
        for query in panel.queries:
            yield panel, query


def _model(dashboard: Dashboard) -> dict[str, Any]:
    (name,) = [name for name, each in DASHBOARDS.items() if each is dashboard]
    model: dict[str, Any] = json.loads((COMPONENT / "dashboards" / f"{name}.json").read_text())
    return model


def _model_panels(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in model["panels"]:
        yield panel
        yield from panel.get("panels", [])


@each_dashboard
def test_every_panel_has_a_title_of_its_own_a_description_and_a_known_unit(dashboard: Dashboard) -> None:
    titles: set[tuple[str, str]] = set()
    for row in dashboard.rows:
        for panel in row.panels:
            assert panel.title.strip() and panel.title[0].isupper() or panel.title.startswith("vLLM"), panel.title
            assert (row.title, panel.title) not in titles, f"two panels {panel.title} in row {row.title}"
            titles.add((row.title, panel.title))
            assert panel.description.endswith("."), f"{panel.title}: a description is a sentence"
            for unit in (panel.unit, *(query.unit for query in panel.queries if query.unit)):
                assert unit in UNITS or re.fullmatch(r"suffix: \S+", unit), f"{panel.title}: unit {unit!r}"
            assert panel.queries and panel.kind in KINDS, panel.title
    assert dashboard.description and dashboard.title


@each_dashboard
def test_every_query_goes_by_the_dashboard_s_variables(dashboard: Dashboard) -> None:
    names = {variable.name for variable in dashboard.variables}
    assert {"job"} < names
    for panel, query in _queries(dashboard):
        used = set(re.findall(r"\$\{?(\w+)\}?", query.expr)) - {"__rate_interval"}
        assert used <= names, f"{panel.title}: {used - names} is no variable of the dashboard"
        for selector in re.findall(r"[\w:]+\{[^}]*\}", query.expr):
            assert 'job=~"$job"' in selector or selector.startswith("ALERTS"), f"{panel.title}: {selector} ignores $job"
        unselected = re.sub(r"[\w:]+\{[^}]*\}", "", query.expr)
        assert not re.search(r"\b(swarm|nats|vllm|node|process)[_:]\w+", unselected), f"{panel.title}: a metric without a selector"
        for variable in used:
            assert f'=~"${variable}"' in query.expr, f"{panel.title}: ${variable} may be several values: match it with =~"


@each_dashboard
def test_every_window_is_grafana_s_rate_interval(dashboard: Dashboard) -> None:
    for panel, query in _queries(dashboard):
        windows = re.findall(r"\[([^\]]*)\]", query.expr)
        assert set(windows) <= {"$__rate_interval"}, f"{panel.title}: {windows}"


@each_dashboard
def test_counters_are_only_read_as_rates_and_gauges_never(dashboard: Dashboard) -> None:
    for panel, query in _queries(dashboard):
        for metric in re.findall(r"([\w:]+_total)\{", query.expr):
            allowed = metric == "swarm_trainer_corrupt_checkpoints_total"  # shown as it is: once is too often
            in_rate = re.search(rf"(?:rate|increase)\({re.escape(metric)}\{{", query.expr)
            assert in_rate or allowed, f"{panel.title}: {metric} without rate"
        for metric in re.findall(r"(?:rate|increase)\(([\w:]+)", query.expr):
            known = metric.endswith(("_total", "_sum", "_count", "_bucket")) or metric in COUNTERS_OF_GAUGE_NAMES
            assert known or metric == "nats_varz_jetstream_stats_api_errors", (
                f"{panel.title}: rate of {metric}, which is no counter"
            )


@each_dashboard
def test_a_figure_over_a_fixed_time_names_it_as_the_curves_beside_it_are_over_another(dashboard: Dashboard) -> None:
    for panel, query in _queries(dashboard):
        for minutes in re.findall(r":(?:rate|mean|ratio)(\d+)m\b", query.expr):
            assert f"{minutes} min" in f"{panel.title} {query.legend}", f"{panel.title}: {query.expr}"


@each_dashboard
def test_a_legend_tells_the_series_of_a_panel_apart(dashboard: Dashboard) -> None:
    for panel, query in _queries(dashboard):
        assert query.legend, f"{panel.title}: no legend"
        kept = re.findall(r"\bby \(([^)]*)\)", query.expr)
        labels = {label.strip() for label in kept[0].split(",")} - {"le", ""} if kept else set()
        shown = set(re.findall(r"{{(\w+)}}", query.legend))
        if panel.kind == "table":
            assert set(panel.labels) == labels, f"{panel.title}: {query.legend} has the labels {labels}"
            continue
        assert shown <= labels or not kept, f"{panel.title}: {shown - labels} is not among the labels that are kept"
        # A node's own page shows one node: its name need not be in a legend. An account is only one
        # label of a stream's name.
        implied = {"node"} if dashboard.uid == "swarm-node" else set()
        implied |= {"account"} if "consumer_name" in labels else set()
        if not query.expr.startswith("count("):
            assert labels - shown <= implied, f"{panel.title}: series differ in {labels - shown}, the legend does not say"
    for panel in dashboard.panels():
        legends = [query.legend for query in panel.queries]
        assert len(set(legends)) == len(legends), f"{panel.title}: two queries under one legend"


@each_dashboard
def test_the_json_model_is_fixed_and_asks_for_nothing(dashboard: Dashboard) -> None:
    model = _model(dashboard)
    assert re.fullmatch(r"[a-z0-9-]{1,40}", model["uid"])
    assert model["editable"] is False
    assert "__inputs" not in model and "__requires" not in model and "id" not in model
    assert model["templating"]["list"][0]["type"] == "datasource"
    text = json.dumps(model)
    assert len(json.dumps(model, indent=1, ensure_ascii=False).encode()) < 0.8 * APPLY_LIMIT_BYTES
    uids = set(re.findall(r'"datasource": \{"type": "prometheus", "uid": "([^"]*)"', text))
    assert uids == {"${datasource}"}, f"hard-coded data sources: {uids}"


@each_dashboard
def test_panels_have_ids_of_their_own_and_lie_beside_each_other(dashboard: Dashboard) -> None:
    model = _model(dashboard)
    ids = [panel["id"] for panel in _model_panels(model)]
    assert len(set(ids)) == len(ids)
    for layer in (model["panels"], *(panel["panels"] for panel in model["panels"] if panel.get("panels"))):
        taken: dict[tuple[int, int], str] = {}
        for panel in layer:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= GRID_WIDTH, panel["title"]
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                    taken[x, y] = panel["title"]


@each_dashboard
def test_every_target_of_a_panel_has_a_letter_and_tables_ask_for_the_present(dashboard: Dashboard) -> None:
    for panel in _model_panels(_model(dashboard)):
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters)
        for target in panel.get("targets", []):
            assert target["instant"] is (panel["type"] == "table")


def test_dashboards_have_uids_and_titles_of_their_own_and_are_the_three_that_alerts_link_to() -> None:
    assert {dashboard.uid for dashboard in DASHBOARDS.values()} == {"swarm-overview", "swarm-node", "swarm-nats"}
    assert len({dashboard.title for dashboard in DASHBOARDS.values()}) == 3


def test_variables_are_filled_in_where_there_is_no_grafana() -> None:
    expr = 'rate(a_total{job=~"$job", node=~"${node}"}[$__rate_interval])'
    assert substituted(expr, rate_interval="15s", values={"node": "alpha"}) == 'rate(a_total{job=~".*", node=~"alpha"}[15s])'
