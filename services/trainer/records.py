"""The record of each step: one line of `metrics.jsonl`, its numbers for trackers, and what became
of every group, in `trained.jsonl`.

The batch log says what the trainer was given. `trained.jsonl` says what it did with it: which
candidates were kept, which groups and answers were left out and why, each answer's advantage, and
the weights that its tokens had in the gradient. `batches.jsonl` beside it keeps the batches
themselves, because the server's log ends with its server. `swarm rollouts` and the dashboard read
both. The files are bounded (`shared.run_records.BoundedLines`). A step that is
trained again after a restart occurs twice in them, and the later line counts.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from services.trainer.gradient.answer_uses import AnswerUse
from services.trainer.gradient.bounded_step import BoundedGradient, UpdateRecord
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import UpdateConfig
from services.trainer.selection.intake import Intake, IntakeRecord
from services.trainer.selection.likelihood import LikelihoodRecord
from shared.atomic_files import replace_text
from shared.config import TaskSpec, scorers_id
from shared.contracts.messages import Batch, BatchItem, ScoredGroup
from shared.run_records import EVAL_FILE, METRICS_FILE, eval_lines, open_lines, read_jsonl, write_whole


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
        return self.wait + self.intake + self.forward_backward + self.optimizer + self.publish + self.checkpoint


@dataclass(frozen=True, kw_only=True)
class StepRecord(IntakeRecord, LikelihoodRecord, UpdateRecord):
    """One trainer step, on batch `step`; the policy it makes is version `step`. Each stage of the
    step has built its part.

    trained_of: how many groups of each node and dataset took part in the update, without replayed
    ones. scorer: identifies the rewards that its groups got (`StepScorer`); None if two rewards
    scored them, as around a change.
    """

    step: int
    time: float
    scorer: str | None = None
    trained_of: dict[str, dict[str, int]] = field(default_factory=dict)
    phase_seconds: PhaseSeconds = field(default_factory=PhaseSeconds)


class StepScorer:
    """Which rewards a step's groups got. That need not be those that the trainer has read: a
    verifier that was started again after a change scores by the new ones.
    """

    def __init__(self, specs: Sequence[TaskSpec]) -> None:
        self._specs = list(specs)
        self.own = {spec.scorer_id for spec in specs}
        """The scorers as the trainer has read them."""
        self._own_of: dict[str, str] = {}
        """That of each dataset, as far as its groups have told."""
        self._instead: dict[str, str] = {}

    def of(self, groups: Sequence[ScoredGroup]) -> str | None:
        """Their scorers' `scorers_id`, without the names of files' rows; None if two scorers took
        turns, or a dataset's scorer is not known. Sources without a group in the step count as
        scored as before.
        """
        known = [(group.group.task.ref.dataset, group.scorer) for group in groups if group.scorer is not None]
        self._own_of |= {dataset: scorer for dataset, scorer in known if scorer in self.own}
        only = next(iter(self.own)) if len(self.own) == 1 else None
        found: dict[str | None, set[str]] = {}
        for dataset, scorer in known:
            own = scorer if scorer in self.own else self._own_of.get(dataset, only)
            found.setdefault(own, set()).add(scorer)
        if None in found or any(len(scorers) > 1 for scorers in found.values()):
            return None
        self._instead |= {own: scorer for own, (scorer,) in found.items() if own is not None}
        return scorers_id(self._specs, self._instead)


class MetricsLog:
    """`metrics.jsonl` of a run, one line per step.

    The first line that is written replaces those of steps after `step`, which are trained again
    after a resume, so that every step occurs once. A trainer that cannot go on after all has
    removed nothing.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_dir / METRICS_FILE
        open_lines(self._file).close()
        self._resumed_after: int | None = step
        self._unwritten: list[bytes] = []

    def append(self, record: StepRecord) -> None:
        """Write one step, after those that could not be written before.

        Raises:
            OSError: for example a full disk. No partial line is left, and the next call writes the
                line too.
        """
        self._unwritten.append(json.dumps(_finite({"step": record.step, **asdict(record)}), separators=(",", ":")).encode() + b"\n")
        if self._resumed_after is not None:
            forget_steps_after(self._file, self._resumed_after)
            self._resumed_after = None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open_lines(self._file) as stream:
            while self._unwritten:
                write_whole(stream, self._unwritten[0])
                self._unwritten.pop(0)


