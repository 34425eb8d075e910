"""OAPL (arXiv 2602.19362): no ratio; it regresses the log ratio to the sampling policy on the
advantage over the soft value.

`(scale sum (lp - log b) - A)^2` of the sequence. Its gradient vanishes for the optimal policy.
"""

from __future__ import annotations

from services.trainer.objectives.base import Loss, LossTerms, Objective


def _loss(terms: LossTerms) -> Loss:
    sums = terms.from_behaviour().sum(dim=1, keepdim=True)
    loss = (terms.option("scale") * sums - terms.advantage).square().expand_as(terms.logprobs)
    return Loss(loss, terms.log_ratio.exp(), terms.mask.new_zeros(terms.mask.shape))


OBJECTIVE = Objective(
    name="oapl",
    loss=_loss,
    aggregation="sequence_mean",
    advantages="soft_value",
    uses_behaviour=True,
    counts_uninformative=True,
    differs="its paper also pulls answers of groups whose rewards are all equal back to the policy that sampled them; here "
    "such groups have no loss",
    options={"value_beta": 1.0, "scale": 1e-3},
)
