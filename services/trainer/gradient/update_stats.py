"""Statistics of one optimizer step's gradient, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.objectives.sums import LossSums


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Statistics over the completion tokens of the groups that took part; the means are 0 when
    there are none.

    loss: the step's loss. groups, groups_left_out, sequences, tokens: counts. micro_batches,
    padded_tokens: what was computed, prompts and padding included. clip_fraction, dropped_fraction,
    truncated_fraction: shares of tokens whose ratio was clipped, that were rejected, whose
    importance weight was capped. ratio_mean, ratio_max: policy to proximal policy.
    importance_weight_mean: proximal to behaviour, capped. behaviour_fraction: share of tokens with
    behaviour logprobs. kl_behaviour: KL(behaviour || proximal), k3, in nats per token, over those.
    kl_reference: k3, per token. entropy: nats per token.
    """

    loss: float
    groups: int
    groups_left_out: int
    sequences: int
    tokens: int
    micro_batches: int
    padded_tokens: int
    clip_fraction: float
    dropped_fraction: float
    truncated_fraction: float
    ratio_mean: float
    ratio_max: float
    importance_weight_mean: float
    behaviour_fraction: float
    kl_behaviour: float
    kl_reference: float
    entropy: float

    @classmethod
    def nothing(cls) -> UpdateStats:
        """The statistics of an update in which no group took part."""
        return cls.of(LossSums.zero(), groups=0, groups_left_out=0, sequences=0, micro_batches=0, padded_tokens=0)

    @classmethod
    def of(
        cls,
        sums: LossSums,
        *,
        groups: int,
        groups_left_out: int,
        sequences: int,
        micro_batches: int,
        padded_tokens: int,
    ) -> UpdateStats:
        """Means from sums. This is the only place where the host waits for the device."""
        total = sums.to_host()
        tokens, known = max(total.tokens, 1.0), max(total.behaviour_tokens, 1.0)
        return cls(
            loss=total.loss,
            groups=groups,
            groups_left_out=groups_left_out,
            sequences=sequences,
            tokens=int(total.tokens),
            micro_batches=micro_batches,
            padded_tokens=padded_tokens,
            clip_fraction=total.clipped / tokens,
            dropped_fraction=total.dropped / tokens,
            truncated_fraction=total.truncated / tokens,
            ratio_mean=total.ratio / tokens,
            ratio_max=total.ratio_max,
            importance_weight_mean=total.importance_weight / tokens,
            behaviour_fraction=total.behaviour_tokens / tokens,
            kl_behaviour=total.behaviour_kl / known,
            kl_reference=total.reference_kl / tokens,
            entropy=total.entropy / tokens,
        )
