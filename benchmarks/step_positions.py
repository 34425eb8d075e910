"""What a step costs, by its token positions and in time, where it shares and where it does not.

`python -m benchmarks.step_positions` prints a line for each batch: a default sharing step (two
local groups, eighteen candidates for six places), the same without spare candidates, and local
groups alone. *Cost* is positions without gradient once and with gradient three times, over what
plain rows of the groups that were trained on need.

`--pairs N` times the first and the last batch too: trained tokens a second beside a bare PyTorch
loop and TRL on the sequences that were trained on, which both get ready-made, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.measuring import in_turns, quotients
from benchmarks.trainer import BareLoop, Trl
from services.trainer.gradient.rows import TokenGroup
from services.trainer.learner import Learner
from services.trainer.records import TRAINED, StepRecord
from services.trainer.selection.intake import take_in
from shared.config import NodeConfig
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Batch, Completion, Places, RolloutGroup, Sampling, ScoredGroup, TaskRef, user_prompt
from shared.contracts.wire import ModelIdentity
from shared.model.prompts import answer_text
from shared.tasks.prompt import text_task
from tests.integration.trainer_life import NODE, batch_of, node_config, tiny_policy

COMPLETIONS, SENDERS = 8, 8
PROMPT_TOKENS, ANSWER_TOKENS = 60, 200
FIRST_TOKEN, PLAIN_TOKENS = 33, 60
"""Answers are made of these tokens: one character each, in byte-level vocabularies."""


@dataclass(frozen=True)
class Shape:
    """A batch: local groups, foreign groups, places for these (0: one for each, and none is asked
    about).
    """

    name: str
    local: int
    external: int
    keep: int = 0
    trainer: dict[str, Any] = field(default_factory=dict)


SHARING = Shape("default sharing step: 2 local, 18 candidates for 6 places", 2, 18, keep=6)
LOCAL = Shape("8 local", 8, 0)
SHAPES = (
    SHARING,
    Shape("the same where only 6 candidates are to be had", 2, 6, keep=6),
    Shape("2 local, 6 foreign, whatever is mastered", 2, 6),
    Shape("the same without the policy check", 2, 6, trainer={"constants": {"policy_check_fraction": 0.0}}),
    Shape("default, two updates a batch", 2, 18, keep=6, trainer={"updates_per_batch": 2}),
    LOCAL,
)


def config_for(model_folder: Path, folder: Path, shape: Shape, answer: int, **model: str) -> NodeConfig:
    """A node that trains on the shape's batches, with answers of so many tokens; the policy check
    drops none of their texts. model: more of that section, such as `device`.
    """
    # Random text is unlikely, and all of it is meant to be trained on.
    allowed = {"policy_check_fraction": 1.0, "foreign_logprob_slack": 50.0, "min_foreign_logprob": -50.0}
    constants = allowed | shape.trainer.get("constants", {})
    trainer = {"learning_rate": 1e-5, **shape.trainer, "constants": constants}
    # A foreign answer may have twice as many tokens as a node's own.
    return node_config(model_folder, folder, model_section=model, trainer=trainer, generator={"max_new_tokens": answer})


def question_of(learner: Learner, tokens: int) -> str:
    """A question whose prompt has `tokens` tokens, or as few more as a word has."""
    question = "1"
    while len(_prompt(learner, question + " + 1")) <= tokens:
        question += " + 1"
    return question


def _prompt(learner: Learner, question: str) -> list[int]:
    return learner.rules.prompt_ids(user_prompt(question))


def sharing_batch(learner: Learner, shape: Shape, number: int, prompt: int, answer: int) -> Batch:
    """A batch of random answers, half of them right, in the policy's own tokens."""
    draw = random.Random(number)
    question = question_of(learner, prompt)
    groups = [_group(learner, draw, question, answer, local=place < shape.local) for place in range(shape.local + shape.external)]
    return replace(batch_of(number, groups), places=Places(keep=shape.keep, node_cap=3) if shape.keep else None)


