"""The committed Grafana dashboards, typed, for tests that run every query."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from monitoring.rules import COMPONENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression. `unit` overrides the panel's unit for a table's column."""

    expr: str
    legend: str
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, figure or table, with the names of Grafana's model."""

    title: str
    description: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    width: int
    height: int
    stacked: bool
    minimum: float | None
    maximum: float | None
    decimals: int | None
    thresholds: tuple[dict[str, Any], ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled group of panels."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A drop-down at the top. `many`: it may be several values."""

    name: str
    query: str
    many: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        """All panels, row after row."""
        for row in self.rows:
            yield from row.panels


def dashboards() -> dict[str, Dashboard]:
    """Every dashboard by the name of its file; none where only the packages are installed."""
    files = sorted((COMPONENT / "dashboards").glob("*.json"))
    return {file.stem: _dashboard(json.loads(file.read_text())) for file in files}


def _dashboard(model: dict[str, Any]) -> Dashboard:
    # Panels of an open row follow it; those of a collapsed one are inside it.
    rows: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for each in model["panels"]:
        if each["type"] == "row":
            rows.append((each, list(each["panels"])))
        else:
            rows[-1][1].append(each)
    return Dashboard(
        uid=model["uid"],
        title=model["title"],
        description=model["description"],
        variables=tuple(
            Variable(name=each["name"], query=each["definition"], many=each["multi"])
            for each in model["templating"]["list"]
            if each["type"] == "query"
        ),
        rows=tuple(Row(title=row["title"], panels=tuple(map(_panel, panels)), collapsed=row["collapsed"]) for row, panels in rows),
    )


def _panel(model: dict[str, Any]) -> Panel:
    # A custom unit has a no-break space in Grafana's model.
    defaults, overrides = model["fieldConfig"]["defaults"], model["fieldConfig"]["overrides"]
    units = {each["matcher"]["options"]: each["properties"][0]["value"] for each in overrides}
    return Panel(
        title=model["title"],
        description=model["description"],
        kind=model["type"],
        unit=defaults["unit"].replace("\u00a0", " "),
        queries=tuple(
            Query(expr=each["expr"], legend=each["legendFormat"], unit=units.get(each["legendFormat"], ""))
            for each in model["targets"]
        ),
        width=model["gridPos"]["w"],
        height=model["gridPos"]["h"],
        stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        minimum=defaults.get("min"),
        maximum=defaults.get("max"),
        decimals=defaults.get("decimals"),
        thresholds=tuple(each for each in defaults["thresholds"]["steps"] if each["value"] is not None),
        labels=_label_columns(model),
    )


def _label_columns(model: dict[str, Any]) -> tuple[str, ...]:
    """A table's columns that are labels, in order; the others are its queries."""
    if model["type"] != "table":
        return ()
    (organized,) = [each["options"] for each in model["transformations"] if each["id"] == "organize"]
    places: dict[str, int] = organized["indexByName"]
    return tuple(name for name in sorted(places, key=places.__getitem__) if not name.startswith("Value #"))
