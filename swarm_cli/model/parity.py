"""Tests an imported model: trainer and engine must give its tokens the same log-probabilities, as
it is and after a policy trained from it was published and loaded.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


_MOVE, _SHIFT = 0.1, 1e-3


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference in nats, over `tokens` sampled tokens. published: that of a policy
    that was published, instead of the base's.
    """

    largest_nats: float
    tokens: int
    published: bool = False

    @property
    def problem(self) -> str:
        """Why the two do not agree; empty if they do."""
        if self.largest_nats <= TOLERANCE_NATS:
            return ""
        when = " once a policy was published" if self.published else ""
        return (
            f"the trainer's log-probabilities of sampled tokens differ from the engine's by up to {self.largest_nats:.2g} "
            f"nats{when} ({TOLERANCE_NATS:g} are allowed, {self.tokens} tokens): the policy being trained would differ from the "
            "one that samples. This architecture is not supported: choose another model"
        )


class ParityError(RuntimeError):
    """The model cannot be sampled or scored at all; the message says why."""


def engine_parity(folder: str, policy: Path) -> list[Parity]:
    """Sample from the model in `folder` with the engine `transformers`, then compute the logprobs
    with the trainer, in float32 on the CPU: of the base policy, and of one that differs from it in
    every weight, which is written to the file `policy` as a trainer publishes it.

    Trainer and engine run one after the other, so that only one copy of the model is in memory.

    Raises:
        ParityError: the engine or the trainer refuses the model.
        OSError: the policy's file cannot be written.
    """
    from services.generator.engines import EngineError
    from shared.model.prompts import render_prompt
    from shared.model.quiet_reading import ModelLoadError, library_cause
    from shared.model.reading import load_tokenizer
    from shared.model.weights import WeightsError

    try:
        tokenizer = load_tokenizer(_section(folder))
        prompts = [render_prompt(tokenizer, question) for question in QUESTIONS]
        _publish(folder, policy)
        gc.collect()
        samples = asyncio.run(_sampled(folder, prompts, policy))
        gc.collect()
        scored = _scored(folder, prompts, samples)
    except (EngineError, ModelLoadError, WeightsError, ValueError) as error:
        raise ParityError(str(error)) from None
    except OSError:
        raise
    # torch and transformers raise many types for invalid numbers that no earlier check refused.
    except Exception as error:  # noqa: BLE001
        raise ParityError(
            f"it can be read, but not sampled and scored ({library_cause(error)}): check its configuration's numbers and weights"
        ) from None
    return [_compared(*each, published=bool(version)) for version, each in enumerate(zip(samples, scored, strict=True))]


def _compared(groups: Sequence[Sequence[Sample]], scored: Sequence[Sequence[Sequence[float]]], *, published: bool) -> Parity:
    pairs = [
        (engine_logprob, trainer_logprob)
        for samples, rows in zip(groups, scored, strict=True)
        for sample, row in zip(samples, rows, strict=True)
        for engine_logprob, trainer_logprob in zip(sample.logprobs or (), row, strict=True)
    ]
    apart = [abs(engine_logprob - trainer_logprob) for engine_logprob, trainer_logprob in pairs]
    # A NaN means disagreement, but max() may skip it.
    return Parity(max(apart) if all(value == value for value in apart) else float("inf"), len(apart), published)


def move(model: Any) -> None:
    """Change every trained weight of a model in place, each in its own way, as some steps of
    training might, to numbers of bfloat16; the same each time.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            # One factor for each column is cheap, and no norm cancels it.
            factor, shift = torch.rand(2, width, generator=generator).sub_(0.5).to(parameter.device, parameter.dtype)
            if not parameter.ndim:
                factor, shift = factor[0], shift[0]
            # Rounded, so that the policy's file is half as large and says the same.
            parameter.copy_(parameter.mul(1 + _MOVE * factor).add_(_SHIFT * shift).bfloat16())


def _publish(folder: str, policy: Path) -> None:
    import torch

    from shared.model.weights import policy_tensors, write_tensors

    model = _trained(folder)
    move(model)
    write_tensors(policy_tensors(model, torch.bfloat16), policy)


def _trained(folder: str) -> Any:
    """The model as the trainer has it."""
    import torch

    from services.trainer.gradient.forward import set_training_modes, silence
    from services.trainer.policy_model import check_trainable
    from shared.model.loading import load_causal_lm

    model = load_causal_lm(_section(folder), dtype=torch.float32, device=torch.device("cpu"))
    silence(model)
    set_training_modes(model)
    check_trainable(model)
    return model


def _section(folder: str) -> ModelSection:
    from shared.config.sections import ModelSection

    return ModelSection(path=folder, dtype="float32", device="cpu")


async def _sampled(folder: str, prompts: Sequence[Sequence[int]], policy: Path) -> list[list[list[Sample]]]:
    """Of the base policy, and of the published one."""
    from services.generator.engines import SamplingParams, create_engine

    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    engine = create_engine("transformers", folder, dtype="float32", device="cpu")
    try:
        await engine.start()
        base = await engine.generate(prompts, SAMPLES, params, seed=0)
        await engine.load_policy(policy, 1)
        return [base, await engine.generate(prompts, SAMPLES, params, seed=1)]
    finally:
        await engine.close()


def _scored(
    folder: str, prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sequence[Sample]]]
) -> list[list[list[list[float]]]]:
    """The trainer's logprobs of the base policy's samples and of those of the moved one."""
    from services.trainer.gradient.forward import supports_shared_prompt
    from services.trainer.gradient.rows import TokenGroup
    from services.trainer.gradient.update import UpdateConfig, batch_logprobs

    model = _trained(folder)
    update = UpdateConfig(shared_prompt=supports_shared_prompt(model))
    found = []
    for version, groups in enumerate(samples):
        if version:
            move(model)
        token_groups = [
            TokenGroup(
                prompt_ids=prompt,
                completions=[sample.token_ids for sample in group],
                behaviour_logprobs=[sample.logprobs for sample in group],
                # Groups whose advantages are all 0 are skipped.
                advantages=[1.0] * len(group),
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        found.append([[row.tolist() for row in rows] for rows in batch_logprobs(model, token_groups, update)])
    return found