def newest_recorded(run_dir: Path) -> tuple[int, float]:
    """The newest policy on record, by a step or an evaluation, and the time of the last record; 0
    and 0.0 without one.
    """
    steps = [(line.get("step"), line.get("time")) for line in read_jsonl(run_dir / METRICS_FILE)]
    evaluations = [(line.get("policy_version"), line.get("time")) for line in eval_lines(run_dir / EVAL_FILE)]
    versions, times = zip((0, 0.0), *steps, *evaluations, strict=True)
    return max(each for each in versions if isinstance(each, int)), max(each for each in times if isinstance(each, int | float))


def forget_steps_after(file: Path, step: int) -> None:
    """Rewrite `file` (by rename) without lines of steps after `step`, partial lines and repeated
    lines of a step.
    """
    if not file.exists():
        return
    lines = _lines_by_step(file)
    wanted = "".join(f"{lines[number]}\n" for number in sorted(lines) if number <= step)
    if wanted != file.read_text(encoding="utf-8", errors="replace"):
        replace_text(file, wanted, synced=True)


def _lines_by_step(file: Path) -> dict[int, str]:
    """Each step's last line."""
    lines: dict[int, str] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            lines[int(json.loads(line)["step"])] = line
    return lines


def scalars(record: StepRecord) -> dict[str, float]:
    """The record's finite numbers under the names that trackers show."""
    numbers: dict[str, float] = {}
    for name, value in asdict(record).items():
        if name in {"step", "time", "scorer"} or (isinstance(value, dict) and name != "phase_seconds"):
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


TRAINED, NO_ADVANTAGE = "trained", "no_advantage"
"""What became of a group; otherwise the reason for which it was skipped, or had no place."""

MAX_LINE_BYTES = 2**20
"""Longest line. Of a larger step, the first groups are written, and the number of missing ones."""


def trained_groups(
    batch: Batch, without_place: Mapping[str, str], intake: Intake, updates: Sequence[BoundedGradient], config: UpdateConfig
) -> list[dict[str, Any]]:
    """List what became of each group of `batch`. without_place: why candidates had no place, by
    id. intake: what the updates were computed over.

    Of a group: `id`, `origin`, `sender`, `fate`; where it took part `factor`, on the loss of each
    of its tokens (its origin's weight, its share where it is far longer than others, and `bounded`,
    what its gradient was scaled down by), and its `answers`. Of an answer: `place` in the group,
    `advantage`, and where it took part `tokens`, `kept` (those that have a loss), `weight` (their
    mean importance weight; null where the objective takes none), `clipped`, `truncated` and
    `ratio`; or `left_out`, why it did not. Clipped tokens and ratio are means over the step's
    updates; the rest is the same in all of them. `token_ratio` and `token_weight` say of each
    token how likely this node's policy found it before the step against the policy that sampled
    it, and its importance weight; null where there is none. The first `TOKENS_A_STEP` tokens of a
    step have them.
    """
    number_of = {group_id: number for number, (_, group_id) in enumerate(intake.authors) if group_id not in intake.skipped_of}
    found = []
    for item in batch.items:
        scored = item.scored
        line: dict[str, Any] = {
            "id": scored.group_id,
            "origin": "local" if scored.origin == "local" else "foreign",
            "sender": scored.group.node,
        }
        number = number_of.get(scored.group_id)
        if number is None:
            line["fate"] = without_place.get(scored.group_id) or intake.skipped_of.get(scored.group_id, "skipped")
        else:
            line |= _taken_in(number, intake.groups[number], updates, config)
            line["answers"] += [
                {"place": place, "advantage": _short(advantage), "left_out": reason}
                for place, (reason, advantage) in intake.dropped_of.get(scored.group_id, {}).items()
            ]
            line["answers"].sort(key=lambda answer: answer["place"])
        found.append(line)
    return found


