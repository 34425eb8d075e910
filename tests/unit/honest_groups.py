"""Honest rollout groups: sampled from models/base on the demo's tasks, scored by its verifiers. The
same in every run.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from lab.task_desk import Shared, TaskDesk
from services.generator.engines.base import Sample, SamplingParams
from services.generator.engines.batching import WAYS
from services.generator.engines.transformers_engine import sample_completions
from services.generator.groups import rollout_group
from shared.config import NodeConfig, load_config
from shared.config.model_section import ModelSection
from shared.contracts.codec import encode
from shared.contracts.messages import RolloutGroup, ScoredGroup
from shared.contracts.wire import ModelIdentity
from shared.model.loading import load_causal_lm
from shared.model.prompts import answer_text, tokenizer_hash
from shared.model.reading import load_tokenizer
from shared.rewards import is_informative
from shared.tasks.evaluation import PASS_REWARD
from swarm_cli.installation import DEMO_CONFIG

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "models" / "base"
COMPLETIONS = 8


def base_config(var_dir: Path, **sections: dict[str, Any]) -> NodeConfig:
    """The demo's configuration, with `sections` changed."""
    return load_config(
        DEMO_CONFIG,
        overrides={
            "node": {"id": "alpha", "run": "test", "var_dir": str(var_dir)},
            "model": {"path": str(BASE), "device": "cpu"},
            **sections,
        },
    )


@cache
def sampled_groups(count: int = 24, seed: int = 1) -> tuple[RolloutGroup, ...]:
    """`count` groups whose rewards differ, with their rewards in `rewards_of`."""
    torch.set_num_threads(1)
    config = load_config(DEMO_CONFIG, overrides={"model": {"path": str(BASE)}})
    tokenizer = load_tokenizer(config.model)
    model = load_causal_lm(ModelSection(path=str(BASE)), dtype=torch.float32, device=torch.device("cpu")).eval()
    desk = TaskDesk(config, Shared())
    identity = ModelIdentity(name="base", tokenizer_hash=tokenizer_hash(tokenizer))
    params = SamplingParams(max_new_tokens=config.generator.max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    found: list[RolloutGroup] = []
    draw = 0
    while len(found) < count:
        tasks = [desk.task(number) for number in range(draw, draw + 8)]
        rows = sample_completions(
            model,
            [task.prompt_ids for task in tasks],
            COMPLETIONS,
            params,
            [params.max_new_tokens] * len(tasks),
            way=WAYS[0],
            generator=generator,
            end_token_ids=[int(tokenizer.eos_token_id)],
            pad_token_id=0,
            keep_on=lambda *_: None,
        )
        for place, task in enumerate(tasks):
            samples = [
                Sample(tuple(row.token_ids), answer_text(tokenizer, row.token_ids), row.finish_reason, tuple(row.logprobs))
                for row in rows[COMPLETIONS * place : COMPLETIONS * (place + 1)]
            ]
            group = rollout_group(task, samples, node="beta", draw=draw + place, model=identity, params=params, created_at=1.0)
            rewards = desk.score(group.task.ref, [sample.text for sample in samples])
            if is_informative(rewards):
                found.append(group)
                _rewards[group.draw] = rewards
        draw += len(tasks)
    return tuple(found[:count])


_rewards: dict[int, list[float]] = {}


def scored(group: RolloutGroup, origin: str, rewards: list[float] | None = None, node: str | None = None) -> ScoredGroup:
    """The group as a node has it after scoring; its own rewards unless others are given."""
    given = _rewards[group.draw] if rewards is None else rewards
    made = msgspec.structs.replace(group, node=node or ("alpha" if origin == "local" else "beta"))
    return ScoredGroup(
        group_id=hashlib.sha256(encode(made)).hexdigest(),
        origin=origin,  # type: ignore[arg-type]
        group=made,
        rewards=given,
        passed=[reward >= PASS_REWARD for reward in given],
        scored_by="alpha",
        score_seconds=0.0,
        scored_at=1.0,
    )
