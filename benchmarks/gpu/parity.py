"""Compares log-probabilities on the GPU with those on the CPU: the trainer's, and those of the
tokens that engines sample, from the base policy and from one that was published and loaded.
"""

from __future__ import annotations

import random
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Finding, Setting, config_for, small_model
from services.generator.engines import SamplingParams, create_engine
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import batch_logprobs
from services.trainer.learner import Learner
from shared.model.loading import DTYPES
from shared.model.weights import policy_tensors, write_tensors
from swarm_cli.model.importing import move

_FLOAT32_MOST, _BFLOAT16_MEAN = 2e-3, 0.05
_TEXTS = (0, 1000)
"""Token ids of the random texts, low enough for every vocabulary."""


async def check(setting: Setting) -> list[Finding]:
    """The bars: float32 within 0.002 nats of the CPU at every token, bfloat16 within 0.05 on
    average.
    """
    name, folder = small_model(setting)
    reference = Learner(config_for(setting, folder, device="cpu"))
    groups = _made_up(reference)
    expected = _flat(reference, groups)
    findings = []
    for dtype in ("float32", "bfloat16"):
        learner = Learner(config_for(setting, folder, dtype=dtype))
        found = _flat(learner, groups)
        findings.append(_judged("trainer", name, dtype, [abs(a - b) for a, b in zip(found, expected, strict=True)]))
        del learner
    moved = Learner(config_for(setting, folder, device="cpu"))
    move(moved.model)
    for kind in _engines(setting):
        for dtype in ("float32", "bfloat16"):
            file = setting.folder / f"parity-{kind}-{dtype}.safetensors"
            write_tensors(policy_tensors(moved.model, DTYPES[dtype]), file)
            both, prompts = await _sample(setting, kind, folder, dtype, file)
            for sampled, learner, policy in zip(both, (reference, moved), ("", ", a published policy"), strict=True):
                groups = [
                    _group(prompt, [sample.token_ids for sample in answers])
                    for prompt, answers in zip(prompts, sampled, strict=True)
                ]
                ours = [value for answers in sampled for sample in answers for value in sample.logprobs]
                differences = [abs(a - b) for a, b in zip(ours, _flat(learner, groups), strict=True)]
                findings.append(_judged(f"engine {kind}{policy}", name, dtype, differences))
    return findings


def _judged(who: str, model: str, dtype: str, differences: list[float]) -> Finding:
    mean, most = sum(differences) / len(differences), max(differences)
    return Finding(
        part="parity",
        measured=f"{who}, {dtype}, {model}: distance from the CPU's float32 logprobs, nats a token",
        found=f"mean {mean:.2g}, largest {most:.2g} of {len(differences):,} tokens",
        bar=f"largest {_FLOAT32_MOST:g}" if dtype == "float32" else f"mean {_BFLOAT16_MEAN:g}",
        held=most <= _FLOAT32_MOST if dtype == "float32" else mean <= _BFLOAT16_MEAN,
    )


def _engines(setting: Setting) -> list[Any]:
    try:
        distribution("vllm")
    except PackageNotFoundError:
        return ["transformers"]
    return ["transformers"] if setting.device == "cpu" else ["transformers", "vllm"]


async def _sample(setting: Setting, kind: Any, folder: Path, dtype: str, policy: Path) -> tuple[list[Any], list[list[int]]]:
    """Sample 16 answers to four prompts of unequal length, of the base policy and of `policy`."""
    draw = random.Random("prompts")
    prompts = [[draw.randrange(4, 250) for _ in range(length)] for length in (5, 17, 30, 64)]
    engine = create_engine(kind, str(folder), device=setting.device, dtype=dtype, max_model_len=256, gpu_memory_utilization=0.3)
    params = SamplingParams(max_new_tokens=32)
    await engine.start()
    try:
        base = await engine.generate(prompts, 4, params, seed=7)
        await engine.load_policy(policy, 1)
        return [base, await engine.generate(prompts, 4, params, seed=8)], prompts
    finally:
        await engine.close()


def _made_up(learner: Learner) -> list[TokenGroup]:
    draw = random.Random("texts")
    most = min(_TEXTS[1], learner.rules.vocabulary_size)
    texts = [[[draw.randrange(4, most) for _ in range(draw.randint(8, 32))] for _ in range(4)] for _ in range(4)]
    return [_group([draw.randrange(4, most) for _ in range(60)], answers) for answers in texts]


def _group(prompt: list[int], answers: Any) -> TokenGroup:
    return TokenGroup(
        prompt_ids=prompt,
        completions=[list(answer) for answer in answers],
        behaviour_logprobs=[None] * len(answers),
        # Any rewards that differ, because a group without an advantage is not computed.
        advantages=[1.0 if place else -1.0 for place in range(len(answers))],
    )


def _flat(learner: Learner, groups: list[TokenGroup]) -> list[float]:
    found = batch_logprobs(learner.model, groups, learner.update_config)
    return [float(value) for group_logprobs in found for answer_logprobs in group_logprobs for value in answer_logprobs]
