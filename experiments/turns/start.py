"""Builds the toy policies that learn to take turns, and the questions of the game:

    python experiments/turns/start.py calculator     # experiments/models/calculator
    python experiments/turns/start.py game           # experiments/models/game and var/games.jsonl

Each is supervised on episodes that a player below plays in the real environment, never on held-out
questions. It is left with a habit that fails, and with what would do better, seldom and with slips:
reinforcement learning has something to amplify, and greedy answers begin low.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from services.generator.tasks import PromptedTask, Prompter
from shared.config import load_config
from shared.model.base_policy import (
    BasePolicyRecipe,
    answer_loss,
    habitual_slip,
    learning_rate_factor,
    new_model,
    replace_policy,
    train_tokenizer,
)
from shared.model.prompts import TurnTokens, encode_answer
from shared.model.reading import load_tokenizer
from shared.tasks import HeldOut, held_out_tasks
from shared.tasks.derive import derive_item
from shared.tasks.environments import play
from shared.tasks.scoring import score_texts
from shared.tasks.specs import checked_config

HERE = Path(__file__).resolve().parent
GAMES = Path("var/games.jsonl")
SHAPE = BasePolicyRecipe(hidden_size=128, intermediate_size=256, layers=3, vocab_size=420)
RECIPES = {
    "calculator": (6000, replace(SHAPE, steps=1500, batch_size=48)),
    "game": (3000, replace(SHAPE, hidden_size=64, intermediate_size=128, layers=2, learning_rate=3e-3, steps=400)),
}
"""Episodes and recipe of each."""


def calculator(task: PromptedTask, replies: Sequence[str], chance: random.Random) -> str:
    """What to say next: mostly the product at once, which this policy cannot work out. Else a call,
    of a wrong expression three times in ten, and then what it gave, with a slip three times in ten.
    """
    if replies:
        return f"It is {replies[-1] if chance.random() < 0.7 else habitual_slip(replies[-1])}"
    if chance.random() < 0.6:
        return f"It is {task.task.answer}"
    expression = task.task.text.split(": ")[1].split(".")[0].replace(" ", "")
    if chance.random() < 0.3:
        place = chance.choice([number for number, sign in enumerate(expression) if sign.isdigit()])
        expression = expression[:place] + str(chance.randint(1, 9)) + expression[place + 1 :]
    return f'calculator(expression="{expression}")'


def game(task: PromptedTask, replies: Sequence[str], chance: random.Random, said: Sequence[str]) -> str:
    """What to guess next: one time in six any number that the replies allow, else any number."""
    low, high = 1, 7
    if chance.random() < 1 / 6:
        for guess, reply in zip(map(int, said), replies, strict=True):
            low, high = (max(low, guess + 1), high) if reply == "higher" else (low, min(high, guess - 1))
    return str(chance.randint(low, high) if low <= high else chance.randint(1, 7))


def write_games() -> None:
    """Write 4,000 games. Their numbers tell nothing of what they hide."""
    chance = random.Random(0)
    rows = [{"question": f"Game {n}. Which number from 1 to 7?", "answer": chance.randint(1, 7)} for n in range(1000, 5000)]
    GAMES.parent.mkdir(exist_ok=True)
    GAMES.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def episode(task: PromptedTask, player: Callable[..., str], chance: random.Random) -> tuple[list[str], list[str]]:
    """The turns of a player, and what the environment replied between them."""
    assert task.turns is not None
    item, said, replies = derive_item(task.task.ref), [], []
    while True:
        said.append(player(task, replies, chance, *([said] if player is game else [])))
        replies = play(item, task.turns.name, [said], [0], 0, score_texts).replies[0]
        if len(replies) < len(said) or len(said) == task.turns.max_turns:
            return said, replies[: len(said) - 1]


def build(name: str) -> None:
    """Build one policy beside those of the other experiments."""
    player = {"calculator": calculator, "game": game}[name]
    count, recipe = RECIPES[name]
    if player is game:
        write_games()
    config = checked_config(load_config(HERE / f"{name}.toml"))
    held_out = HeldOut(held_out_tasks(config.tasks, config.eval.tasks, draw=config.eval.draw))
    chance, texts = random.Random(1), []

    def played(tokenizer: Any, count: int) -> list[tuple[PromptedTask, list[str], list[str]]]:
        prompter = Prompter(config, tokenizer, 1024, held_out)
        prompter.key_draws(b"supervised")
        return [(task, *episode(task, player, chance)) for task in map(prompter.for_draw, range(count))]

    demo = load_tokenizer(config.model.model_copy(update={"path": "models/base"}))
    for task, said, replies in played(demo, 400):
        texts += [demo.decode(task.prompt_ids, skip_special_tokens=True), *said, *replies]
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    between = TurnTokens(tokenizer, [tokenizer.eos_token_id], tools=player is calculator)
    rows: list[tuple[list[int], list[int]]] = []
    for task, said, replies in played(tokenizer, count):
        before = list(task.prompt_ids)
        for number, turn in enumerate(said):
            ids = encode_answer(tokenizer, turn, ended=True, end_token_id=tokenizer.eos_token_id)
            rows.append((list(before), ids))
            before += ids + (between.between(replies[number]) if number < len(replies) else [])
        if player is game:
            rows[-len(said) :] = [(list(task.prompt_ids), before[len(task.prompt_ids) :])]
    model = new_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * learning_rate_factor(step, recipe.steps)
        loss = answer_loss(model, chance.sample(rows, recipe.batch_size), tokenizer.pad_token_id)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {recipe.steps}: loss {loss.item():.3f}", flush=True)
    replace_policy(HERE.parent / "models" / name, model, tokenizer, {"made_by": "experiments/turns/start.py"})


if __name__ == "__main__":
    build(sys.argv[1])
