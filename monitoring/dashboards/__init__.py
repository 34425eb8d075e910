"""The three dashboards, as values. Grafana's JSON comes from `monitoring.grafana`; a page without
Grafana reads them directly.
"""

from __future__ import annotations

from monitoring.dashboards.nats import NATS
from monitoring.dashboards.node import NODE_DASHBOARD
from monitoring.dashboards.swarm import SWARM
from monitoring.panels import Dashboard

DASHBOARDS: dict[str, Dashboard] = {"swarm": SWARM, "node": NODE_DASHBOARD, "nats": NATS}
"""By file name, in the order in which one reads them."""
