"""State and figures in a process's status (`ServiceStatus`), and whether its age shows that the
process is alive. `swarm status`, `swarm top`, the page and the progress view read it; Prometheus
has more figures, under other names (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NewType

from shared.contracts.control import ServiceStatus

FamilyFigure = NewType("FamilyFigure", str)
"""Name of a figure that belongs to a family, made by `FigureFamily.of`."""


class StatusFigure(StrEnum):
    """A figure with a name of its own. Counters start at 0 again when the process restarts."""

    # Every process
    WORKED_AT = "worked_at"
    """Unix time of the last unit of work: a generator's call, a group scored, a batch, a step."""
    WORK_EVERY_S = "work_every_s"
    """Usual number of seconds between two units of work (`shared.runtime.status`)."""

    CLOCK_AHEAD_S = "clock_ahead_s"
    """Seconds by which the clock is ahead of the NATS server's; only while they differ by much."""

    # Generator
    GROUPS_GENERATED = "groups_generated"
    EVAL_UNKNOWN = "eval_unknown"
    """Held-out answers of the newest evaluation whose reward is unknown, if there are any."""
    POLICY_VERSION = "policy_version"
    """The version that a generator samples from; for a trainer, the version it has published."""

    # Verifier
    SCORE_TIMEOUTS = "score_timeouts"
    FAILED_LOCAL = "failed_local"
    SCORERS_REPLACED = "scorers_replaced"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    TAKEN_AT = "last_taken_at"
    """Unix time of the last foreign group that was accepted."""
    REFUSED_AT = "last_refused_at"
    """Unix time of the last foreign message that was refused."""
    REFUSED_SINCE_TAKEN = "since_taken_refused"
    """Foreign messages refused since one was accepted."""
    SHARED = "shared"
    SHARES_DROPPED = "shares_dropped"
    OUTBOX = "outbox"
    SWARM_CONNECTED = "swarm_connected"

    # Sampler
    BATCHES = "batches"
    POOL_LOCAL = "pool_local"
    POOL_EXTERNAL = "pool_external"
    WANTED_LOCAL = "wanted_local"
    WANTED_EXTERNAL = "wanted_external"
    DROPPED_LOCAL = "dropped_local"

    # Trainer
    STEP = "step"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    REWARD_LOCAL = "reward_local"
    REWARD_EXTERNAL = "reward_external"
    STALENESS_MEAN = "staleness_mean"
    STALENESS_MAX = "staleness_max"
    STEP_SECONDS = "step_seconds"
    FORMER_REWARDS = "former_rewards"
    """Groups of the newest step that another reward scored before the trainer read its own; only if
    there are any.
    """
    MAX_STEPS = "max_steps"
    """Steps after which the trainer is finished (`trainer.max_steps`), if it has a number."""
    FINISHED = "finished"


class FigureFamily(StrEnum):
    """Figures of one kind, one for each reason, phase or other label; `{}` stands for the label."""

    SCORED = "scored_{}"
    """Groups with rewards, by origin."""
    REFUSED = "refused_{}"
    """Foreign messages, by the reason of the refusal."""
    MOSTLY_REFUSED = "since_taken_mostly_{}"
    """Foreign messages refused since one was accepted, for the reason that most of those that were
    examined were refused for; of no other reason, as a status holds few figures.
    """
    UNKNOWN_REWARDS = "unknown_rewards_{}"
    """Local answers whose reward is unknown, by cause; only of causes that occurred."""
    LOCAL_ONLY = "local_only_{}"
    """Task sources of which no group of another node is taken, by cause
    (`shared.rewards.LocalOnly`); only of causes that there are.
    """
    SENDERS = "senders_{}"
    """Senders from whom nothing is accepted, by cause."""
    SANDBOX_WITHOUT = "sandbox_without_{}"
    """1 if the scorers run without this protection."""
    SHARE = "{}_share"
    """Part of the last steps' time that a phase took."""
    ALIKE = "alike_{}"
    """Of the trainer's last local groups those whose rewards are all equal, by kind (`right`,
    `wrong`, `alike`), their number (`of`), and the share of answers that were cut off (`cut_off`).
    """
    BONUS = "bonus_{}"
    """Of these groups those without a right answer whose rewards differ, by the names of the
    rewards that do (`services.trainer.selection.intake`); at most a few.
    """
    WRITE_FAILURES = "{}_write_failures"
    """Failed writes, by what was written."""
    FAILING_SINCE = "{}_failing_since"
    """Unix time since which every write of a kind has failed; only while it fails."""

    def of(self, what: str) -> FamilyFigure:
        return FamilyFigure(self.value.format(what))

    def what(self, figure: str) -> str | None:
        """The label in the name `figure`; None if it is not of this family."""
        before, after = self.value.split("{}")
        if not figure.startswith(before) or not figure.endswith(after):
            return None
        return figure[len(before) : len(figure) - len(after)] or None


STARTING = "starting"
"""The first state of a process."""
EVALUATING_BASE = "evaluating the base policy"
"""How the state of a generator begins that does this; further on the state says how far it is."""
EVALUATING_LAST = "evaluating the last policy"
"""The same, once the trainer has taken its steps."""
GENERATING = "generating"
LOADING_POLICY = "loading policy version"
"""How the state of a generator begins that has no policy yet but the base, or whose load failed."""
FIRST_GROUPS = "waiting for the first groups"
"""States of a generator and of a trainer before the first step."""
STOPPED = "stopped"
"""The last state of a process that shut down in order."""
STATUS_INTERVAL_S = 2.0
"""Each status also serves as a heartbeat."""
MISSED_HEARTBEATS = 15
"""How many statuses must be missing before a process counts as gone. On a busy machine, or while a
server restarts, a working process may be late by several.
"""
SILENT_S = MISSED_HEARTBEATS * STATUS_INTERVAL_S
"""Age of the last status from which a process counts as gone, wherever that is judged."""


def is_alive(status: ServiceStatus, now: float) -> bool:
    """Check whether the process that wrote `status` is running: it has not reported its stop, and
    the status is less than `SILENT_S` old.
    """
    return status.state != STOPPED and now - status.updated_at <= SILENT_S


LATE_FACTOR = 5.0
LATE_AT_LEAST_S = 30.0
"""Evaluations, checkpoints and a busy machine cause gaps of several seconds even in quick work."""


def late_after_s(usual_s: float | None) -> float | None:
    """Seconds after its last unit of work from which a process counts as late; None if its pace is
    not known.
    """
    return None if usual_s is None else max(LATE_AT_LEAST_S, LATE_FACTOR * usual_s)


def first_step_comes(trainer: str, generators: Iterable[ServiceStatus]) -> bool:
    """Check by the trainer's state, and by those of the generators that are alive, whether the
    first step is taken, the base policy evaluated or the first groups generated. On a slow machine
    each may take long.
    """
    begun = any(each.state == GENERATING or each.state.startswith(EVALUATING_BASE) for each in generators)
    return trainer == "training" or (trainer == FIRST_GROUPS and begun)
