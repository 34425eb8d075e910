"""Count the token positions that one step pushes through the model, without and with gradient.

`python -m benchmarks.step_positions` prints a line for each batch: a default sharing step (two
local groups, eighteen candidates of which six are kept), the same without choosing, and local
groups alone. Prompts have 60 tokens, answers 200. The model is tiny, so only the counts mean
anything.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from services.trainer.learner import Learner
from services.trainer.records import StepRecord
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Completion, Preference, RolloutGroup, Sampling, ScoredGroup, TaskRef
from shared.contracts.wire import ModelIdentity
from shared.tasks.prompt import text_task
from tests.integration.trainer_life import NODE, batch_of, node_config, tiny_policy

PROMPT_TOKENS, ANSWER_TOKENS, COMPLETIONS = 60, 200, 8
SENDERS = 8


@dataclass(frozen=True)
class Shape:
    """A batch: local groups, foreign groups, how many of these are kept (0: all of them)."""

    name: str
    local: int
    external: int
    keep: int = 0
    trainer: dict[str, Any] = field(default_factory=dict)


SHAPES = (
    Shape("default sharing step: 2 local, 6 of 18 candidates", 2, 18, keep=6),
    Shape("the same where only 6 candidates are to be had", 2, 6, keep=6),
    Shape("uniform: 2 local, 6 foreign", 2, 6),
    Shape("uniform, without the policy check", 2, 6, trainer={"constants": {"policy_check_fraction": 0.0}}),
    Shape("default, two updates a batch", 2, 18, keep=6, trainer={"updates_per_batch": 2}),
    Shape("8 local", 8, 0),
)


def scored_group(learner: Learner, draw: random.Random, *, local: bool) -> ScoredGroup:
    """A group of random answers, half of them right, in the policy's own tokens."""
    question = "".join(chr(draw.randrange(97, 123)) for _ in range(PROMPT_TOKENS))
    completions = []
    for _ in range(COMPLETIONS):
        ids = [draw.randrange(33, 94) for _ in range(ANSWER_TOKENS - 1)]
        text = learner.tokenizer.decode(ids)
        ids.append(learner.rules.end_token_id or 0)
        completions.append(
            Completion(
                text=text,
                finish_reason="stop",
                token_count=len(ids),
                token_ids=pack_ids(ids),
                behaviour_logprobs=pack_logprobs([-5.0] * len(ids)),
            )
        )
    group = RolloutGroup(
        node=NODE if local else f"n{draw.randrange(SENDERS)}",
        created_at=1.0,
        draw=draw.randrange(2**30),
        task=text_task(TaskRef(dataset="chain_sum", seed=1, index=2), question, "4"),
        completions=completions,
        model=ModelIdentity(name="tiny", tokenizer_hash=learner.rules.tokenizer_hash),
        policy_version=0,
        sampling=Sampling(),
        prompt_ids=pack_ids(list(question.encode())),
    )
    return ScoredGroup(
        group_id=content_id(encode(group)),
        origin="local" if local else "external",
        group=group,
        rewards=[float(number < COMPLETIONS // 2) for number in range(COMPLETIONS)],
        scored_by="bench",
        score_seconds=0.0,
        scored_at=1.0,
    )


def positions(model_folder: Path, folder: Path, shape: Shape) -> tuple[Counter[str], StepRecord]:
    """The step's positions and passes, by whether a gradient was kept, and its record."""
    settings = {"learning_rate": 1e-5, "constants": {"foreign_logprob_slack": 50.0, "min_foreign_logprob": -50.0}} | shape.trainer
    learner = Learner(node_config(model_folder, folder, trainer=settings))
    draw = random.Random(1)
    groups = [scored_group(learner, draw, local=number < shape.local) for number in range(shape.local + shape.external)]
    batch = batch_of(1, groups)
    if shape.keep:
        batch = replace(batch, preference=Preference(keep=shape.keep, by="near", node_cap=3))
    counts: Counter[str] = Counter()
    plain = learner.model.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        kind = "with" if torch.is_grad_enabled() else "without"
        counts[f"{kind} gradient"] += named["input_ids"].numel()
        counts[f"passes {kind} gradient"] += 1
        return plain(*arguments, **named)

    learner.model.forward = counted
    return counts, learner.step(batch)


def main() -> None:
    """Print a line for each shape."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model_folder = tiny_policy(Path(name) / "tiny")
        described = json.loads((model_folder / "config.json").read_text())
        (model_folder / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 2048}))
        for shape in SHAPES:
            counts, record = positions(model_folder, Path(name), shape)
            without, within = counts["without gradient"], counts["with gradient"]
            needed = (record.groups_local + record.groups_external) * COMPLETIONS * (PROMPT_TOKENS + ANSWER_TOKENS)
            print(
                f"{shape.name:50} positions without gradient {without:7,}, with {within:7,}; "
                f"cost {(without + 3 * within) / (3 * needed):.2f} of plain rows; "
                f"trained on {record.groups_local} local, {record.groups_external} foreign; scaled down {record.groups_bounded}",
                flush=True,
            )


if __name__ == "__main__":
    main()
