"""Which groups and answers to read, and why each answer has its reward: which verifier scored it,
and which part of the text.

A reward is one number from one verifier. It depends on what the verifier was given (the answer that
was found in the text), and, for a foreign answer, on whether a near miss counts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shared.config import ConfigError, NodeConfig, TaskSpec, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.contracts.messages import Batch, BatchItem, Completion, ScoredGroup
from shared.text import visible
from swarm_cli.chosen_config import default_file, for_node
from swarm_cli.errors import CommandError
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.installation import shown
from swarm_cli.rollouts.records import BatchedGroup
from swarm_cli.runs import runs_of_this_user, started_with


def passes(scored: ScoredGroup, place: int) -> bool | None:
    """Check whether the answer at this place passes; None: no pass is defined for the group's
    source.
    """
    return None if scored.passed is None else scored.passed[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which groups to show; None means any. `seen`: the datasets of all groups that were looked
    through.

    origin: groups of this node (`local`) or of other nodes (`external`). sender: groups of the node
    with this name. datasets: groups of any of them. group: groups whose id begins with this. marks:
    completions that pass (`right`) or do not (`wrong`), and only groups that have any.
    """

    origin: Literal["local", "external"] | None = None
    sender: str | None = None
    datasets: frozenset[str] | None = None
    group: str = ""
    marks: Literal["right", "wrong"] | None = None
    seen: set[str] = field(default_factory=set, compare=False)

    def groups(self, batch: Batch) -> Iterator[BatchedGroup]:
        """The chosen groups of a batch, in training order."""
        for item in batch.items:
            self.seen.add(item.scored.group.task.ref.dataset)
            if self._asked_for(item):
                yield BatchedGroup(batch, item)

    def completions(self, item: BatchItem) -> list[tuple[int, Completion, float]]:
        """The chosen completions: place in the group, completion, reward."""
        pairs = zip(item.scored.group.completions, item.scored.rewards, strict=False)
        return [
            (place, completion, reward)
            for place, (completion, reward) in enumerate(pairs)
            if self.marks is None or passes(item.scored, place) is (self.marks == "right")
        ]

    def _asked_for(self, item: BatchItem) -> bool:
        scored = item.scored
        return (
            self.origin in (None, scored.origin)
            and self.sender in (None, scored.group.node)
            and (self.datasets is None or scored.group.task.ref.dataset in self.datasets)
            and scored.group_id.startswith(self.group)
            and bool(self.completions(item))
        )


UNKNOWN = "not known: the file is not in this configuration (--config gives the node's)"
NEAR_MISS = (
    "; a near miss from another node counts as wrong: 0, or 1 less than a pass of at most 0 (verifier.foreign_partial_credit)"
)


@dataclass(frozen=True, slots=True)
class Judged:
    """verifier: its name. read_as: the part of the text that it was given; None: all of it. marks:
    the reward in words. replaced: the reward is not the verifier's, but what every foreign answer
    that does not pass counts, so no display shows it as earned.
    """

    verifier: str
    read_as: str | None
    marks: str
    replaced: bool = False


class ScoredAgain(NamedTuple):
    """Present rewards of a group's answers, None where unknown, with the causes, and as `problem`
    what the first failing call said; or no rewards, and `problem` says why. `reference`: the
    answer that the row has now.
    """

    rewards: Sequence[float | None] = ()
    causes: Sequence[str] = ()
    problem: str = ""
    reference: str | None = None


