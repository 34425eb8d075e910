"""Dashboards as Grafana's JSON model (schema version 39, Grafana 10 and newer).

The data source is a variable and uids are fixed, so nothing has to be filled in at import.
"""

from __future__ import annotations

from typing import Any

from monitoring.panels import GRID_WIDTH, Dashboard, Panel, PanelKind, Query, Row, Variable

TAG = "swarm"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def as_json_model(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as a Grafana sidecar or `POST /api/dashboards/db` accepts it."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": [TAG], "title": "Swarm", "asDropdown": False, "keepTime": True, "includeVars": True}
        ],
        "templating": {"list": [_datasource_variable(), *(_variable(variable) for variable in dashboard.variables)]},
        "panels": _laid_out(dashboard.rows),
    }


def _laid_out(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right; a panel that does not fit starts a new
    line.
    """
    placed: list[dict[str, Any]] = []
    next_id, y = 1, 0
    for row in rows:
        header: dict[str, Any] = {
            "id": next_id,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1},
            "panels": [],
        }
        next_id, y = next_id + 1, y + 1
        placed.append(header)
        x = line_height = 0
        for panel in row.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, line_height = 0, y + line_height, 0
            position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            (header["panels"] if row.collapsed else placed).append(_panel(panel, next_id, position))
            next_id, x, line_height = next_id + 1, x + panel.width, max(line_height, panel.height)
        # A collapsed row's panels take no space: Grafana moves the rest down when it is opened.
        y += 0 if row.collapsed else line_height
    return placed


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    """`number` is the panel's id, unique on its dashboard; `position` is in Grafana's grid of 24
    columns. Queries are named A, B, C, because tables refer to them by letter.
    """
    model: dict[str, Any] = {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "targets": [_target(query, chr(ord("A") + index), panel.kind) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
    }
    if panel.kind is PanelKind.TIMESERIES:
        model["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind is PanelKind.STAT:
        model["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value" if panel.thresholds else "none",
            "graphMode": "area",
            "textMode": "value",
        }
    else:
        _as_table(panel, model)
    return model


def _as_table(panel: Panel, model: dict[str, Any]) -> None:
    """One row per label set. Each query returns a table of its own; they are merged, and Grafana
    then names their columns `Value #A`, `Value #B` and so on.
    """
    names = {f"Value #{target['refId']}": query.legend for target, query in zip(model["targets"], panel.queries, strict=True)}
    model["options"] = {"showHeader": True, "cellHeight": "sm"}
    model["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True},
                "indexByName": {name: place for place, name in enumerate([*panel.labels, *names])},
                "renameByName": names,
            },
        },
    ]
    model["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": query.legend}, "properties": [{"id": "unit", "value": query.unit}]}
        for query in panel.queries
        if query.unit
    ]


def _target(query: Query, letter: str, kind: PanelKind) -> dict[str, Any]:
    table = kind is PanelKind.TABLE
    return {
        "refId": letter,
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": table,
        "range": not table,
        "format": "table" if table else "time_series",
    }


def _field_defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
    steps += [{"color": threshold.color, "value": threshold.value} for threshold in panel.thresholds]
    defaults: dict[str, Any] = {
        # Grafana writes a custom unit as `suffix:` and the text.
        "unit": panel.unit.replace("suffix: ", "suffix:\u00a0"),
        "color": {"mode": "thresholds" if panel.kind is PanelKind.STAT else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind is PanelKind.TIMESERIES:
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }


def _variable(variable: Variable) -> dict[str, Any]:
    """A variable in full, as Grafana exports it. `.*` stands for "All"; without it Grafana would
    write every value into the query.
    """
    everything = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": variable.query, "refId": f"variable-{variable.name}"},
        "definition": variable.query,
        "hide": 0,
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "multi": variable.many,
        "includeAll": variable.many,
        "allValue": ".*" if variable.many else None,
        "options": [],
        "current": everything if variable.many else {},
    }
