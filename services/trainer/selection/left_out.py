"""Groups that steps leave out, and who is told: the log, with a remedy and not too often, and the
node's verifiers, of absurd foreign text. Pure apart from one write; time is an argument.

Two honest nodes find a few of each other's answers absurd all the time, so a line for each would
teach people to ignore the log. The first group of any other reason is told at once; after that, and
for absurd text, one line tells of all steps since the last one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from services.trainer.selection.group_tokens import GROUP_BUDGET, SENDER_BUDGET
from shared.contracts.codec import encode
from shared.contracts.senders import MAX_FINDINGS, AbsurdText, TrainerFindings
from shared.contracts.subjects import FINDINGS_KEY, node_bucket
from shared.transport.base import Transport

_FORMAT = "compare the tokenizer's and the generator's model (model.path, model.revision)"
USUAL_ABSURD = (
    "none needed: a few answers of other nodes are always too unlikely under this node's policy, and many for a while if a node "
    "was stopped or is behind"
)
REMEDIES = {
    "unscored": "see the verifier's log for why it gave no rewards",
    "empty": "one now and then needs none: such a group has no tokens to train on; often: raise generator.max_new_tokens",
    "too_long": "raise model.max_length, or lower generator.max_new_tokens",
    "malformed_tokens": _FORMAT,
    "unknown_token": _FORMAT,
    "text_alone": "use an engine that returns token ids; a server of text alone can generate but not be trained from",
    "control_text": "nothing: foreign text that contains the model's control tokens is not trained on",
    "changed_question": "correct the model's chat template, which cannot write such questions, or not as they are",
    "absurd": "much of a sender's text stays absurd under this node's policy: `swarm rollouts NODE --from SENDER` shows it, a "
    "larger trainer.constants.foreign_logprob_slack admits it, `swarm ban SENDER` keeps the sender out",
    "truncated": "raise generator.max_new_tokens, or set trainer.drop_truncated = false",
    "negative": "nothing: no answer of these groups has an advantage of 0 or more, and the others are left out (trainer.foreign)",
    GROUP_BUDGET: "nothing: one group may cost only so much of a step (trainer.constants.foreign_cost_factor)",
    SENDER_BUDGET: "nothing: a sender's groups may cost only so much of a step (trainer.constants.foreign_cost_factor)",
}


def remedies(skipped: Mapping[str, int]) -> dict[str, str]:
    """The remedy for each reason in `skipped`."""
    return {reason: REMEDIES[reason] for reason in skipped if reason in REMEDIES}


TOLD_EVERY_S = 600.0
ABSURD_RATIO = 0.1
"""Share of a sender's answers above which absurd text is no longer usual. Among honest nodes it was
at most 5.5 % (docs/security.md, "Absurd text").
"""
FEW_ANSWERS = 64
"""Fewer answers of a sender say nothing about a share."""


@dataclass(frozen=True, slots=True)
class LeftOutSummary:
    """Content of one line. `groups`: those left out in `steps` steps, by reason; `absurd_ratio`: by
    sender, the share of its answers that were absurd, of those senders where that is unusual.
    """

    groups: dict[str, int]
    steps: int
    absurd_ratio: dict[str, float]
    remedy: dict[str, str]
    usual: bool
    """Say whether nobody has to do anything."""


class LeftOutReport:
    """Collects what steps leave out until the next line is due."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._told: set[str] = {"absurd"}
        self._unusual_before: frozenset[str] = frozenset()
        self._steps = 0
        self._groups: Counter[str] = Counter()
        self._absurd: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    def note(
        self, groups: Mapping[str, int], absurd_of: Mapping[str, int], answers_of: Mapping[str, int], now_s: float
    ) -> LeftOutSummary | None:
        """Record a step; returns the line that is due, if any.

        Args:
            groups: Number of groups that the step left out, by reason.
            absurd_of, answers_of: Foreign answers that were absurd and that were trained on, by
                sender.
            now_s: A monotonic clock.
        """
        self._steps += 1
        self._groups.update(groups)
        self._absurd.update(absurd_of)
        self._answers.update(absurd_of)
        self._answers.update(answers_of)
        new = {reason for reason, count in groups.items() if count} - self._told
        if not new and now_s - self._since_s < TOLD_EVERY_S:
            return None
        line = self._line() if self._groups.total() else None
        # A line that is early, because of a new reason, does not end the time over which shares are
        # measured.
        if now_s - self._since_s >= TOLD_EVERY_S:
            self._since_s, self._unusual_before = now_s, frozenset(self._unusual())
            self._clear()
        else:
            self._groups.clear()
            self._steps = 0
        self._told |= new
        return line

    def _unusual(self) -> dict[str, float]:
        return {
            node: round(count / self._answers[node], 3)
            for node, count in sorted(self._absurd.items())
            if self._answers[node] >= FEW_ANSWERS and count / self._answers[node] > ABSURD_RATIO
        }

    def _line(self) -> LeftOutSummary:
        """A ban is suggested only for a sender whose text is absurd in two lines' times in
        succession, because a node that was stopped or is behind sends such text for a while.
        """
        unusual, groups = self._unusual(), {reason: count for reason, count in self._groups.items() if count}
        stays = bool(self._unusual_before & unusual.keys())
        remedy = remedies(groups)
        if "absurd" in remedy and not stays:
            remedy["absurd"] = USUAL_ABSURD
        return LeftOutSummary(groups, self._steps, unusual, remedy, usual=not unusual and groups.keys() == {"absurd"})

    def _clear(self) -> None:
        self._steps = 0
        for counts in (self._groups, self._absurd, self._answers):
            counts.clear()


# The verifiers decide what counts against whom (`services.verifier.reputation`). Only text
# that is absurd under the policy is reported. Whether a group's gradient opposes the trend of
# held-out results is not measured: that takes a gradient of the held-out set, which costs as much
# as a step; one group's gradient is noise by comparison; and a group that is right where the policy
# is wrong, which is the purpose of foreign groups, opposes it too.


def absurd_text(batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int]) -> list[AbsurdText]:
    """One finding for each node in `absurd_of` (absurd answers by node); `trained_of` counts its
    answers that were trained on.

    Answers that were left out for another reason, or as candidates, are ignored. Those that were
    not checked count as good.
    """
    return [
        AbsurdText(batch=batch, sender=node, absurd=count, answers=count + trained_of.get(node, 0))
        for node, count in sorted(absurd_of.items())
        if count > 0
    ]


class Findings:
    """The newest findings; they are written when there are new ones."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._found: deque[AbsurdText] = deque(maxlen=MAX_FINDINGS)
        self._untold = False

    def note(self, batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int]) -> None:
        """Record the findings of batch `batch`; see `absurd_text`."""
        found = absurd_text(batch, absurd_of, trained_of)
        self._found.extend(found)
        self._untold = self._untold or bool(found)

    async def tell(self, plane: Transport, now_s: float) -> None:
        """Write the findings if there are new ones.

        Raises:
            TransportError: the node plane does not answer; the next call writes them.
        """
        if not self._untold:
            return
        message = TrainerFindings(node=self._node, updated_at=now_s, found=list(self._found))
        await plane.kv.put(node_bucket(self._node), FINDINGS_KEY, encode(message))
        self._untold = False