class Judge:
    """Explains rewards under one node's present configuration, which may have changed since the
    answers were scored. told_by: which configuration that is, if it may not be the node's. names:
    of the files that are datasets. unknown: why no configuration tells; empty if this one does.
    """

    def __init__(self, config: NodeConfig, told_by: str = "", names: FileNames = UNNAMED, unknown: str = "") -> None:
        from shared.tasks.verifiers import VerifierChoice

        self._choice = VerifierChoice(config.tasks)
        self._specs, self._scorer_ids = config.tasks, dict[int, str]()
        self._unknown = unknown
        self._files = [spec for spec in config.tasks if spec.source == "file" and not unknown]
        self._names = names
        self._verifier_section = config.verifier
        self._partial_credit = config.verifier.foreign_partial_credit
        self._told_by = f" ({told_by})" if told_by else ""

    def verifier(self, scored: ScoredGroup) -> str:
        """Name of the verifier that scores a group's answers. A file's dataset is named after its
        rows, which are not read for this: of several files, each one's verifier is named if no
        record says which of them it is.
        """
        if self._unknown:
            return f"not known: {self._unknown}"
        files = self._files_of(scored)
        if files is None:
            now = _shown(self._choice.name_for(scored.group.task.ref))
        else:
            now = " or ".join(sorted({_shown(spec.verifier) for spec in files})) or UNKNOWN
        if not self._has_changed(scored):
            return now
        before = f"rewards {' and '.join(visible(name, 60) for name in scored.parts)}" if scored.parts else "not known"
        return f"{before}: its [[tasks]] entry, or the file of its reward, has changed since (now {now})"

    def _has_changed(self, scored: ScoredGroup) -> bool:
        """Check whether none of the sources that the group may be from has the scorer that gave its
        rewards.
        """
        files, spec = self._files_of(scored), self._choice.spec_for(scored.group.task.ref)
        specs = ([] if spec is None else [spec]) if files is None else files
        return scored.scorer is not None and bool(specs) and scored.scorer not in map(self._scorer_id, specs)

    def _scorer_id(self, spec: TaskSpec) -> str:
        place = self._specs.index(spec)
        if place not in self._scorer_ids:
            self._scorer_ids[place] = spec.scorer_id
        return self._scorer_ids[place]

    def file(self, scored: ScoredGroup) -> str:
        """The file's name, without its folder, that a group's question is from: people do not know
        it by its dataset, which is a hash. If no record says which of several files it is, each is
        named. Empty: no file's, or one that is not in this configuration.
        """
        known = self._names.file(scored.group.task.ref.dataset)
        return known or " or ".join(sorted({spec.file_name for spec in self._files_of(scored) or ()}))

    def _files_of(self, scored: ScoredGroup) -> list[TaskSpec] | None:
        """The files that a group's question may be from; None if it is from none."""
        from shared.tasks.file_rows import is_file_name

        dataset = scored.group.task.ref.dataset
        if not is_file_name(dataset):
            return None
        known = [spec for spec in self._files if spec.file_name == self._names.file(dataset)]
        return known or [spec for spec in self._files if spec.dataset in {"", dataset}]

    def of(self, scored: ScoredGroup, place: int, text: str, reward: float) -> Judged:
        """The explanation of the reward of the answer at this place."""
        from shared.tasks.answers import extract_answer

        # A reward of a file gets all of the text. What another scorer was given is not known.
        whole = self._by_reward_file(scored) or self._has_changed(scored)
        read = text.strip() if whole else extract_answer(text)
        read = "no answer: only a thought, too long, or mostly white space" if read is None else read
        shown, passed = None if read == text.strip() else read, passes(scored, place)
        if scored.origin != "local" and passed is False and not self._partial_credit:
            return Judged(self.verifier(scored), shown, "counts as wrong", replaced=True)
        parts = {name: values[place] for name, values in scored.parts.items()}
        return Judged(self.verifier(scored), shown, marks(reward, passed, parts))

    def _by_reward_file(self, scored: ScoredGroup) -> bool:
        from shared.reward_files import has_rewards

        files = self._files_of(scored)
        spec = self._choice.spec_for(scored.group.task.ref)
        names = [each.verifier for each in ([spec] if spec else []) if files is None] + [each.verifier for each in files or ()]
        return any(map(has_rewards, names))

    async def score_again(self, groups: Sequence[ScoredGroup]) -> list[ScoredAgain]:
        """Score the answers of groups in the sandbox, by the present configuration and rewards. A
        row is known by its file and place: if another reward gets other columns, the rows have
        another name.

        Raises:
            CommandError: a source or the sandbox cannot be used.
        """
        from shared.tasks import check_specs
        from shared.tasks.derive import TaskConfigError
        from shared.tasks.sandbox import SandboxError, ScorerPool, ScoringJob

        if self._unknown:
            raise CommandError(self._unknown)
        sources = [self._source(group) for group in groups]
        used = [spec for place, spec in enumerate(sources) if spec is not None and spec not in sources[:place]]
        places = [None if spec is None else used.index(spec) for spec in sources]
        try:
            named = check_specs([spec.model_copy(update={"dataset": ""}) if spec.source == "file" else spec for spec in used])
            jobs = [
                ScoringJob(
                    ref=msgspec.structs.replace(group.group.task.ref, dataset=named[place].dataset),
                    texts=[each.text if named[place].turns is None else each.turns for each in group.group.completions],
                    want_task=True,
                )
                for group, place in zip(groups, places, strict=True)
                if place is not None
            ]
            async with ScorerPool.from_config(self._verifier_section, tasks=named) as pool:
                results = iter(await pool.run(jobs))
        except (TaskConfigError, SandboxError) as error:
            raise CommandError(str(error)) from None
        found = []
        for group, place in zip(groups, places, strict=True):
            if place is None:
                found.append(ScoredAgain(problem=f"its source is {self.verifier(group)}"))
                continue
            result = next(results)
            if result.reason is not None:
                found.append(ScoredAgain(problem=result.detail))
            elif result.task is None or result.task.text != group.group.task.text:
                found.append(ScoredAgain(problem="its row has another question now"))
            else:
                causes = [mark.cause for mark in result.marks]
                found.append(ScoredAgain(result.rewards, causes, result.detail, result.task.answer))
        return found

    def _source(self, scored: ScoredGroup) -> TaskSpec | None:
        """The source of a group's question; None if it cannot be told."""
        from shared.config.task_sections import TaskSpec

        ref = scored.group.task.ref
        if (files := self._files_of(scored)) is not None:
            return files[0] if len(files) == 1 else None
        return self._choice.spec_for(ref) or TaskSpec(dataset=ref.dataset, config=json.loads(ref.config))

    def rules(self, scored: ScoredGroup) -> str:
        """A group's verifier, by which configuration, and what a near miss counts."""
        near = "" if scored.origin == "local" or self._partial_credit else NEAR_MISS
        return f"{self.verifier(scored)}{self._told_by}{near}"


