"""Builds rollout groups from an engine's samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.generator.engines.base import Sample, SamplingParams
from services.generator.tasks import PromptedTask
from shared.contracts.codec import pack_ids, pack_logprobs
from shared.contracts.messages import Completion, ModelIdentity, RolloutGroup, Sampling
from shared.seeds import number_from


def rollout_group(
    prompted: PromptedTask,
    samples: Sequence[Sample],
    *,
    node: str,
    draw: int,
    model: ModelIdentity,
    params: SamplingParams,
    created_at: float,
) -> RolloutGroup:
    """The group of all `samples` of one task. Its version is the oldest that sampled any of
    them.
    """
    return RolloutGroup(
        node=node,
        created_at=created_at,
        draw=draw,
        task=prompted.task,
        completions=[
            Completion(
                text=sample.text,
                finish_reason=sample.finish_reason,
                token_count=len(sample.token_ids),
                # Text that was encoded again may have other tokens than were sampled, so it must
                # not be trained on as if it had these tokens.
                token_ids=None if sample.logprobs is None else pack_ids(sample.token_ids),
                behaviour_logprobs=None if sample.logprobs is None else pack_logprobs(sample.logprobs),
            )
            for sample in samples
        ],
        model=model,
        policy_version=min(sample.policy_version for sample in samples),
        sampling=Sampling(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, max_new_tokens=params.max_new_tokens
        ),
        prompt_ids=pack_ids(prompted.prompt_ids),
    )


def call_seed(node: str, node_seed: int, first_draw: int) -> int:
    """Seed of the call that samples the draws from `first_draw` on: different for every node and
    call, the same on every attempt.
    """
    return number_from(f"generate/{node}/{node_seed}/{first_draw}", 4) & 0x7FFFFFFF
