"""Builds the toy base policy: a small Qwen3 that can do each demo task some of the time.

RL amplifies what a policy can already do sometimes. A policy trained for a minute only on right
answers is certain of what it knows and never tries anything else, whereas pre-training leaves a
real model with skill under noise. So the supervised start mixes right answers with a habitual
mistake and with other tasks' answers. The policy must learn the task to predict the mixture, and
answers correctly now and then, which gives RL something to amplify.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from shared.atomic_folder import atomic_folder
from shared.config.task_sections import TaskSpec
from shared.contracts.messages import user_prompt
from shared.model.prompts import encode_answer, render_prompt
from shared.tasks.held_out import HELD_OUT_SEED, HeldOut, held_out_tasks

RECIPE_FILE = "base_policy.json"
RECIPE_VERSION = 1
PROGRESS_LINES = 10
POLICY_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class BasePolicyRecipe:
    """Everything the built policy depends on, apart from the versions of torch and reasoning-gym
    and the number of threads.

    Attributes:
        seed: of weights, order and noise.
        steps: supervised optimizer steps; 1200 take about two minutes on one free core.
        batch_size: examples per step.
        learning_rate: AdamW's peak, reached after 5 % of the steps; a cosine then lowers it to a
            tenth.
        correct_fraction: share of supervised answers that are right.
        habit_fraction: share with the habitual slip. Above `correct_fraction`, greedy decoding also
            starts low.
        held_out_count: questions kept out of training; the same set that evaluation uses.
        attempts_per_task: indices tried per dataset for training questions.
        hidden_size, intermediate_size, layers, heads, kv_heads: the Qwen3 shape; head size is
            hidden_size / heads.
        vocab_size: upper bound of the tokenizer's vocabulary; training stops earlier when no pair
            repeats.
        tie_word_embeddings: share the input and output embeddings.
    """

    seed: int = 0
    steps: int = 1200
    batch_size: int = 32
    learning_rate: float = 2e-3
    correct_fraction: float = 0.25
    habit_fraction: float = 0.45
    held_out_count: int = 256
    attempts_per_task: int = 6000
    hidden_size: int = 128
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 1024
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible mixtures and shapes with the field's name."""
        if not 0.0 <= self.correct_fraction <= 1.0 or not 0.0 <= self.habit_fraction <= 1.0 - self.correct_fraction:
            raise ValueError(
                f"correct_fraction {self.correct_fraction} and habit_fraction {self.habit_fraction}: "
                "both must be at least 0 and their sum at most 1"
            )
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("heads must divide hidden_size, and kv_heads must divide heads")
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError("steps and batch_size must be at least 1")


def build_base_policy(
    out_dir: Path, tasks: Sequence[TaskSpec], recipe: BasePolicyRecipe | None = None, *, show_progress: bool = True
) -> Path:
    """Build the policy in `out_dir` as a Hugging Face folder, unless it is there, and return
    `out_dir`.

    It counts as there if every file exists and the recorded recipe and tasks are the requested
    ones. The same recipe, tasks and number of torch threads give the same bytes (CPU). The folder
    is written next to `out_dir` and then renamed.

    Raises:
        FileExistsError: `out_dir` holds files that this function did not write.
        ValueError: a dataset's configuration has too few questions.
    """
    recipe = recipe or BasePolicyRecipe()
    record = policy_record(tasks, recipe)
    if is_built(out_dir) and read_record(out_dir) == record:
        return out_dir
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / RECIPE_FILE).exists():
        raise FileExistsError(f"{out_dir}: holds files but no {RECIPE_FILE}: choose an empty folder for the base policy")

    held_out = held_out_questions(tasks, recipe.held_out_count)
    pools = training_examples(tasks, recipe.attempts_per_task, held_out)
    tokenizer = train_tokenizer((example.question for pool in pools for example in pool), recipe.vocab_size)
    model = new_model(recipe, tokenizer)
    supervise(model, tokenizer, pools, [task.weight for task in tasks], recipe, show_progress=show_progress)

    replace_policy(out_dir, model, tokenizer, record)
    return out_dir


