"""Estimates what a sender's text is worth relative to this node's: how often its groups passed
here, over earlier batches. Pure.

HACPO (arXiv 2603.02604) multiplies the advantages of agent j's text, where k learns from it, by
clip(P_j / P_k, 0.1, 10), with P the mean accuracy over the last five batches of questions that all
agents answer. Nodes of a swarm answer different questions and share only some of their groups, so
three things differ:

* **Like is compared with like.** A foreign group whose rewards are all equal is never drawn, while
local groups are trained on whatever their rewards are. If all of them counted, others would look
more capable on hard sources and less capable on easy ones than they are. So on both sides only
groups count in which some completions pass and some fail. That moves both means towards a half:
among groups of one size, a factor is nearer to 1 than the ratio of true pass rates, and on the same
side of it. Groups of two carry no information.
* **By source.** Each of the sender's groups is compared with the mean pass rate of this node's
groups on the same task source, so that easy tasks do not make a sender look capable. Sources that
only one side has do not count.
* **Earlier batches only.** A factor does not depend on the rewards of the group that it multiplies;
otherwise groups would count for more because they turned out well.

The rewards are those of this node's scorer; a sender's claims play no part. A sender may still
choose which groups it sends: that gives it at most a P of 1, so a factor of 1 / P_own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.contracts.messages import Batch, ScoredGroup

LEAST_GROUPS = 4
"""Smallest number of known groups, both of the sender and of this node, on sources that both have;
with fewer the factor is 1. The mean of four is off by an eighth where a single one is off by a
quarter.
"""

Seen = tuple[str | None, str, float]
"""A group of an earlier batch: its sender (`share_of`; None: this node), its task source, the part
of it that passed.
"""

Window = list[list[Seen]]
"""One list per batch, oldest first. Plain values, as stored in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRules:
    """window_batches: how many earlier batches count; 0: every factor is 1. low, high: bounds of a
    factor.
    """

    window_batches: int = 0
    low: float = 0.1
    high: float = 10.0

    def __post_init__(self) -> None:
        """Refuse bounds that exclude a factor of 1."""
        if self.window_batches < 0:
            raise ValueError(f"window_batches is {self.window_batches}: it must be 0 or more")
        if not 0.0 < self.low <= 1.0 <= self.high < math.inf:
            raise ValueError(f"bounds are {self.low} and {self.high}: need 0 < low <= 1 <= high")


def capability_factors(window: Window, rules: CapabilityRules) -> dict[str, float]:
    """By sender: clip(P_sender / P_own, low, high). Senders about whom too little is known are
    omitted, which means 1.

    Example: the sender's groups of one source passed 3/4 on average and this node's of that source
    1/4: the factor is 3.
    """
    own: dict[str, list[float]] = {}
    theirs: dict[str, list[tuple[str, float]]] = {}
    for author, source, passed in (seen for batch in window for seen in batch):
        if author is None:
            own.setdefault(source, []).append(passed)
        else:
            theirs.setdefault(author, []).append((source, passed))
    factors: dict[str, float] = {}
    for author, groups in theirs.items():
        compared = [(source, passed) for source, passed in groups if source in own]
        if min(len(compared), sum(len(own[source]) for source in {source for source, _ in compared})) < LEAST_GROUPS:
            continue
        author_passes = math.fsum(passed for _, passed in compared)
        local_passes = math.fsum(math.fsum(own[source]) / len(own[source]) for source, _ in compared)
        factors[author] = min(max(author_passes / local_passes, rules.low), rules.high)
    return factors


def after_batch(window: Window, batch: Batch, rules: CapabilityRules) -> Window:
    """The window after training on `batch`, for the next batch."""
    return newest([*window, _news(batch)], rules)


def _news(batch: Batch) -> list[Seen]:
    """The batch's groups for the window; replayed groups were recorded with their first batch."""
    return [seen for item in batch.items if not item.replayed and (seen := _seen(item.scored)) is not None]


def newest(window: Window, rules: CapabilityRules) -> Window:
    """The part that the rules use of a window that may have been kept under other rules."""
    return window[len(window) - min(len(window), rules.window_batches) :]


def share_of(scored: ScoredGroup) -> str:
    """The name under which a foreign group's sender is recorded: the one that its share of a batch
    counts against.
    """
    return scored.share or scored.group.node


def _seen(scored: ScoredGroup) -> Seen | None:
    """None if the group cannot be compared: it is not scored, no pass is defined, or all its
    completions pass, or none.
    """
    passes, completions = sum(scored.passed or ()), len(scored.rewards)
    if scored.failure is not None or completions != len(scored.group.completions) or not 0 < passes < completions:
        return None
    ref = scored.group.task.ref
    return None if scored.origin == "local" else share_of(scored), f"{ref.dataset} {ref.config}", passes / completions
