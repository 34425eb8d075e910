"""The parts of a dashboard as plain values. Grafana's JSON and the page of `swarm dashboard` are
both built from them.

A query may contain Grafana variables; the page fills them in itself (`page/units.js`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

GRID_WIDTH = 24
"""Columns of Grafana's grid."""


class PanelKind(StrEnum):
    """How a panel shows its series."""

    TIMESERIES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    """One row per label set, one column per query; a query's legend is its column's title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression. `legend` uses `{{label}}` templates; `unit` overrides the panel's unit for a
    table column.
    """

    expr: str
    legend: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Values from `value` upwards are shown in `color` (Grafana's colour names)."""

    value: float
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart or table. `unit` is a Grafana unit id; `width` is in columns of the 24-column grid,
    `height` in grid rows.

    `labels` are a table's label columns, in order. `minimum` and `maximum` fix the axis if the
    range is known.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = PanelKind.TIMESERIES
    width: int = 8
    height: int = 8
    stacked: bool = False
    minimum: float | None = None
    maximum: float | None = None
    decimals: int | None = None
    thresholds: tuple[Threshold, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled group of panels, laid out from left to right. A `collapsed` row opens on a click."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A drop-down at the top of a dashboard, filled by a query such as
    `label_values(metric, label)`.
    """

    name: str
    label: str
    query: str
    many: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page. `uid` is fixed, so that links to it keep working."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        """All panels, row after row."""
        for row in self.rows:
            yield from row.panels


def series(expr: str, legend: str, unit: str = "") -> Query:
    """Shorthand for a `Query`."""
    return Query(expr=expr, legend=legend, unit=unit)


def quantiles(histogram: str, matchers: str, by: str, legend: str) -> tuple[Query, ...]:
    """Median and 95th percentile of a histogram, by the labels `by`; `legend` distinguishes series
    of the same quantile.
    """
    rate = f"sum by ({by}, le) (rate({histogram}_bucket{{{matchers}}}[$__rate_interval]))"
    return tuple(
        Query(expr=f"histogram_quantile({quantile}, {rate})", legend=f"p{round(100 * quantile)} {legend}".strip())
        for quantile in (0.5, 0.95)
    )


def mean(histogram: str, matchers: str, by: str) -> str:
    """Mean of a histogram's observations, by the labels `by`; no value if nothing is observed."""
    total, count = (f"sum by ({by}) (rate({histogram}_{part}{{{matchers}}}[$__rate_interval]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"
