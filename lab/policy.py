"""The policy of a simulated node: the trainer's own `Learner`, sampled as the engine `transformers`
samples.

Nodes are computed one after another. Stacking them (`torch.func`, or a forward pass written for it)
saved 13 % of a step and half of the time of sampling, and needed a second model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from services.generator.engines.base import Sample, SamplingParams
from services.generator.engines.batching import Batching, batches, choose_batching
from services.generator.engines.transformers_engine import sample_completions
from services.trainer.gradient.forward import evaluating
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from shared.config import NodeConfig
from shared.model.prompts import answer_text
from shared.model.reading import model_max_length

_MOST_ROWS = 256


class Policy:
    """One node's learner. `tokenizer` replaces the one that it loads, so that nodes share what they
    have encoded.
    """

    def __init__(self, config: NodeConfig, tokenizer: Any) -> None:
        self.learner = Learner(config)
        self.learner.rules = self.rules = replace(self.learner.rules, tokenizer=tokenizer)
        self._context = model_max_length(config.model)
        ends = self.rules.end_token_ids
        self._pad = ends[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self._way: Batching | None = None

    def sample(
        self, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams, *, seed: int, version: int
    ) -> list[list[Sample]]:
        """`count` completions of each prompt, prompt by prompt. Prompts of similar length are
        computed together.
        """
        model = self.learner.model
        generator = torch.Generator(model.device).manual_seed(seed)
        found: list[list[Sample]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        with evaluating(model):
            if self._way is None:
                self._way = choose_batching(model, context_length=self._context, pad_token_id=self._pad)
            for part in batches([prompts[number] for number in order], self._way, max(1, _MOST_ROWS // count)):
                numbers = [order[place] for place in part]
                rows = sample_completions(
                    model,
                    [prompts[number] for number in numbers],
                    count,
                    params,
                    [min(params.max_new_tokens, self._context - len(prompts[number])) for number in numbers],
                    way=self._way,
                    generator=generator,
                    end_token_ids=self.rules.end_token_ids,
                    pad_token_id=self._pad,
                    keep_on=lambda *_: None,
                )
                for place, row in enumerate(rows):
                    text = answer_text(self.rules.tokenizer, row.token_ids)
                    sample = Sample(tuple(row.token_ids), text, row.finish_reason, tuple(row.logprobs), policy_version=version)
                    found[numbers[place // count]].append(sample)
        return found

    def mean_logprobs(self, groups: Sequence[TokenGroup]) -> list[list[float]]:
        """Mean logprob per token of every completion of every group."""
        found = batch_logprobs(self.learner.model, groups, self.learner.update_config)
        return [[float(logprobs.mean()) for logprobs in group] for group in found]
