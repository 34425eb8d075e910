"""The record of each step: one line of `metrics.jsonl`, and its numbers for trackers."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.drafts import replace_text
from shared.json_lines import open_lines, write_whole
from shared.run_records import METRICS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Wall-clock seconds of a step's phases.

    wait: for the batch to arrive. publish: from the end of the optimizer's step until the policy
    pointer names the new policy. checkpoint: for the checkpoint written since the previous line,
    because a step's line is on disk before the checkpoint that contains the step.
    """

    wait: float = 0.0
    intake: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0
    publish: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all phases."""
        return self.wait + self.intake + self.forward_backward + self.optimizer + self.publish + self.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One trainer step, on batch `step`; the policy it makes is version `step`.

    `updated` is False when no group had an advantage (or a gradient was not finite): the step
    counts, the weights stay. Where no token took part in an update nothing was measured: `loss` to
    `kl_reference` are None then, because 0 would be a claim. `reward_local` is this node's mean
    reward of its local groups' completions, sampled by its own policy; `reward_external` is this
    node's reward for the other nodes' completions; None when the batch had none. `importance_ratio`
    is policy to proximal policy, `importance_weight` proximal to behaviour after truncation,
    `kl_behaviour` nats per token (k3); means over tokens of the groups that took part, and over the
    updates. `staleness_*` counts policy versions, over local groups; None without one.
    `groups_replayed` local groups of earlier batches were trained on again (`sampler.replay`):
    `groups_local`, `reward_local` and `staleness_*` leave them out; `reward_replayed` is the mean
    reward of their completions, `staleness_replayed` their mean staleness. In `grad_norm_local`,
    which is about whose text it is, they are local. `answers_absurd` foreign answers were not
    trained on because this node's policy finds them absurd, `absurd_of` says by node;
    `foreign_answers_of` says how many of each node's were. `trained_of` says how many groups of
    each node and dataset took part in the update, without replayed ones. Where the sampler left the
    choice to the trainer (`services.trainer.selection.preference`), `groups_left_out` candidates
    were not trained
    on; `logprob_external` and `logprob_left_out` are the mean logprobs per token of the chosen
    groups' text and of the others'. `behaviour_share` and `reencoded_share` are shares of the
    groups taken in. `grad_norm_local` and `grad_norm_foreign` are the norms of what local and
    foreign groups give to the gradient before any bound, means over the updates; None without such
    groups. `groups_bounded` foreign groups were held to the bound of a group's gradient
    (`trainer.foreign_norm_factor`), most in any update, `bounded_of` says by node; `over_budget_of`
    says whose groups among `skipped` were left out for their cost. `capability_of` says by node
    what foreign advantages were multiplied by, where enough is known of it
    (`trainer.foreign_capability_window`).
    """

    step: int
    time: float
    updated: bool
    updates: int
    loss: float | None
    grad_norm: float | None
    entropy: float | None
    clip_fraction: float | None
    importance_ratio: float | None
    importance_ratio_max: float | None
    importance_weight: float | None
    truncated_fraction: float | None
    dropped_fraction: float | None
    kl_behaviour: float | None
    kl_reference: float | None
    learning_rate: float
    reward_local: float | None
    reward_external: float | None
    groups_local: int
    groups_external: int
    groups_zero_advantage: int
    groups_skipped: int
    skipped: dict[str, int]
    answers_absurd: int = 0
    absurd_of: dict[str, int] = field(default_factory=dict)
    foreign_answers_of: dict[str, int] = field(default_factory=dict)
    trained_of: dict[str, dict[str, int]] = field(default_factory=dict)
    over_budget_of: dict[str, int] = field(default_factory=dict)
    capability_of: dict[str, float] = field(default_factory=dict)
    grad_norm_local: float | None = None
    grad_norm_foreign: float | None = None
    groups_bounded: int = 0
    bounded_of: dict[str, int] = field(default_factory=dict)
    groups_left_out: int = 0
    logprob_external: float | None = None
    logprob_left_out: float | None = None
    staleness_mean: float | None
    staleness_max: int | None
    groups_replayed: int = 0
    reward_replayed: float | None = None
    staleness_replayed: float | None = None
    tokens: int
    behaviour_share: float
    reencoded_share: float
    phase_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)


class MetricsLog:
    """`metrics.jsonl` of a run, one line per step.

    Opening it removes the lines of steps after `step` (those that are trained again after a
    resume), so that every step occurs once.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_dir / METRICS_FILE
        forget_steps_after(self._file, step)
        self._stream = open_lines(self._file)
        self._unwritten: list[bytes] = []

    def append(self, record: StepRecord) -> None:
        """Write one step, after those that could not be written before.

        Raises:
            OSError: for example a full disk. No partial line is left, and the next call writes the
                line too.
        """
        self._unwritten.append(json.dumps(_finite(asdict(record)), separators=(",", ":")).encode() + b"\n")
        while self._unwritten:
            write_whole(self._stream, self._unwritten[0])
            self._unwritten.pop(0)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._stream.close()


def forget_steps_after(file: Path, step: int) -> None:
    """Rewrite `file` (by rename) without lines of steps after `step`, partial lines and repeated
    lines of a step.
    """
    if not file.exists():
        return
    kept: dict[int, str] = {}
    content = file.read_text(encoding="utf-8", errors="replace")
    for line in content.splitlines():
        try:
            number = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if number <= step:
            kept[number] = line
    wanted = "".join(f"{kept[number]}\n" for number in sorted(kept))
    if wanted == content:
        return
    replace_text(file, wanted, synced=True)


def scalars(record: StepRecord) -> dict[str, float]:
    """The record's finite numbers under the names that trackers show."""
    numbers: dict[str, float] = {}
    for name, value in asdict(record).items():
        if name in {"step", "time"} or (isinstance(value, dict) and name != "phase_seconds"):
            continue
        if name == "phase_seconds":
            numbers |= {f"seconds/{phase}": float(seconds) for phase, seconds in value.items()}
        elif value is not None and math.isfinite(value):
            numbers[f"train/{name}"] = float(value)
    return numbers


def _finite(value: Any) -> Any:
    """The value, or None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
