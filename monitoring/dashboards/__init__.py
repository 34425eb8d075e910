"""The three dashboards, as values. `monitoring.grafana` turns them into Grafana's JSON; the page of
`swarm dashboard` reads them directly.
"""

from __future__ import annotations

from monitoring.dashboards.nats import NATS
from monitoring.dashboards.node import NODE_DASHBOARD
from monitoring.dashboards.swarm import SWARM
from monitoring.panels import Dashboard

DASHBOARDS: dict[str, Dashboard] = {"swarm": SWARM, "node": NODE_DASHBOARD, "nats": NATS}
"""By file name, in reading order."""