def _group(learner: Learner, draw: random.Random, question: str, answer: int, *, local: bool) -> ScoredGroup:
    # Text and ids agree, or the trainer would encode a foreign text again.
    tokenizer, end = learner.tokenizer, learner.rules.end_token_id or 0
    completions = []
    for _ in range(COMPLETIONS):
        ids = draw.choices(range(FIRST_TOKEN, FIRST_TOKEN + PLAIN_TOKENS), k=answer - 1)
        completions.append(
            Completion(
                text=answer_text(tokenizer, ids),
                finish_reason="stop",
                token_count=answer,
                token_ids=pack_ids([*ids, end]),
                behaviour_logprobs=pack_logprobs([-5.0] * answer),
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
        prompt_ids=pack_ids(_prompt(learner, question)),
    )
    return ScoredGroup(
        group_id=content_id(encode(group)),
        origin="local" if local else "external",
        group=group,
        rewards=[float(place < COMPLETIONS // 2) for place in range(COMPLETIONS)],
        scored_by="bench",
        score_seconds=0.0,
        scored_at=1.0,
    )


def positions(learner: Learner, batch: Batch) -> tuple[Counter[str], StepRecord]:
    """Count what a step pushes through the model, by whether a gradient was kept: positions, those
    of them that hold a token of an answer, and passes.
    """
    counts: Counter[str] = Counter()
    plain = learner.model.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        kind, ids = "with" if torch.is_grad_enabled() else "without", named["input_ids"]
        counts[f"positions {kind} gradient"] += ids.numel()
        counts[f"answer tokens {kind} gradient"] += int(((ids >= FIRST_TOKEN) & (ids < FIRST_TOKEN + PLAIN_TOKENS)).sum())
        counts[f"passes {kind} gradient"] += 1
        return plain(*arguments, **named)

    learner.model.forward = counted
    try:
        return counts, learner.step(batch)
    finally:
        learner.model.forward = plain


def trained_on(learner: Learner, batch: Batch) -> list[TokenGroup]:
    """The sequences that the learner's last step, on `batch`, trained on."""
    trained = {each["id"] for each in learner.trained if each["fate"] == TRAINED}
    items = [item for item in batch.items if item.scored.group_id in trained]
    return take_in(replace(batch, items=items), learner.rules).groups


def print_positions(model_folder: Path, folder: Path, prompt: int, answer: int) -> None:
    """Print a line for each shape."""
    for shape in SHAPES:
        learner = Learner(config_for(model_folder, folder, shape, answer))
        batch = sharing_batch(learner, shape, 1, prompt, answer)
        counts, record = positions(learner, batch)
        without, within = counts["positions without gradient"], counts["positions with gradient"]
        groups = trained_on(learner, batch)
        needed = record.updates * sum(
            len(group.completions) * len(group.prompt_ids) + sum(group.completion_lengths) for group in groups
        )
        print(
            f"{shape.name:50} positions without gradient {without:7,}, with {within:7,}; "
            f"cost {(without + 3 * within) / (3 * needed):.2f} of plain rows; trained on {record.groups_local} local, "
            f"{record.groups_external} foreign; scaled down {record.groups_bounded}",
            flush=True,
        )


def speeds(
    config: NodeConfig, folder: Path, prompt: int, answer: int, pairs: int, shape: Shape = SHARING
) -> Iterator[tuple[str, list[float], list[float]]]:
    """The name of a plain loop (a bare loop, and TRL if it is installed), and in pairs the trained
    tokens a second of a step on the shape's batch and of that loop on the sequences that the step
    trained on.
    """
    warnings.simplefilter("ignore")
    learner = Learner(config)
    batches = [sharing_batch(learner, shape, number, prompt, answer) for number in range(1, pairs + 2)]
    learner.step(batches[0])
    # Which candidates are chosen does not change the size of a step.
    trained = trained_on(learner, batches[0])

    async def product(turn: int) -> float:
        torch.use_deterministic_algorithms(True, warn_only=True)
        started = time.perf_counter()
        record = learner.step(batches[turn])  # it reads its figures from the device, so that all is done
        return record.tokens / (time.perf_counter() - started)

    for name in ("bare loop", *(["TRL"] if find_spec("trl") else [])):
        loop: BareLoop | Trl = BareLoop(config, pad_token_id=0) if name == "bare loop" else Trl(config, folder)
        rows = loop.tensors(trained) if isinstance(loop, BareLoop) else loop.inputs(trained)

        async def plain(_turn: int, loop: BareLoop | Trl = loop, rows: Any = rows) -> float:
            return loop.steps([rows])

        yield name, *asyncio.run(in_turns(product, plain, pairs=pairs))


def print_speed(model_folder: Path, folder: Path, prompt: int, answer: int, pairs: int) -> None:
    """Print trained tokens a second of a default sharing step, and of a step on local groups,
    beside a bare loop and TRL.
    """
    for shape in (SHARING, LOCAL):
        config = config_for(model_folder, folder, shape, answer)
        for name, ours, theirs in speeds(config, folder, prompt, answer, pairs, shape):
            ratios = quotients(ours, theirs)
            print(
                f"{shape.name}, prompts of {prompt}, answers of {answer}: trained tokens/s {statistics.median(ours):,.0f}, "
                f"{name} {statistics.median(theirs):,.0f}; ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}, n={pairs})",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_positions", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a model; without it a tiny one, and only the counts mean anything")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=ANSWER_TOKENS, help="tokens of an answer")
    parser.add_argument("--pairs", type=int, default=0, help="time so many steps beside each of a bare loop and TRL")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder = folder / "model"
        if asked.model is None:
            tiny_policy(model_folder)
        else:
            copytree(asked.model, model_folder)
        described = json.loads((model_folder / "config.json").read_text())
        longest = max(described["max_position_embeddings"], asked.prompt + asked.answer)
        (model_folder / "config.json").write_text(json.dumps(described | {"max_position_embeddings": longest}))
        print_positions(model_folder, folder, asked.prompt, asked.answer)
        if asked.pairs:
            print_speed(model_folder, folder, asked.prompt, asked.answer, asked.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
