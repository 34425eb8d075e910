"""How long the chaos suite runs: short in `make test`, full by hand (`make chaos`), chosen by the
variable CHAOS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many faults, and how long they last."""

    name: str
    service_kills: int
    """Of each of the four services."""
    server_kills: int
    swarm_away_s: float
    frozen_s: float
    """How long a process is stopped (SIGSTOP) to be a slow consumer."""
    power_cuts: int
    leader_kills: int
    disordered_groups: int
    decoder_messages: int
    intake_messages: int
    coverage_guided_messages: int


SHORT = Scale(
    name="short",
    service_kills=1,
    server_kills=1,
    swarm_away_s=6.0,
    frozen_s=1.5,
    power_cuts=1,
    leader_kills=1,
    disordered_groups=20,
    decoder_messages=20_000,
    intake_messages=1_000,
    coverage_guided_messages=0,
)
FULL = Scale(
    name="full",
    service_kills=20,
    server_kills=10,
    swarm_away_s=120.0,
    frozen_s=10.0,
    power_cuts=5,
    leader_kills=5,
    disordered_groups=200,
    decoder_messages=1_000_000,
    intake_messages=1_000_000,
    coverage_guided_messages=1_000_000,
)
SCALE = {"short": SHORT, "full": FULL}[os.environ.get("CHAOS", "short")]
