"""Export a trained policy as a folder: for `transformers`, with config, tokenizer and merged
adapters, or only its adapters, for peft; with a README.md from the checkpoint and its run's logs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.trainer.checkpoint import (
    MANIFEST,
    BestEvaluation,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    TrainedModel,
    evaluation_measure,
    read_checkpoint,
)
from services.trainer.policy_model import with_adapters
from shared.atomic_folder import atomic_folder, refuse_filled
from shared.config.model_section import ModelSection
from shared.config.trainer_section import LoraSection
from shared.contracts.control import EvalReport, TaskScore, incomparable
from shared.model.configuration import quietly
from shared.model.loading import DTYPES, load_causal_lm
from shared.model.reading import load_tokenizer
from shared.model.weights import DeltaRounding, RoundingTally, load_policy_tensors, load_trainable, policy_tensors
from shared.paired import Answer, paired, recorded_answers
from shared.run_records import (
    CHECKPOINTS,
    EVAL_FILE,
    EVAL_SETS_FILE,
    FILE_NAMES_FILE,
    METRICS_FILE,
    added_words,
    eval_lines,
    eval_report,
    read_jsonl,
    reward_changes,
)
from shared.tasks.evaluation import rate_interval
from shared.text import visible
from shared.version import VERSION

CARD = "README.md"
NO_ANSWERS: Mapping[int, Sequence[Answer]] = {}
UNCHANGED = "no step changed the weights: these are the base policy's"


def write_card(folder: Path, checkpoint: Checkpoint, *, dtype: str, adapter: bool, best: bool, system_prompt: str) -> None:
    """Write the card of the exported policy into `folder`. The node's logs are beside its
    checkpoints. best: it was chosen by its evaluation. system_prompt: that of its configuration.
    """
    node_folder = checkpoint.folder.absolute().parent.parent
    run, _, node = (checkpoint.made_by or f"{node_folder.parent.name}/{node_folder.name}").partition("/")
    step, lines = checkpoint.position.batch_number, eval_lines(node_folder / EVAL_FILE)
    text = model_card(
        checkpoint.model,
        step,
        evaluations=[report for line in lines if (report := eval_report("node", line))],
        answers={version: recorded_answers(line) for line in lines if isinstance(version := line.get("policy_version"), int)},
        steps=_steps(checkpoint),
        origin=f"{run}, node {node}",
        dtype=dtype,
        adapter=adapter,
        best=best,
        system_prompt=system_prompt,
        files={line["dataset"]: line["file"] for line in read_jsonl(node_folder / FILE_NAMES_FILE) if _names_file(line)},
        sets=[line for line in eval_lines(node_folder / EVAL_SETS_FILE) if isinstance(line.get("set"), str)],
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _names_file(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("dataset"), str) and isinstance(line.get("file"), str)


def _steps(checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """Read the metrics of the checkpoint's steps, which lie beside its folder."""
    metrics, last = checkpoint.folder.absolute().parent.parent / METRICS_FILE, checkpoint.position.batch_number
    return [line for line in read_jsonl(metrics) if _number(line, "step") <= last]