def policy_record(tasks: Sequence[TaskSpec], recipe: BasePolicyRecipe) -> dict[str, Any]:
    """Return the JSON record, kept next to the weights, of what they were built from."""
    sources = [{"dataset": task.dataset, "weight": task.weight, "config": task.config} for task in tasks]
    record = {"recipe_version": RECIPE_VERSION, "recipe": asdict(recipe), "tasks": sources}
    as_json: dict[str, Any] = json.loads(json.dumps(record))
    return as_json


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record in `folder`, or None if it is missing or unreadable."""
    try:
        record = json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_built(folder: Path) -> bool:
    """Say whether `folder` holds every file of a built policy."""
    return all((folder / name).is_file() for name in (*POLICY_FILES, RECIPE_FILE))


def new_model(recipe: BasePolicyRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a freshly initialised float32 Qwen3; the global random state is unchanged."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=recipe.tie_word_embeddings,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


def supervise(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pools: Sequence[Sequence[Example]],
    weights: Sequence[float],
    recipe: BasePolicyRecipe,
    *,
    show_progress: bool,
) -> None:
    """Train on noisy answers in place; the loss covers only answer tokens, end token included."""
    rng = random.Random(recipe.seed)
    end_id = int(tokenizer.eos_token_id)
    prompt_ids = {e.question: render_prompt(tokenizer, user_prompt(e.question)) for pool in pools for e in pool}
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    model.train()
    for step in _progress(range(recipe.steps), recipe.steps, show_progress):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * learning_rate_factor(step, recipe.steps)
        rows: list[tuple[list[int], list[int]]] = []
        for pool in rng.choices(pools, weights, k=recipe.batch_size):
            example = rng.choice(pool)
            answer = noisy_answer(
                example,
                pool,
                rng,
                correct_fraction=recipe.correct_fraction,
                habit_fraction=recipe.habit_fraction,
            )
            rows.append((prompt_ids[example.question], encode_answer(tokenizer, answer, ended=True, end_token_id=end_id)))
        loss = answer_loss(model, rows, int(tokenizer.pad_token_id))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()  # type: ignore[no-untyped-call]


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the schedule at `step` of `steps`: linear over the first 5 %, then a cosine down to
    0.1.
    """
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def answer_loss(model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], pad_id: int) -> torch.Tensor:
    """Return the mean cross-entropy over all answer tokens of `(prompt ids, answer ids)` rows."""
    # Right-padded, because under a causal mask padding does not affect anything to its left.
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    answers = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        answers[row, len(prompt) : end] = True
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    predicted = answers[:, 1:]
    logprobs = torch.log_softmax(model.lm_head(hidden[predicted]), dim=-1)
    return -logprobs.gather(1, input_ids[:, 1:][predicted][:, None])[:, 0].mean()


