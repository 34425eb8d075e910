"""Remedies for the trainer's log, by the reason for which a step leaves groups out."""

from __future__ import annotations

from collections.abc import Mapping

from services.trainer.selection.budget import GROUP_BUDGET, SENDER_BUDGET

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
    "larger trainer.foreign_logprob_slack admits it, `swarm ban SENDER` keeps the sender out",
    "truncated": "raise generator.max_new_tokens, or set trainer.drop_truncated = false",
    "negative": "nothing: no answer of these groups has an advantage of 0 or more, and trainer.drop_foreign_negatives (or "
    "drop_local_negatives) leaves the others out",
    GROUP_BUDGET: "raise trainer.foreign_cost_factor to train on such groups too: one group may cost only so much of a step",
    SENDER_BUDGET: "raise trainer.foreign_cost_factor to train on more of a sender's groups: they may cost only so much of a step",
}


def remedies(skipped: Mapping[str, int]) -> dict[str, str]:
    """The remedy for each reason in `skipped`."""
    return {reason: REMEDIES[reason] for reason in skipped if reason in REMEDIES}
