"""The metrics of `swarm nats watch`: who sends requests to JetStream's API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.advisories import Verdict


class Figures:
    """The metrics that the watch exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "swarm_nats_api_requests",
            "Requests of JetStream's API by who made them: looked (changes nothing), usual (a role, within its permissions), "
            "operator (a client in the account of the streams), unexpected (neither).",
            ["by"],
            registry=registry,
        )
        for verdict in Verdict:
            self.requests.labels(verdict.value)
        self.unreadable = Counter(
            "swarm_nats_advisories_unreadable", "Advisories of JetStream that could not be read.", registry=registry
        )
        self.listening = Gauge("swarm_nats_watch_listening", "1 while the watch is connected and listens.", registry=registry)
        self.certificates = Gauge(
            "swarm_nats_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate runs out that a NATS server shows now, as the server itself says; only with "
            "`swarm nats watch --monitor`.",
            ["server"],
            registry=registry,
        )