def _is_base(steps: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Check whether none of the steps up to `step`, all of which are on record, changed the
    weights.
    """
    unchanged = {int(_number(line, "step")) for line in steps if line.get("updated") is False}
    moved = any(line.get("updated") is not False for line in steps)
    return not moved and unchanged.issuperset(range(1, step + 1))


def _unchanged(checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note if training has not changed the weights."""
    return (UNCHANGED,) if _is_base(_steps(checkpoint), checkpoint.position.batch_number) else ()


def model_card(
    model: TrainedModel,
    step: int,
    *,
    evaluations: Sequence[EvalReport],
    steps: Sequence[Mapping[str, Any]],
    origin: str,
    dtype: str,
    adapter: bool,
    best: bool = False,
    system_prompt: str = "",
    files: Mapping[str, str] | None = None,
    sets: Sequence[Mapping[str, Any]] = (),
    answers: Mapping[int, Sequence[Answer]] = NO_ANSWERS,
) -> str:
    """The card in Hugging Face's format. If the base is a folder, the card contains only the
    folder's name, because the path is specific to this machine. files: names of the datasets that
    are files. answers: those of each evaluation, by policy version.
    """
    from_hub = bool(model.model_revision)
    base = model.model_path if from_hub else Path(model.model_path).name
    name = f"{base} at commit {model.model_revision}" if from_hub else f"the folder `{visible(base)}`"
    kind = "LoRA adapters" if adapter else "whole weights, adapters merged" if model.lora_rank else "whole weights"
    header = ["---", f"library_name: {'peft' if adapter else 'transformers'}"]
    header += [f"base_model: {base}"] if from_hub else []
    header += ["pipeline_tag: text-generation", "tags: [reinforcement-learning, swarm]", "---", ""]
    facts = [
        f"# {visible(base)}, {step} steps of reinforcement learning",
        "",
        "| | |",
        "|---|---|",
        f"| base model | {name} |",
        f"| what this is | {kind}, {dtype} |",
        f"| run | {visible(origin)} |",
        f"| steps | {step} |",
        *([f"| trained on | nothing: {UNCHANGED} |"] if _is_base(steps, step) else _groups(steps)),
        *_changed(steps),
        *(
            [f"| asked with the system prompt | {visible(system_prompt, 1000).replace('|', chr(92) + '|')} |"]
            if system_prompt
            else []
        ),
        f"| made by | Swarm {VERSION}: `swarm model export` |",
    ]
    return "\n".join([*header, *facts, *_scores(evaluations, step, files or {}, answers, best=best), *_set_scores(sets, step), ""])


def _groups(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Number of groups in its batches, local and foreign, and of those that it was trained on: in
    the others all answers earned the same, or the text was not let pass.
    """
    if not steps:
        return []
    local, foreign = (int(sum(_number(line, key) for line in steps)) for key in ("groups_local", "groups_external"))
    rows = [f"| groups of answers in its batches | {local:,} of its own, {foreign:,} of other nodes |"]
    if all(isinstance(line.get("trained_of"), dict) for line in steps):
        trained = sum(sum(by_dataset.values()) for line in steps for by_dataset in line["trained_of"].values())
        rows.append(f"| trained on | {trained:,} of these groups; the others taught nothing |")
    return rows


def _changed(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Since which step another reward was trained on."""
    changes = reward_changes([line.get("scorer") for line in steps])
    return [f"| reward | changed before step {int(_number(steps[changes.index(changes[-1])], 'step')):,} |"] if any(changes) else []


def _scores(
    evaluations: Sequence[EvalReport], step: int, files: Mapping[str, str], answers: Mapping[int, Sequence[Answer]], *, best: bool
) -> list[str]:
    """Held-out results by task, of the last evaluated version up to this one and of the first one
    that can be compared with it, the interval of both, and what changed question by question.
    """
    known = {report.policy_version: report for report in evaluations if report.policy_version <= step}
    if not known:
        return ["", "No held-out evaluation of this policy is in the run's folder."]
    end = max(known)
    last = known[end]
    begin = min(version for version, report in known.items() if not incomparable(report, last))
    only_base = end == 0 < step
    title, by_reward = ("Mean reward (no pass is defined)", True) if last.pass_rate is None else ("Pass rate", False)
    shown = [known[version] for version in sorted({begin, end})]
    heads = [f"version {each.policy_version}{_which(each.policy_version, step)}" for each in shown]

    def row(name: str, scores: Iterable[EvalReport | TaskScore | None]) -> str:
        values = (None if score is None else score.mean_reward if by_reward else score.pass_rate for score in scores)
        cells = ["–" if value is None else f"{value:.3f}" for value in values]
        return f"| {' | '.join([name, *cells, *(['not evaluated'] if only_base else [])])} |"

    def named(task: str) -> str:
        digits = task.removeprefix("file_")[:8]
        return f"{visible(files[task], 48)} ({digits})" if task in files else visible(task, 64)

    lines = [
        "",
        f"## {title} on {last.n} held-out questions, never trained on",
        "",
        f"| {' | '.join(['task', *heads, *([f'version {step} (this)'] if only_base else [])])} |",
        f"|{'---|' * (1 + len(heads) + only_base)}",
        row("all", shown),
        *(row(named(task), (each.per_task.get(task) for each in shown)) for task in sorted(last.per_task)),
    ]
    if not by_reward:
        spans = ["{:.3f} to {:.3f}".format(*rate_interval(each.pass_rate or 0.0, each.n)) for each in shown]
        lines += ["", f"95 % intervals of all questions: {', then '.join(spans)}."]
    pairs = paired(answers.get(begin, ()), answers.get(end, ()), by_reward=by_reward) if begin != end else None
    if pairs is not None:
        lines += ["", f"The same questions, version {begin} against version {end}: {pairs.words}."]
    if best and end == step and len(evaluations) > 2:
        lines += [
            "",
            f"Of {len(evaluations)} evaluations on these questions this is the best, so its score may be a little too high. "
            "An evaluation set (`[[eval.sets]]`) has no part in that choice.",
        ]
    if 0 < end < step:
        lines += ["", f"This policy, version {step}, was not evaluated."]
    if 0 in known and (why := incomparable(known[0], last)):
        lines += ["", f"The base policy was evaluated {why}, so it is not shown."]
    return lines


def _which(version: int, step: int) -> str:
    return " (base)" if version == 0 else " (this)" if version == step else ""


def _set_scores(lines: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """Results on evaluation sets: of the last measured version up to this one, beside the base
    policy's by the same measure.
    """
    rows, added = [], []
    for name in sorted({str(line["set"]) for line in lines}):
        of_set = [(line, report) for line in lines if line["set"] == name and (report := eval_report("node", line)) and report.n]
        known = {report.policy_version: (line, report) for line, report in of_set if report.policy_version <= step}
        if not known:
            continue
        line, last = known[max(known)]
        added += [f"- {visible(name, 64)} was {words}." for words in [added_words(line)] if words]
        base_line, base = known.get(0, (None, None))
        if base is not None and incomparable(base, last):
            base_line, base = None, None
        k, about = line.get("k"), f"{line.get('questions')} questions, temperature {line.get('temperature')}"
        version = f"{last.policy_version}{' (this)' if last.policy_version == step else ''}"
        measure = "mean reward" if last.pass_rate is None else f"avg@{k}"
        of_base = None if base is None else base.mean_reward if last.pass_rate is None else base.score
        trained = last.policy_version > 0
        figures: list[tuple[str, float | None, float | None]] = [(measure, of_base, last.score if trained else None)]
        if k != 1 and last.pass_rate is not None:
            figures.append((f"pass@{k}", _pass_at(base_line, k), _pass_at(line, k) if trained else None))
        if not trained:
            version = "not measured"
        for words, *both in figures:
            values = ("–" if value is None else f"{value:.3f}" for value in both)
            rows.append(f"| {visible(name, 64)}, {words} ({about}) | {' | '.join(values)} | {version} |")
    if not rows:
        return []
    title = "Evaluation sets" if added else "Evaluation sets, never trained on"
    table = ["", f"## {title}", "", "| set | base | trained | version |", "|---|---|---|---|", *rows]
    return [*table, *(["", *added] if added else [])]


def _pass_at(line: Mapping[str, Any] | None, k: Any) -> float | None:
    rates = {} if line is None else line.get("pass_at")
    value = rates.get(str(k)) if isinstance(rates, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _number(line: Mapping[str, Any], key: str) -> float:
    """A number from a line of a log; -1 if it has none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else -1.0


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported policy in `folder`, after `step`, with weights in `dtype`. notes: sentences about
    the choice of its checkpoint that its user may not expect. `rounding`: of adapters that were
    merged; else None.
    """

    folder: Path
    step: int
    dtype: str
    notes: tuple[str, ...] = ()
    rounding: DeltaRounding | None = None


def export_policy(
    source: Path, out_dir: Path, *, best: bool = False, dtype: str | None = None, system_prompt: str = ""
) -> Exported:
    """Write the policy of a checkpoint, or of a run's newest (or best) checkpoint, into `out_dir`,
    with adapters merged in float32.

    Args:
        source: A run's folder of one node (`var/runs/<run>/<node>`) or one checkpoint's folder.
        out_dir: Must not exist, or be empty. It appears completely or not at all.
        best: For a run, take the checkpoint nearest to the best held-out evaluation; the newest if
            no checkpoint has one, with a note.
        dtype: Of the weights, a name in `DTYPES`; None: the one used for matrix products.
        system_prompt: With which it was trained, for its card.

    Raises:
        CheckpointError: no usable checkpoint.
        ModelLoadError: the base model is missing.
        FileExistsError: `out_dir` contains files.
    """
    refuse_filled(out_dir, "the export")
    checkpoint, notes = _chosen_checkpoint(source, best)
    notes += _unchanged(checkpoint)
    wanted = dtype or checkpoint.model.dtype
    model, rounding = _policy_of(checkpoint, DTYPES[wanted])
    tokenizer = load_tokenizer(_base(checkpoint.model))
    with atomic_folder(out_dir) as staging, quietly():
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        write_card(staging, checkpoint, dtype=wanted, adapter=False, best=best, system_prompt=system_prompt)
    return Exported(out_dir, checkpoint.position.batch_number, wanted, notes, rounding)


def export_adapter(source: Path, out_dir: Path, *, best: bool = False, system_prompt: str = "") -> Exported:
    """Write the adapters alone, in float32 and therefore without rounding, in the form that
    `peft.PeftModel.from_pretrained` loads onto the base model.

    Arguments and errors are those of `export_policy`; also raises CheckpointError if no adapters
    were trained.
    """
    refuse_filled(out_dir, "the export")
    checkpoint, notes = _chosen_checkpoint(source, best)
    notes += _unchanged(checkpoint)
    if not checkpoint.model.lora_rank:
        raise CheckpointError(f"{source} was trained without adapters (trainer.lora.rank = 0): export the whole policy")
    adapted = _adapted(checkpoint)
    for config in adapted.peft_config.values():
        config.revision = checkpoint.model.model_revision or None
    with atomic_folder(out_dir) as staging, quietly():
        # The base's embeddings were not trained. Without this argument peft asks the hub whether to
        # save them.
        adapted.save_pretrained(staging, save_embedding_layers=False)
        write_card(staging, checkpoint, dtype="float32", adapter=True, best=best, system_prompt=system_prompt)
    return Exported(out_dir, checkpoint.position.batch_number, "float32", notes)


def lora_section(model: TrainedModel) -> LoraSection:
    """The adapter settings that a checkpoint was trained with."""
    return LoraSection(rank=model.lora_rank, alpha=model.lora_alpha, target_modules=model.lora_target_modules)


def _chosen_checkpoint(source: Path, best: bool) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint to export, and what is to be said about the choice. The file that names the
    best may outlive it, as in a copied run.
    """
    if (source / MANIFEST).is_file():
        return read_checkpoint(source), ()
    store = CheckpointStore(source / CHECKPOINTS, keep=1, keep_best=True)
    if best:
        evaluation = _best(source, store)
        if evaluation is None:
            newest, told = _newest(source, store)
            return newest, (
                *told,
                f"no checkpoint has an evaluation, so this is the newest; `swarm eval {shlex.quote(str(source))}` evaluates it",
            )
        if evaluation.step not in (there := store.steps()):
            others = f"there are those of steps {', '.join(map(str, there))}" if there else "there is none"
            raise CheckpointError(
                f"the checkpoint of step {evaluation.step}, which has the best evaluation, is gone from {store.folder}: {others}; "
                "copy it back, or export the newest without --best"
            )
        checkpoint = store.read(evaluation.step)
        return checkpoint, (*_foreign_owner(source, checkpoint), *_worse_than_base(source, evaluation))
    return _newest(source, store)


def _newest(source: Path, store: CheckpointStore) -> tuple[Checkpoint, tuple[str, ...]]:
    newest, broken = store.newest()
    if newest is None:
        raise CheckpointError(f"{source} has no checkpoint: give a run's folder such as var/runs/<run>/<node> after its first one")
    return newest, (*broken, *_foreign_owner(source, newest))


def _best(source: Path, store: CheckpointStore) -> BestEvaluation | None:
    """The best evaluation, by the newest one's measure. The last policy is evaluated after its
    trainer has ended, which therefore does not mark it.
    """
    there, marked = set(store.steps()), store.best()
    reports = [report for line in eval_lines(source / EVAL_FILE) if (report := eval_report("node", line))]
    found = [
        BestEvaluation(
            pass_rate=report.score,
            policy_version=report.policy_version,
            step=report.policy_version,
            measure=evaluation_measure(report),
        )
        for report in reports
        if report.n and report.policy_version and report.policy_version in there
    ]
    if not found:
        return marked
    newest = found[-1].measure
    known = [each for each in (marked, *found) if each is not None and each.measure == newest]
    return max(known, key=lambda each: each.pass_rate)


def _foreign_owner(source: Path, checkpoint: Checkpoint) -> list[str]:
    folder = source.absolute()
    there = f"{folder.parent.name}/{folder.name}"
    return [f"the checkpoint is of {checkpoint.made_by}, not of {there}"] if checkpoint.made_by not in ("", there) else []


def _worse_than_base(source: Path, best: BestEvaluation) -> list[str]:
    """A note if no checkpoint has a better evaluation than the base policy had."""
    reports = [report for line in eval_lines(source / EVAL_FILE) if (report := eval_report("node", line))]
    base = [report.score for report in reports if report.policy_version == 0 and evaluation_measure(report) == best.measure]
    if not base or base[-1] <= best.pass_rate:
        return []
    return [f"the base policy has a better evaluation, {base[-1]:.3f}, than the best checkpoint, {best.pass_rate:.3f}"]


def _base(model: TrainedModel) -> ModelSection:
    return ModelSection(path=model.model_path, revision=model.model_revision)


def _policy_of(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Any, DeltaRounding | None]:
    model: Any = load_causal_lm(_base(checkpoint.model), dtype=dtype, device=_CPU)
    tally = RoundingTally()
    if checkpoint.model.lora_rank:
        load_policy_tensors(model, policy_tensors(_adapted(checkpoint), dtype, tally=tally))
    else:
        # State that is not trained, such as the bias of a router without a gradient, comes from the
        # base.
        load_trainable(model, checkpoint.state.weights)
    return model, tally.rounding()


def _adapted(checkpoint: Checkpoint) -> Any:
    """The model as it was trained: its base in the dtype used then, the adapters in float32."""
    trained = checkpoint.model
    base = load_causal_lm(_base(trained), dtype=DTYPES[trained.dtype], device=_CPU)
    adapted = with_adapters(base, lora_section(trained))
    load_trainable(adapted, checkpoint.state.weights)
    return adapted
