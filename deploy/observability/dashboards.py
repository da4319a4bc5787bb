"""Makes the Grafana dashboards: `python deploy/observability/dashboards.py` writes grafana/dashboards/*.json.

A dashboard is rows of panels; a panel is a title, a unit and queries with legends. Nothing is clicked together by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """Queries as (expression, legend). `unit` is Grafana's; `kind` a panel type."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """`rows`: (title, panels that share the width)."""

    name: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...] = field(default_factory=tuple)


def quantiles(metric: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram, over all processes."""
    group, name = f"le, {by}" if by else "le", f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"histogram_quantile({share}, sum by ({group}) (rate({metric}_bucket{where}{RATE})))", f"{label}{name}")
        for share, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    )


def rate(metric: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """A counter per second."""
    group = f" by ({by})" if by else ""
    legend = " ".join(f"{{{{{one.strip()}}}}}" for one in by.split(",")) if by else "all"
    return ((f"sum{group} (rate({metric}{where}{RATE}))", legend),)


def _panel(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 8, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def render(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y += 1
        width = WIDTH // len(row)
        for index, panel in enumerate(row):
            panels.append(_panel(panel, len(panels) + 1, index * width, y, width))
        y += HEIGHT
    return {
        "uid": f"isthmus-{dashboard.name}",
        "title": f"Isthmus: {dashboard.title}",
        "description": dashboard.about,
        "tags": ["isthmus"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "links": [{"type": "dashboards", "tags": ["isthmus"], "title": "Isthmus", "asDropdown": True}],
        "panels": panels,
    }


def text(dashboard: Dashboard) -> str:
    """The file."""
    return json.dumps(render(dashboard), indent=2) + "\n"


if __name__ == "__main__":
    from dashboard_list import DASHBOARDS

    for one in DASHBOARDS:
        (FOLDER / f"{one.name}.json").write_text(text(one))
