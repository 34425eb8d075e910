"""Tests an imported model: trainer and engine must give its tokens the same log-probabilities."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.generator.engines import Sample
    from shared.config.sections import ModelSection

QUESTIONS = (
    "What is 3 + 4?",
    "Name a colour.",
    "Which is larger, 17 or 71, and by how much? Answer with the larger number first and the difference after it.",
    "Write the numbers 1, 4, 9 and 16 in reverse order.",
)
"""Of different lengths, so that the engine pads them, or reports that it cannot."""
SAMPLES = 4
NEW_TOKENS = 16
TOLERANCE_NATS = 1e-3
"""In float32. A different order of computation changes logprobs by about 1e-5; a wrong position or
mask by tenths or more.
"""


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference in nats, over `tokens` sampled tokens."""

    largest_nats: float
    tokens: int

    @property
    def problem(self) -> str:
        """Why the two do not agree; empty if they do."""
        if self.largest_nats <= TOLERANCE_NATS:
            return ""
        return (
            f"the trainer's log-probabilities of sampled tokens differ from the engine's by up to {self.largest_nats:.2g} nats "
            f"({TOLERANCE_NATS:g} are allowed, {self.tokens} tokens): the policy being trained would differ from the one that "
            "samples. This architecture is not supported: choose another model"
        )


class ParityError(RuntimeError):
    """The model cannot be sampled or scored at all; the message says why."""


def engine_parity(folder: str) -> Parity:
    """Sample from the model in `folder` with the engine `transformers`, then compute the logprobs
    with the trainer, in float32 on the CPU.

    The two run one after the other, so that only one copy of the model is in memory.

    Raises:
        ParityError: the engine or the trainer refuses the model.
    """
    from services.generator.engines import EngineError
    from shared.model.prompts import render_prompt
    from shared.model.quiet_reading import ModelLoadError, library_cause
    from shared.model.reading import load_tokenizer

    section = _section(folder)
    try:
        tokenizer = load_tokenizer(section)
        prompts = [render_prompt(tokenizer, question) for question in QUESTIONS]
        groups = asyncio.run(_sampled(folder, prompts))
        gc.collect()
        scored = _scored(folder, prompts, groups)
    except (EngineError, ModelLoadError, ValueError) as error:
        raise ParityError(str(error)) from None
    # torch and transformers raise many types for invalid numbers that no earlier check refused.
    except Exception as error:  # noqa: BLE001
        raise ParityError(
            f"it can be read, but not sampled and scored ({library_cause(error)}): check its configuration's numbers and weights"
        ) from None
    pairs = [
        (engine_logprob, trainer_logprob)
        for samples, rows in zip(groups, scored, strict=True)
        for sample, row in zip(samples, rows, strict=True)
        for engine_logprob, trainer_logprob in zip(sample.logprobs or (), row, strict=True)
    ]
    apart = [abs(engine_logprob - trainer_logprob) for engine_logprob, trainer_logprob in pairs]
    # A NaN means disagreement, but max() may skip it.
    return Parity(max(apart) if all(value == value for value in apart) else float("inf"), len(apart))


def _section(folder: str) -> ModelSection:
    from shared.config.sections import ModelSection

    return ModelSection(path=folder, dtype="float32", device="cpu")


async def _sampled(folder: str, prompts: Sequence[Sequence[int]]) -> list[list[Sample]]:
    from services.generator.engines import SamplingParams, create_engine

    engine = create_engine("transformers", folder, dtype="float32", device="cpu")
    try:
        await engine.start()
        return await engine.generate(prompts, SAMPLES, SamplingParams(max_new_tokens=NEW_TOKENS), seed=0)
    finally:
        await engine.close()


def _scored(folder: str, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Sample]]) -> list[list[list[float]]]:
    import torch

    from services.trainer.gradient.modes import set_training_modes, silence
    from services.trainer.gradient.rows import TokenGroup
    from services.trainer.gradient.shared_prompt import supports_shared_prompt
    from services.trainer.gradient.update import UpdateConfig, batch_logprobs
    from services.trainer.probes.trainable import check_trainable
    from shared.model.loading import load_causal_lm

    model = load_causal_lm(_section(folder), dtype=torch.float32, device=torch.device("cpu"))
    silence(model)
    set_training_modes(model)
    check_trainable(model)
    token_groups = [
        TokenGroup(
            prompt_ids=prompt,
            completions=[sample.token_ids for sample in samples],
            behaviour_logprobs=[sample.logprobs for sample in samples],
            # Groups whose advantages are all 0 are skipped.
            advantages=[1.0] * len(samples),
        )
        for prompt, samples in zip(prompts, groups, strict=True)
    ]
    update = UpdateConfig(shared_prompt=supports_shared_prompt(model))
    found = batch_logprobs(model, token_groups, update)
    return [[row.tolist() for row in rows] for rows in found]