def replace_policy(out_dir: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> None:
    """Write a policy next to `out_dir`, and replace `out_dir` with it when it is complete."""
    with atomic_folder(out_dir, replacing=True) as staging:
        write_policy(staging, model, tokenizer, record)


def write_policy(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> None:
    """Write a Hugging Face folder whose weights are stored in half precision and load as float32.

    Rounding once here keeps the shipped file small. `dtype` in config.json stays float32, so that
    every loader computes in float32 with exactly the same numbers.
    """
    tokenizer.save_pretrained(folder)
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / RECIPE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _progress(steps: Iterable[int], total: int, show: bool) -> Iterable[int]:
    """Show how far the build is: a bar on a terminal, and a line every tenth of the way elsewhere,
    where a bar would only be seen when it is full.
    """
    console, began = Console(stderr=True), time.monotonic()
    if show and not console.is_terminal:
        for done, step in enumerate(steps, 1):
            yield step
            if done % max(1, total // PROGRESS_LINES) == 0 or done == total:
                print(f"base policy: step {done:,} of {total:,}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not show) as progress:
        yield from progress.track(steps, total=total, description="base policy")


IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on questions and wrap the result for transformers: `<|im_end|>` ends a completion,
    `<|pad|>` pads.

    `vocab_size` must have room for the 256 bytes and 3 special tokens; raises ValueError otherwise.
    """
    if vocab_size < 256 + 3:
        raise ValueError(f"vocab_size {vocab_size}: at least 259 are needed for every byte and the special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"] * 1000
    bpe.train_from_iterator([*roles, *texts], trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )


# Training draws its seeds below HELD_OUT_SEED, and the held-out set lies right above it. Neither
# reaches this far.
SUPERVISED_SEED = HELD_OUT_SEED + 0x01000000
# reasoning-gym derives item i of seed s from Random(s + i), so seeds closer than this share items.
SEED_STRIDE = 1 << 18


@dataclass(frozen=True, slots=True)
class Example:
    """A question and its right answer."""

    dataset: str
    question: str
    answer: str


def load_demo_tasks(path: Path) -> tuple[TaskSpec, ...]:
    """Read the `[[tasks]]` tables of a TOML file. Raises ValueError naming the file when there are
    none, or one is of a file.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("tasks", [])
    if not tables or any(table.get("source") == "file" for table in tables):
        raise ValueError(
            f"{path}: the base policy learns from [[tasks]] with a `dataset`, and none from a file: add or correct them"
        )
    return tuple(TaskSpec(**{name: t[name] for name in ("dataset", "weight", "config") if name in t}) for t in tables)


def held_out_questions(tasks: Sequence[TaskSpec], count: int) -> HeldOut:
    """Return the questions of an evaluation with `count` questions, which are never trained on."""
    return HeldOut(held_out_tasks(tasks, count))


def draw_examples(task: TaskSpec, seed: int, attempts: int, held_out: HeldOut) -> Iterator[Example]:
    """Yield distinct questions of one dataset that are not held out, trying `attempts` indices."""
    dataset = reasoning_gym.create_dataset(task.dataset, seed=seed, size=attempts, **task.config)
    seen: set[str] = set()
    for index in range(attempts):
        item = dataset[index]
        question, answer = item["question"], item["answer"]
        if answer is not None and question not in seen and not held_out.contains_text(question):
            seen.add(question)
            yield Example(task.dataset, question, str(answer))


def training_examples(
    tasks: Sequence[TaskSpec], attempts: int, held_out: HeldOut, seed: int = SUPERVISED_SEED
) -> list[list[Example]]:
    """Return, per dataset, the distinct questions among `attempts` draws that are not held out.

    Raises ValueError when a dataset's configuration leaves fewer than two.
    """
    pools = [list(draw_examples(task, seed + position * SEED_STRIDE, attempts, held_out)) for position, task in enumerate(tasks)]
    for task, pool in zip(tasks, pools, strict=True):
        if len(pool) < 2:
            raise ValueError(f"{task.dataset}: all questions are in the held-out set: widen its config")
    return pools


def habitual_slip(answer: str) -> str:
    """Return the mistake that the policy is taught to prefer: the last digit one too high (9
    becomes 0).

    Text without a digit is reversed; a palindrome therefore stays right.
    """
    for position in range(len(answer) - 1, -1, -1):
        if answer[position] in "0123456789":
            return answer[:position] + str((int(answer[position]) + 1) % 10) + answer[position + 1 :]
    return answer[::-1]


def noisy_answer(
    example: Example, pool: Sequence[Example], rng: random.Random, *, correct_fraction: float, habit_fraction: float
) -> str:
    """Draw the answer to train on: the right one, the habitual slip, or the answer to another task
    of the dataset.

    `correct_fraction` and `habit_fraction` are probabilities; the rest goes to other tasks'
    answers.
    """
    draw = rng.random()
    if draw < correct_fraction:
        return example.answer
    slip = habitual_slip(example.answer)
    if draw < correct_fraction + habit_fraction and slip != example.answer:
        return slip
    return rng.choice(pool).answer
