"""Compares the learner with a bare PyTorch loop that repeats each prompt L times, and with TRL."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.workload import node_config, random_batch
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import accumulate_gradients
from services.trainer.learner import Learner
from services.trainer.objectives.config import configured_objective
from services.trainer.selection.intake import take_in
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.hub_models import hub_arguments
from shared.model.loading import resolve_device, resolve_dtype

GROUPS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 60, (8, 32)
PAIRS, STEPS_A_TURN = 7, 3
SHAPE = (
    f"batches of {GROUPS} groups, each a prompt of {PROMPT_TOKENS} random tokens and {COMPLETIONS} completions of "
    f"{COMPLETION_TOKENS[0]} to {COMPLETION_TOKENS[1]} random tokens, all groups with an advantage; the demo's model "
    "(models/base), float32, 1 thread, AdamW, gradient norm clipped to 1; completion tokens a second, "
    f"{PAIRS} pairs of {STEPS_A_TURN} steps each"
)


def trainer_config(folder: Path) -> NodeConfig:
    """The demo's trainer, with a token budget that fits the whole batch into one forward pass on
    both sides.
    """
    trainer = {"objective": "dapo", "token_budget": 16_384, "warmup_steps": 0, "learning_rate": 1e-4}
    return node_config(folder, "nats://127.0.0.1:4222", trainer=trainer, generator={"max_new_tokens": COMPLETION_TOKENS[1]})


def batches_for(learner: Learner, first: int, count: int) -> list[Batch]:
    """Batches of the fixed shape in the learner's own tokens."""
    return [
        random_batch(
            number,
            groups=GROUPS,
            completions=COMPLETIONS,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=COMPLETION_TOKENS,
            vocabulary=learner.rules.vocabulary_size,
            tokenizer_hash=learner.rules.tokenizer_hash,
            end_token_id=learner.rules.end_token_id or 0,
        )
        for number in range(first, first + count)
    ]


def completion_tokens(batch: Batch) -> int:
    """The number of completion tokens that a step trains on."""
    return sum(completion.token_count for item in batch.items for completion in item.scored.group.completions)


