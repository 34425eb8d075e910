"""Recording rules and alerts, as values; `GROUPS` has all of them. `monitoring.render` writes them
to files for Prometheus and its operator.
"""

from __future__ import annotations

from monitoring.rules import learning_alerts, nats_alerts, node_alerts, process_alerts, recording, sharing_alerts, slo_alerts
from monitoring.rules.base import Group

GROUPS: tuple[Group, ...] = (
    Group(name="swarm-recording", rules=recording.RULES),
    Group(name="swarm-node", rules=node_alerts.RULES),
    Group(name="swarm-learning", rules=learning_alerts.RULES),
    Group(name="swarm-sharing", rules=sharing_alerts.RULES),
    Group(name="swarm-processes", rules=process_alerts.RULES),
    Group(name="swarm-nats", rules=nats_alerts.RULES),
    Group(name="swarm-levels", rules=slo_alerts.RULES),
)
