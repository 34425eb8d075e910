"""Where else a node's figures and paths go: experiment trackers and traces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from shared.config.section import Section
from shared.registry import TRACKERS
from shared.text import without_secrets


class TrackingSection(Section):
    """Experiment trackers that the trainer's numbers go to as well; docs/extend/tracker.md."""

    trackers: Literal["auto"] | list[str] = Field(
        "auto",
        description="auto: TensorBoard where it is installed, because its files stay here and cost little. Or names: "
        'any of tensorboard, wandb, trackio and `swarm.trackers` entry points, e.g. ["wandb"]; []: none.',
    )
    project: str = Field(
        "swarm",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="The project that a tracker files the run under; the run is called after node.run and node.id.",
    )
    online: bool = Field(
        False,
        description="Whether a tracker may talk to a server, with its own variables for account and address. False: everything "
        "stays in node.var_dir, and you send it when you want to (`wandb sync`).",
    )
    options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of a tracker from an installed package, by name; see the tracker's documentation.",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_are_known(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list):
            for name in value:
                TRACKERS.check(name)
        return value


class TracingSection(Section):
    """Spans of what each service does with a group; docs/reading-rollouts.md."""

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Base URL of an OpenTelemetry collector (OTLP over HTTP), e.g. http://127.0.0.1:4318, to which every service "
        "sends a span for what it does with a group. Empty: OTEL_EXPORTER_OTLP_ENDPOINT, and without that nothing is sent. Needs "
        "the extra otel. Keys belong into OTEL_EXPORTER_OTLP_HEADERS.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_holds_no_secret(cls, value: str) -> str:
        """Configurations are shown, compared and kept with a run's records."""
        if value != without_secrets(value):
            raise ValueError("an address with a name, a password or a query in it: put keys into OTEL_EXPORTER_OTLP_HEADERS")
        return value