def _shown(verifier: str) -> str:
    """The name of a verifier, or of rewards without their files' folders."""
    from shared.reward_files import has_rewards, verifier_words

    return verifier_words(verifier) if has_rewards(verifier) else verifier


def marks(reward: float | None, passed: bool | None, parts: Mapping[str, float | None]) -> str:
    """A reward in words. parts: of several rewards, the value of each."""
    if reward is None:
        return "unknown"
    if passed is None:
        return "no pass defined"
    if passed or reward <= 0.0:
        return "right" if passed else "wrong"
    only = bonus(reward, passed, parts)
    return f"wrong; {only}" if only else "part of the reward"


def bonus(reward: float | None, passed: bool | None, parts: Mapping[str, float | None]) -> str:
    """The reward of an answer that does not pass and earns nothing of the first of several rewards,
    such as `0.1 of length`; empty for any other answer.
    """
    first, *others = [*parts.items(), ("", None)]
    earned = [visible(name, 60) for name, value in others if value is not None and value > 0.0]
    is_bonus = reward is not None and reward > 0.0 and passed is False and (first[1] or 0.0) == 0.0
    return f"{reward:.3g} of {' and '.join(earned)}" if is_bonus and earned else ""


def judge_of(config: NodeConfig, given: Path | None, run: str, names: FileNames = UNNAMED, *, node_url: str = "") -> Judge:
    """The judge of the answers in `run` ("": not known). config, given: what the command reads, and
    the file of --config. names: of the files that are datasets. node_url: of the command line.

    A run that was copied here is not asked: its note may be somebody else's, and would say which
    files are read. Which configuration tells is then part of what is said. A run of another folder
    is judged by its own configuration if it is running on this machine, and never by the one that
    happens to be here.
    """
    file = given or os.environ.get(CONFIG_FILE_VARIABLE)
    folder = config.node.var_dir / "runs" / run
    elsewhere = bool(run) and not folder.is_dir() and (bool(node_url) or "node_url" not in config.nats.model_fields_set)
    if elsewhere:
        folder = next((each for each in runs_of_this_user() if each.name == run), folder)
    known = started_with(folder) if run else None
    if known is not None and (not file or Path(file).resolve() == known.resolve()):
        try:
            return Judge(for_node(load_config(known), config.node.id), names=names)
        except (ConfigError, OSError):
            pass  # the file was changed or removed since
    if elsewhere and not file:
        return Judge(config, "", names, f"run {visible(run, 80)} is not of this folder; give its configuration with --config")
    return Judge(config, f"by {visible(str(file or shown(default_file())), 200)}; --config names another", names)
