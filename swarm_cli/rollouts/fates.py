"""How a trainer used a group, in words."""

from __future__ import annotations

import time
from dataclasses import dataclass

from swarm_cli.rollouts.records import TrainedGroup, TrainedRecords, TrainedStep

_FATES = {
    "no_advantage": "without effect: its rewards are all equal, or its weight is 0",
    "not_preferred": "not trained on: the trainer kept other candidates, by their likelihood under its policy",
    "too_long": "not trained on: too long for the model, or longer than foreign answers may be",
    "control_text": "not trained on: its text would become control tokens",
    "changed_question": "not trained on: the model's chat template changes its question",
    "malformed_tokens": "not trained on: its token ids or logprobs are not valid",
    "unscored": "not trained on: it could not be scored",
    "truncated": "not trained on: all answers were cut at the length limit (trainer.drop_truncated)",
    "negative": "not trained on: no answer has an advantage of 0 or more (trainer.drop_foreign_negatives)",
    "absurd": "not trained on: all its answers are too unlikely under this node's policy (trainer.foreign_logprob_slack)",
    "empty": "not trained on: it has no tokens",
    "text_alone": "not trained on: its engine gave text without token ids",
    "unknown_token": "not trained on: the model has no such token",
    "group_budget": "not trained on: it costs more than one foreign group may (trainer.foreign_cost_factor)",
    "sender_budget": "not trained on: its sender's groups cost more than one sender's may (trainer.foreign_cost_factor)",
}


@dataclass(frozen=True, slots=True)
class Fate:
    """What is on record about one group in one step; `step` and `group` are None if nothing is.
    yet: whether the records have not reached that step yet.
    """

    step: TrainedStep | None
    group: TrainedGroup | None
    yet: bool = False

    @property
    def trained(self) -> bool:
        """Whether a step has trained on the group."""
        return self.group is not None and self.group.fate == "trained"

    def sentence(self) -> str:
        """How the group was used."""
        if self.yet:
            return "not trained on yet"
        if self.step is None or self.group is None:
            return "not on record here (--run): trained on another machine, or longer ago than records are kept"
        group, step = self.group, self.step
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.time))
        if group.fate != "trained":
            return f"{_FATES.get(group.fate, f'not trained on: {group.fate}')} (step {step.step}, {at})"
        text = f"trained on in step {step.step}, {at}"
        if group.factor is not None and group.factor != 1.0:
            text += f"; its loss was multiplied by {group.factor:.3g}"
        if group.bounded is not None:
            text += f", because its gradient was too large and was scaled by {group.bounded:.3g} (trainer.foreign_norm_factor)"
        return text if step.updated else f"{text}; but the step changed no weights"


def fate_of(records: TrainedRecords, step: int, group_id: str) -> Fate:
    """What is on record about a group of a step's batch. A step with that number in another run had
    other groups, and says nothing about this one.
    """
    found = records.for_step(step)
    newest = records.newest
    beyond = found is None and newest is not None and step > newest
    group = found.group(group_id) if found is not None else None
    return Fate(found, group, yet=beyond)


def clock(time_s: float) -> str:
    """A Unix time as hours, minutes and seconds, in this machine's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"
