"""Why an answer has its reward: who judged, and what of the text was judged.

A reward is one number by one verifier. Its parts are what the verifier was given (the content of
the last `<answer>` tag, or the whole text), whether that is full marks, part of them or none, and,
of a foreign answer, whether a near miss counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import NodeConfig
from shared.contracts.messages import ScoredGroup
from shared.evaluation import PASS_REWARD

NEAR_MISS = "; a near miss of another node counts 0 (verifier.foreign_partial_credit)"


@dataclass(frozen=True, slots=True)
class Judged:
    """verifier: its name. read_as: what it was given of the text; None: the whole text. marks: what
    the reward says.
    """

    verifier: str
    read_as: str | None
    marks: str


class Judge:
    """Says it of answers under one node's configuration, which may be another one now than when
    they were scored.
    """

    def __init__(self, config: NodeConfig) -> None:
        from shared.tasks.verifiers import VerifierChoice

        self._choice = VerifierChoice(config.tasks)
        self._partial_credit = config.verifier.foreign_partial_credit

    def verifier(self, scored: ScoredGroup) -> str:
        """Who judges a group's answers."""
        return self._choice.name_for(scored.group.task.ref)

    def of(self, scored: ScoredGroup, text: str, reward: float) -> Judged:
        """Of one answer of a group."""
        from shared.tasks.answers import CLOSING_TAG, extract_answer

        read = extract_answer(text) if CLOSING_TAG in text else text.strip()
        return Judged(self.verifier(scored), None if read == text.strip() else read, marks(reward))

    def rules(self, scored: ScoredGroup) -> str:
        """Who judges a group's answers, and what a near miss counts."""
        near = "" if scored.origin == "local" or self._partial_credit else NEAR_MISS
        return f"{self.verifier(scored)}{near}"


def marks(reward: float) -> str:
    """What a reward says of an answer."""
    if reward >= PASS_REWARD:
        return "right"
    return "in part" if reward > 0.0 else "wrong"
