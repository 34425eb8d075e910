"""The metrics of `swarm nats watch`: who sends requests to JetStream's API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.advisories import Requester


class Figures:
    """The metrics that the watch exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "swarm_nats_api_requests",
            "Requests to JetStream's API, by who made them: looked (anybody; it changes nothing), usual (a role, within its "
            "permissions), operator (a client in the streams' account), unexpected (none of these: see the watch's log).",
            ["by"],
            registry=registry,
        )
        for verdict in Requester:
            self.requests.labels(verdict.value)
        self.unreadable = Counter(
            "swarm_nats_advisories_unreadable", "Advisories from JetStream that could not be decoded.", registry=registry
        )
        self.listening = Gauge(
            "swarm_nats_watch_listening", "1 while the watch is connected and listening, else 0.", registry=registry
        )
