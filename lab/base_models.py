"""Builds the experiments' base policies: `shared.model.base_policy`'s supervised start, with a
tokenizer that has tokens for whole phrases.

A build spec (`experiments/models/*.toml`) holds `[[tasks]]` and `[recipe]`, the fields of
`BasePolicyRecipe`, and may name another spec to `start` from. Then that spec's tasks, tokenizer and
weights are used, and supervised training continues with other shares of right answers, so that
policies of different skill come from one policy. Datasets without a reference answer are trained on
the example in their metadata.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import reasoning_gym
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from shared.config.model_section import ModelSection
from shared.config.task_sections import TaskSpec
from shared.model.base_policy import (
    SEED_STRIDE,
    SUPERVISED_SEED,
    BasePolicyRecipe,
    Example,
    held_out_questions,
    is_built,
    load_demo_tasks,
    new_model,
    policy_record,
    read_record,
    replace_policy,
    supervise,
    train_tokenizer,
)
from shared.model.loading import load_causal_lm
from shared.model.reading import load_tokenizer
from shared.tasks.held_out import HeldOut

_WORD = re.compile(r"\S+\s*")
_VARIABLE = re.compile(r"[0-9]|(?<![A-Za-z])[A-Z](?![A-Za-z])|[+\-<>\[\]]{2}")
"""Words that differ between questions: numbers, single capital letters, sequences of signs."""
_LONG_WORD = 6
_LEAST_PART = 0.03


def fixed_phrases(questions: Sequence[str]) -> list[str]:
    """Runs of words, or long single words, that recur in at least 3 % of the questions of one
    dataset, longest first.

    A run breaks at a word that varies, or where what follows a word is hardly ever the same.
    Deterministic.
    """
    split = [_WORD.findall(question) for question in questions]
    pairs: Counter[tuple[str, str]] = Counter()
    for words in split:
        pairs.update(set(zip(words, words[1:], strict=False)))
    enough = max(2, int(_LEAST_PART * len(questions)))
    runs: Counter[str] = Counter()
    for words in split:
        runs.update(set(_runs(words, pairs, enough)))
    return sorted((run for run, count in runs.items() if count >= enough), key=lambda run: (-len(run), run))


def _runs(words: Sequence[str], pairs: Counter[tuple[str, str]], enough: int) -> Iterable[str]:
    run: list[str] = []
    for word in words:
        fixed = not _VARIABLE.search(word)
        if run and (not fixed or pairs[(run[-1], word)] < enough):
            yield from _phrase(run)
            run = []
        if fixed:
            run.append(word)
    yield from _phrase(run)


def _phrase(run: Sequence[str]) -> Iterable[str]:
    text = "".join(run)
    if len(run) > 1 or len(text) >= _LONG_WORD:
        yield text


def build_experiment_base(spec: Path, out: Path, *, show_progress: bool = True) -> Path:
    """Build the base policy that `spec` describes in `out`, unless it is there already. The folder
    is written next to `out` and then renamed.

    Raises:
        ValueError: the spec is not usable, or a dataset has too few questions.
        FileExistsError: `out` holds files of something else.
    """
    start = _start(spec)
    tasks = load_demo_tasks(_origin(spec))
    recipe = _recipe(spec)
    record = policy_record(tasks, recipe) | {"tokenizer": "phrases"}
    if start is not None:
        first = build_experiment_base(start, start.with_suffix(""), show_progress=show_progress)
        record["start"] = read_record(first)
    if is_built(out) and read_record(out) == record:
        return out
    if out.exists() and any(out.iterdir()) and read_record(out) is None:
        raise FileExistsError(f"{out}: holds other files: choose an empty folder for the base policy")
    held_out = held_out_questions(tasks, recipe.held_out_count)
    pools = [list(_examples(task, position, recipe.attempts_per_task, held_out)) for position, task in enumerate(tasks)]
    for task, pool in zip(tasks, pools, strict=True):
        if len(pool) < 2:
            raise ValueError(f"{spec}: {task.dataset}: all questions are in the held-out set: widen its config")
    if start is None:
        tokenizer = phrase_tokenizer(pools, recipe.vocab_size)
        model = new_model(recipe, tokenizer)
    else:
        section = ModelSection(path=str(first))
        tokenizer = load_tokenizer(section)
        model = cast(Qwen3ForCausalLM, load_causal_lm(section, dtype=torch.float32, device=torch.device("cpu")))
    supervise(model, tokenizer, pools, [task.weight for task in tasks], recipe, show_progress=show_progress)
    replace_policy(out, model, tokenizer, record)
    return out


def phrase_tokenizer(pools: Sequence[Sequence[Example]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a token for every fixed phrase of the questions; `vocab_size`
    bounds the rest.
    """
    phrases = {phrase for pool in pools for phrase in fixed_phrases([example.question for example in pool])}
    longest_first = sorted(phrases, key=lambda phrase: (-len(phrase), phrase))
    rest = (_without(example.question, longest_first) + example.answer for pool in pools for example in pool[:2000])
    tokenizer = train_tokenizer(rest, vocab_size)
    tokenizer.add_tokens([*longest_first, "assistant\n", "user\n"])
    return tokenizer


def _without(question: str, phrases: Sequence[str]) -> str:
    for phrase in phrases:
        question = question.replace(phrase, "\n")
    return question


def _examples(task: TaskSpec, position: int, attempts: int, held_out: HeldOut) -> Iterator[Example]:
    seed = SUPERVISED_SEED + position * SEED_STRIDE
    dataset = reasoning_gym.create_dataset(task.dataset, seed=seed, size=attempts, **task.config)
    seen: set[str] = set()
    for index in range(attempts):
        item: dict[str, Any] = dataset[index]
        question = item["question"]
        answer = item["answer"] if item["answer"] is not None else item["metadata"].get("example_answer")
        if answer is not None and question not in seen and not held_out.contains_text(question):
            seen.add(question)
            yield Example(task.dataset, question, str(answer))


def _start(spec: Path) -> Path | None:
    name = tomllib.loads(spec.read_text(encoding="utf-8")).get("start")
    return None if name is None else spec.parent / f"{name}.toml"


def _origin(spec: Path) -> Path:
    """The first spec of the chain, which names the tasks."""
    start = _start(spec)
    return spec if start is None else _origin(start)


def _recipe(spec: Path) -> BasePolicyRecipe:
    values = tomllib.loads(spec.read_text(encoding="utf-8")).get("recipe", {})
    try:
        return replace(BasePolicyRecipe(), **values)
    except TypeError as error:
        known = ", ".join(sorted(BasePolicyRecipe.__dataclass_fields__))
        raise ValueError(f"{spec}: [recipe]: {error}: fields are {known}") from None
