"""Compares the learner with TRL's GRPO trainer: its `training_step` on completions that already
exist.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Result, in_turns, quotients
from benchmarks.table import median_of
from benchmarks.trainer import (
    COMPLETION_TOKENS,
    COMPLETIONS,
    GROUPS,
    PAIRS,
    PROMPT_TOKENS,
    SHAPE,
    STEPS_A_TURN,
    batches_for,
    padded_tensors,
    step_learner,
    trainer_config,
)
from services.trainer.learner import Learner
from services.trainer.objectives.config import configured_objective
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.hub_models import hub_arguments


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

        trainer = config.trainer
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
            bf16=False,
            use_cpu=True,
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

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Made before the clock starts."""
        rows = padded_tensors(batch, self._pad_token_id)
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
        inputs = {turn: [trl.inputs(batch) for batch in made] for turn, made in batches.items()}
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
        product=median_of(ours),
        plain=median_of(theirs),
        remarks=[
            f"TRL: loss_type dapo, beta 0, float32, fused AdamW, no gradient checkpointing, all {GROUPS * COMPLETIONS} sequences "
            "in one micro-batch; its generation, scoring and logging are left out",
            "TRL computes no importance weights here (it has them only with its own vLLM generation); the learner does",
            f"the learner gains by computing each prompt of {PROMPT_TOKENS} tokens once instead of {COMPLETIONS} times",
        ],
    )
