"""Detects that the policy is forgetting a dataset, by comparing each dataset's held-out pass rate
with its recent best. Pure.

The overall rate hides this: while one dataset is lost, others rise. A dataset has fallen when the
mean of its two newest results is below the best such mean by more than noise explains and by more
than `_LEAST_FALL`. Means of two follow a quick rise; smoothing over more results would still be
below the level reached when the fall begins.

The noise model is n independent questions whose pass rate is the middle of the two means, shrunk
towards a half by one pass and one failure, so that a few questions that all passed do not count as
certainty. The more datasets are compared, the further one of them must fall (Bonferroni): among up
to 30 constant ones, noise causes a false alarm in less than one of a hundred evaluations
(`tests/unit/test_sampler_forgetting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from shared.contracts.control import TaskScore
from shared.contracts.sampler_state import MAX_DATASETS, DatasetLevel

_STANDARD_ERRORS = 2.25
"""Standard errors of a single result. Compared with the best of about ten means of two, noise alone
falls that far about once in a hundred evaluations.
"""
_LEAST_FALL = 0.1
"""Smaller falls are a normal cost of learning other things. In 240 runs of
experiments/q9-estimators.toml, which has no adversary, a dataset fell by more than noise explains
in 10 % of 3,340 evaluations (from 0.15 to 0.07, say), and by more than a tenth in 0.5 %.
"""
_FORGETTING = 0.1
"""Each new value moves the remembered best by this part of its distance from it, so a fall counts
for about ten evaluations, or periods of `share_controller`.
"""


def remembered_best(best: float, now: float) -> float:
    """The best value so far once the present one is counted: that one if it is higher, else a best
    that has faded a little towards it.
    """
    return max(now, best - _FORGETTING * (best - now))


def after_evaluation(levels: Sequence[DatasetLevel], scores: Mapping[str, TaskScore]) -> tuple[list[DatasetLevel], str | None]:
    """The levels after a new evaluation, and the dataset that fell furthest, in standard errors;
    None if none fell.

    Args:
        levels: Those before it. A dataset that `scores` lacks is left out of the new ones.
        scores: The evaluation's results by dataset; only the first `MAX_DATASETS` by name are used.
    """
    known = {level.dataset: level for level in levels}
    looked_at = sorted(dataset for dataset, score in scores.items() if score.n and score.pass_rate is not None)[:MAX_DATASETS]
    after: list[DatasetLevel] = []
    furthest, most = None, _threshold(len(looked_at))
    for dataset in looked_at:
        score, before = scores[dataset], known.get(dataset)
        assert score.pass_rate is not None
        if before is None or before.n != score.n:  # other questions, so the results cannot be compared
            after.append(DatasetLevel(dataset=dataset, n=score.n, rate=score.pass_rate, best=score.pass_rate))
            continue
        now = (before.rate + score.pass_rate) / 2
        best = remembered_best(before.best, now)
        after.append(DatasetLevel(dataset=dataset, n=score.n, rate=score.pass_rate, best=best))
        fallen = (best - now) / _error(now, best, score.n)
        if best - now > _LEAST_FALL and fallen > most:
            furthest, most = dataset, fallen
    return after, furthest


def _threshold(datasets: int) -> float:
    """Standard errors by which one of `datasets` must fall."""
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-_STANDARD_ERRORS) / max(1, datasets))


def _error(now: float, best: float, n: int) -> float:
    rate = (n * (now + best) / 2 + 1) / (n + 2)
    return math.sqrt(rate * (1 - rate) / n)