def trained_of(batch: Batch, groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the groups of each node and dataset that took part. A replayed group counted in the
    step that first trained on it. groups: what became of each of the batch's (`trained_groups`).
    """
    found: dict[str, Counter[str]] = {}
    for item, group in zip(batch.items, groups, strict=True):
        if group["fate"] == TRAINED and not item.replayed:
            made = item.scored.group
            found.setdefault(made.node, Counter())[made.task.ref.dataset] += 1
    return {node: dict(sorted(found[node].items())) for node in sorted(found)}


def trained_line(step: int, time_s: float, *, updated: bool, updates: int, groups: Sequence[Mapping[str, Any]]) -> str:
    """One line of the file. updated, updates: whether the weights changed, and the number of
    updates.
    """
    head = {"step": step, "time": round(time_s, 3), "updated": updated, "updates": updates}
    written: list[str] = []
    size = 0
    for group in groups:
        text = json.dumps(group, separators=(",", ":"))
        size += len(text) + 1
        if size > MAX_LINE_BYTES:
            break
        written.append(text)
    tail = f',"groups_not_written":{len(groups) - len(written)}' if len(written) < len(groups) else ""
    return json.dumps(head, separators=(",", ":"))[:-1] + tail + ',"groups":[' + ",".join(written) + "]}"


def batch_line(batch: Batch) -> str:
    """A batch as one line of `batches.jsonl`, its step first. Token ids and logprobs, far longer
    than their text, are left out if the line would be longer than `MAX_LINE_BYTES`.
    """
    answers = [completion for item in batch.items for completion in item.scored.group.completions]
    if sum(len(each.token_ids or b"") + len(each.behaviour_logprobs or b"") for each in answers) * 4 // 3 > MAX_LINE_BYTES:
        batch = msgspec.structs.replace(batch, items=[_without_tokens(item) for item in batch.items])
    return f'{{"step":{batch.number},"batch":{msgspec.json.encode(batch).decode()}}}'


def _without_tokens(item: BatchItem) -> BatchItem:
    group = item.scored.group
    texts = [msgspec.structs.replace(each, token_ids=None, behaviour_logprobs=None) for each in group.completions]
    scored = msgspec.structs.replace(item.scored, group=msgspec.structs.replace(group, completions=texts))
    return msgspec.structs.replace(item, scored=scored)


def _taken_in(number: int, group: TokenGroup, updates: Sequence[BoundedGradient], config: UpdateConfig) -> dict[str, Any]:
    """The entry of the group at index `number` of the step."""
    scale = updates[0].scales.get(number, 1.0)
    by_length = config.objective.aggregated_by != "sequence_mean"
    took_part = config.takes_part(group)
    line: dict[str, Any] = {
        "fate": TRAINED if took_part else NO_ADVANTAGE,
        "factor": _short(group.weight * (group.share if by_length else 1.0) * scale),
        "answers": [],
    }
    if scale != 1.0:
        line["bounded"] = _short(scale)
    for completion, (place, advantage) in enumerate(zip(group.places, group.advantages, strict=True)):
        answer: dict[str, Any] = {"place": place, "advantage": _short(advantage)}
        uses = [use for update in updates if (use := update.uses.get((number, completion))) is not None]
        if uses:
            answer |= _used(uses, group.sampled_lengths[completion])
        line["answers"].append(answer)
    return line


def _used(uses: Sequence[AnswerUse], tokens: int) -> dict[str, Any]:
    """Means over the updates, except for values that are the same in all of them."""
    first = uses[0]
    each = {"token_ratio": [_short(ratio, 3) for ratio, _ in first.each]} if first.each else {}
    if first.each and first.weight is not None:
        each["token_weight"] = [_short(weight, 3) for _, weight in first.each]
    return {
        "tokens": tokens,
        "kept": first.kept,
        "weight": None if first.weight is None else _short(first.weight),
        "clipped": _short(math.fsum(use.clipped for use in uses) / len(uses)),
        "truncated": first.truncated,
        "ratio": _short(math.fsum(use.ratio for use in uses) / len(uses)),
        **each,
    }


def _short(value: float | None, digits: int = 6) -> float | None:
    """Rounded to so many digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
