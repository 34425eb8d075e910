"""Why an answer has its reward: which verifier scored it, and which part of the text.

A reward is one number from one verifier. It depends on what the verifier was given (the content of
the last `<answer>` tag, or the whole text), and, for a foreign answer, on whether a near miss
counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import NodeConfig, TaskSpec
from shared.contracts.messages import ScoredGroup
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.choice import passes

UNKNOWN = "not known: the file is not in this configuration (--config gives the node's)"
NEAR_MISS = "; a near miss from another node counts 0 (verifier.foreign_partial_credit)"


@dataclass(frozen=True, slots=True)
class Judged:
    """verifier: its name. read_as: the part of the text that it was given; None: all of it. marks:
    the reward in words.
    """

    verifier: str
    read_as: str | None
    marks: str


class Judge:
    """Explains rewards under one node's present configuration, which may have changed since the
    answers were scored. told_by: which configuration that is, if it may not be the node's. names:
    of the files that are datasets.
    """

    def __init__(self, config: NodeConfig, told_by: str = "", names: FileNames = UNNAMED) -> None:
        from shared.tasks.verifiers import VerifierChoice

        self._choice = VerifierChoice(config.tasks)
        self._files = [spec for spec in config.tasks if spec.source == "file"]
        self._names = names
        self._partial_credit = config.verifier.foreign_partial_credit
        self._told_by = f" ({told_by})" if told_by else ""

    def verifier(self, scored: ScoredGroup) -> str:
        """Name of the verifier that scores a group's answers. A file's dataset is named after its
        rows, which are not read for this: of several files, each one's verifier is named if no
        record says which of them it is.
        """
        files = self._files_of(scored)
        if files is None:
            return self._choice.name_for(scored.group.task.ref)
        return " or ".join(sorted({spec.verifier for spec in files})) or UNKNOWN

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
        from shared.tasks.answers import CLOSING_TAG, extract_answer

        read = extract_answer(text) if CLOSING_TAG in text else text.strip()
        return Judged(self.verifier(scored), None if read == text.strip() else read, marks(reward, passes(scored, place)))

    def rules(self, scored: ScoredGroup) -> str:
        """A group's verifier, by which configuration, and what a near miss counts."""
        near = "" if scored.origin == "local" or self._partial_credit else NEAR_MISS
        return f"{self.verifier(scored)}{self._told_by}{near}"


def marks(reward: float | None, passed: bool | None) -> str:
    """A reward in words."""
    if reward is None:
        return "unknown"
    if passed is None:
        return "no pass defined"
    return "right" if passed else "in part" if reward > 0.0 else "wrong"