def step_learner(learner: Learner, batches: list[Batch]) -> float:
    """Tokens per second of `Learner.step`, including the intake of the messages. Deterministic
    algorithms are on, as in the service.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    started = time.perf_counter()
    for batch in batches:
        record = learner.step(batch)
        assert record.updated and record.tokens == completion_tokens(batch)
    return sum(map(completion_tokens, batches)) / (time.perf_counter() - started)


def padded_tensors(groups: Sequence[TokenGroup], pad_token_id: int) -> dict[str, Tensor]:
    """(sequences, tokens) tensors for a plain loop: every completion in its own row with a copy of
    the prompt. All prompts have the same length.
    """
    places = [(group, place) for group in groups for place in range(len(group.completions))]
    answers = [torch.tensor(list(group.completions[place])) for group, place in places]
    behaviours = [
        torch.tensor(list(group.behaviour_logprobs[place] or [0.0] * len(group.completions[place]))) for group, place in places
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(answer) for answer in answers])
    completion_ids = pad(answers, batch_first=True, padding_value=pad_token_id)
    return {
        "prompt_ids": torch.tensor([list(group.prompt_ids) for group, _ in places]),
        "completion_ids": completion_ids,
        "mask": torch.arange(completion_ids.shape[1]) < lengths.unsqueeze(1),
        "behaviour": pad(behaviours, batch_first=True),
        "advantages": torch.tensor([group.advantages[place] for group, place in places]),
    }


class BareLoop:
    """The same model, batch, loss and optimizer without any service code. Rows are ready tensors,
    padded on the right.
    """

    def __init__(self, config: NodeConfig, pad_token_id: int) -> None:
        from transformers import AutoModelForCausalLM

        self._device = resolve_device(config.model.device)
        self._autocast = resolve_dtype(config.model.dtype, self._device) == torch.bfloat16
        self.model: Any = (
            AutoModelForCausalLM.from_pretrained(
                config.model.path, dtype=torch.float32, **hub_arguments(config.model.path, config.model.revision)
            )
            .to(self._device)
            .train()
        )
        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=trainer.learning_rate, betas=trainer.constants.betas, weight_decay=0.0, fused=True
        )
        self._pad_token_id = pad_token_id
        self._trainer = trainer
        self._clip_low, self._clip_high = configured_objective(config).objective.clip

    def tensors(self, groups: Sequence[TokenGroup]) -> dict[str, Tensor]:
        """Made before the clock starts."""
        return {name: tensor.to(self._device) for name, tensor in padded_tensors(groups, self._pad_token_id).items()}

    def loss(self, rows: dict[str, Tensor]) -> Tensor:
        """DAPO's token mean with truncated importance weights, including clipping although the
        ratio is 1.
        """
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        longest = rows["completion_ids"].shape[1]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, rows["completion_ids"].unsqueeze(-1)).squeeze(-1)
        old = logprobs.detach()
        ratio = (logprobs - old).exp()
        weight = (old - rows["behaviour"]).exp().clamp(max=self._trainer.constants.importance_cap)
        advantages = rows["advantages"].unsqueeze(1)
        clipped = ratio.clamp(1 - self._clip_low, 1 + self._clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages) * weight
        return (per_token * rows["mask"]).sum() / rows["mask"].sum()

    def steps(self, batches: list[dict[str, Tensor]]) -> float:
        """Tokens per second."""
        torch.use_deterministic_algorithms(False)
        started = time.perf_counter()
        for rows in batches:
            self._optimizer.zero_grad(set_to_none=True)
            self.loss(rows).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._trainer.grad_clip)
            self._optimizer.step()
        # Reading the sums from the device waits until all its work is done.
        tokens = sum(int(rows["mask"].sum()) for rows in batches)
        return tokens / (time.perf_counter() - started)


async def measure_trainer_loop() -> Result:
    """`Learner.step` on batch messages, compared with the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_config(Path(folder))
        learner = Learner(config)
        bare = BareLoop(config, pad_token_id=0)
        batches = {turn: batches_for(learner, 1 + turn * STEPS_A_TURN, STEPS_A_TURN) for turn in range(PAIRS + 1)}
        rows = {turn: [bare.tensors(take_in(batch, learner.rules).groups) for batch in made] for turn, made in batches.items()}
        # Both sides start from the same weights, so the first loss and gradient agree if the work
        # is the same.
        difference = abs(_first_gradient(learner, batches[0][0]) - _bare_gradient(bare, rows[0][0]))

        async def product(turn: int) -> float:
            return step_learner(learner, batches[turn])

        async def plain(turn: int) -> float:
            return bare.steps(rows[turn])

        ours, theirs = await in_turns(product, plain, pairs=PAIRS)
    return Result(
        row="trainer-loop",
        measured="trainer, completion tokens/s: `Learner.step` on `Batch` messages, intake included",
        against="bare PyTorch loop: same model, batches, loss and optimizer, prompts repeated L times",
        workload=SHAPE,
        unit="tokens/s",
        ratios=quotients(ours, theirs),
        bar=1.0,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            "the bare loop has its tensors ready before the clock starts, computes logits of completion positions only, and runs "
            "without deterministic algorithms, which the learner has on",
            f"gradient norms of both sides on the first batch differ by {difference:.1e}: it is the same work",
        ],
    )


def _first_gradient(learner: Learner, batch: Batch) -> float:
    accumulate_gradients(learner.model, take_in(batch, learner.rules).groups, learner.update_config)
    return _norm_and_clear(learner.model)


def _bare_gradient(bare: BareLoop, rows: dict[str, Tensor]) -> float:
    bare.loss(rows).backward()
    return _norm_and_clear(bare.model)


def _norm_and_clear(model: Any) -> float:
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    model.zero_grad(set_to_none=True)
    return norm


