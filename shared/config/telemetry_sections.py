"""Where else a node's metrics and traces go: experiment trackers and an OpenTelemetry collector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from shared.config.section import Section
from shared.registry import TRACKERS
from shared.text import without_secrets


class TrackingSection(Section):
    """Experiment trackers to which the trainer also sends its metrics; see
    docs/extend/tracker.md.
    """

    trackers: Literal["auto"] | list[str] = Field(
        "auto",
        description="auto: TensorBoard if it is installed, because its files stay on this machine and cost little. Or a list of "
        'tensorboard, wandb, trackio and `swarm.trackers` entry points, e.g. ["wandb"]. []: none.',
    )
    project: str = Field(
        "swarm",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="The project under which a tracker files the run. The run itself is named after node.run and node.id.",
    )
    online: bool = Field(
        False,
        description="Whether a tracker may contact a server; account and address come from the tracker's own environment "
        "variables. False: everything stays in node.var_dir, and you upload it when you want to (`wandb sync`).",
    )
    options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of a tracker from an installed package, by name; see that tracker's documentation.",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_are_known(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list):
            for name in value:
                TRACKERS.check(name)
        return value


class TracingSection(Section):
    """Tracing: spans of what each service does with a group; see docs/reading.md."""

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Base URL of an OpenTelemetry collector (OTLP over HTTP), e.g. http://127.0.0.1:4318. Every service sends it a "
        "span for each thing it does with a group. Empty: OTEL_EXPORTER_OTLP_ENDPOINT; if that is unset too, nothing is sent. "
        "Needs the extra otel. Keys belong in OTEL_EXPORTER_OTLP_HEADERS.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_holds_no_secret(cls, value: str) -> str:
        """Configurations are shown, compared and kept with a run's records."""
        if value != without_secrets(value):
            raise ValueError("an address with a name, a password or a query in it: put keys into OTEL_EXPORTER_OTLP_HEADERS")
        return value
