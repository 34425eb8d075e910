"""Finds the metrics that a PromQL expression reads, and fills in its Grafana variables.

It knows just enough of the grammar to check the metric names in rules and panels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORDS = frozenset(
    {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool", "inf", "nan"}
)
"""PromQL keywords, which are never metric names."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHERS = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_NAME = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\w)(?!\s*\()")
_DURATION = re.compile(r"\b\d+(?:ms|[smhdwy])\b")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def metrics_of(expr: str) -> set[str]:
    """Names of the series that `expr` selects; a histogram's parts keep their suffixes.

    Example: `sum by (node) (rate(a_total{job="x"}[5m])) > b` reads `a_total` and `b`.
    """
    bare = _STRING.sub('""', expr)
    for pattern in (_MATCHERS, _RANGE, _LABELS, _DURATION):
        bare = pattern.sub(" ", bare)
    return {name for name in _NAME.findall(bare) if name.lower() not in _WORDS}


def family_of(series: str) -> str:
    """The histogram's name for one of its parts; any other name unchanged."""
    for part in _HISTOGRAM_PARTS:
        if series.endswith(part):
            return series.removesuffix(part)
    return series


def substituted(expr: str, *, rate_interval: str = "1m", values: Mapping[str, str] | None = None) -> str:
    """`expr` with its variables filled in: `$__rate_interval` with `rate_interval`, others from
    `values` or else with `.*` (all).
    """
    chosen = {"__rate_interval": rate_interval, **(values or {})}
    return _VARIABLE.sub(lambda match: chosen.get(match[1], ".*"), expr)