class Trl:
    """A real `GRPOTrainer` without its generation: `training_step` gets what the generation would
    have returned.
    """

    def __init__(self, config: NodeConfig, folder: Path) -> None:
        # TRL would import all of vLLM for its generation side, which is not used here.
        import_module("trl.import_utils").is_vllm_available = lambda *_args, **_options: False
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        trainer, device = config.trainer, resolve_device(config.model.device)
        clip_low, clip_high = configured_objective(config).objective.clip
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, **hub_arguments(config.model.path, config.model.revision)
        )
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, **hub_arguments(config.model.path, config.model.revision))
        arguments = GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=GROUPS * COMPLETIONS,
            num_generations=COMPLETIONS,
            gradient_accumulation_steps=1,
            max_completion_length=COMPLETION_TOKENS[1],
            loss_type="dapo",
            epsilon=clip_low,
            epsilon_high=clip_high,
            beta=0.0,
            learning_rate=trainer.learning_rate,
            adam_beta1=trainer.constants.betas[0],
            adam_beta2=trainer.constants.betas[1],
            max_grad_norm=trainer.grad_clip,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            bf16=resolve_dtype(config.model.dtype, device) == torch.bfloat16,
            use_cpu=device.type == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        self.trainer: Any = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 1 ="] * GROUPS * COMPLETIONS}),
        )
        self.trainer.create_optimizer()
        wrapped, self._optimizer = self.trainer.accelerator.prepare(self.trainer.model, self.trainer.optimizer)
        self._model = self.trainer.model_wrapped = wrapped
        self.trainer.current_gradient_accumulation_steps = 1
        # training_step asks for the results of generation and scoring.
        self.trainer._prepare_inputs = lambda inputs: inputs
        self._pad_token_id = int(tokenizer.pad_token_id or 0)

    def inputs(self, groups: Sequence[TokenGroup]) -> dict[str, Tensor]:
        """Made before the clock starts."""
        rows = padded_tensors(groups, self._pad_token_id)
        mask = rows["mask"].to(torch.int64)
        return {
            "prompt_ids": rows["prompt_ids"],
            "prompt_mask": torch.ones_like(rows["prompt_ids"]),
            "completion_ids": rows["completion_ids"],
            "completion_mask": mask,
            "advantages": rows["advantages"],
            "num_items_in_batch": mask.sum(),
        }

    def steps(self, batches: list[dict[str, Tensor]]) -> float:
        """Completion tokens per second of loss, backward pass, clipping and AdamW."""
        torch.use_deterministic_algorithms(False)
        started = time.perf_counter()
        for inputs in batches:
            self.trainer.training_step(self._model, inputs, inputs["num_items_in_batch"])
            self.trainer.accelerator.clip_grad_norm_(self._model.parameters(), self.trainer.args.max_grad_norm)
            self._optimizer.step()
            self._model.zero_grad()
        return sum(int(inputs["completion_mask"].sum()) for inputs in batches) / (time.perf_counter() - started)


async def measure_trainer_trl() -> Result:
    """`Learner.step` on batch messages, compared with TRL's step on ready tensors."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        config = trainer_config(Path(name))
        trl = Trl(config, Path(name))
        learner = Learner(config)
        batches = {turn: batches_for(learner, 1 + turn * STEPS_A_TURN, STEPS_A_TURN) for turn in range(PAIRS + 1)}
        inputs = {turn: [trl.inputs(take_in(batch, learner.rules).groups) for batch in made] for turn, made in batches.items()}
        before = {name: value.detach().clone() for name, value in trl.trainer.model.named_parameters()}

        async def product(turn: int) -> float:
            return step_learner(learner, batches[turn])

        async def plain(turn: int) -> float:
            return trl.steps(inputs[turn])

        ours, theirs = await in_turns(product, plain, pairs=PAIRS)
        moved = max(float((value - before[name]).detach().abs().max()) for name, value in trl.trainer.model.named_parameters())
        assert moved > 0.0, "TRL's step did not move its weights: it was not measured at work"
    return Result(
        row="trainer-trl",
        measured="trainer, completion tokens/s: `Learner.step` on `Batch` messages, intake included",
        against="TRL `GRPOTrainer.training_step` + clipping + AdamW on ready tensors",
        workload=SHAPE,
        unit="tokens/s",
        ratios=quotients(ours, theirs),
        bar=2.0,
        direction="at least",
        product=statistics.median(ours),
        plain=statistics.median(theirs),
        remarks=[
            f"TRL: loss_type dapo, beta 0, float32, fused AdamW, no gradient checkpointing, all {GROUPS * COMPLETIONS} sequences "
            "in one micro-batch; its generation, scoring and logging are left out",
            "TRL computes no importance weights here (it has them only with its own vLLM generation); the learner does",
            f"the learner gains by computing each prompt of {PROMPT_TOKENS} tokens once instead of {COMPLETIONS} times",
        ],
    )
