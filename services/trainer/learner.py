"""The policy and its optimizer: one `step` per batch, and all the state needed to resume exactly.

It knows neither server nor disk. On a CPU the same configuration and batches give the same weights
bit for bit. The learning rate follows from the step's number alone, so that resuming needs no saved
state for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, TypeVar

import structlog
import torch
from torch import Tensor

from services.trainer.checkpoint import LearnerState
from services.trainer.gradient.bounded_step import InfluenceRules, Update, UpdateRecord, bounded_gradients
from services.trainer.gradient.forward import plain_rows_reason
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import (
    BatchLogprobs,
    FirstPass,
    KnownLogprobs,
    UpdateConfig,
    are_known,
    batch_logprobs,
    with_masks,
)
from services.trainer.parallel import ALONE, Parallel, split_optimizer_state, whole_optimizer_state
from services.trainer.policy_model import load_policy_model, load_reference_model, separate_head
from services.trainer.records import PhaseSeconds, StepRecord, trained_groups, trained_of
from services.trainer.selection.intake import Intake, IntakeRules, take_in
from services.trainer.selection.likelihood import (
    AbsurdTextRules,
    choose,
    drop_absurd,
    groups_to_check,
    least_logprob,
    local_means,
    without_absurd,
)
from shared.config import NodeConfig
from shared.config.trainer_section import TrainerSection
from shared.contracts.messages import Batch
from shared.model.loading import DTYPES, vocabulary_size
from shared.model.reading import end_tokens
from shared.model.weights import (
    Adapters,
    DeltaRounding,
    RoundingTally,
    WeightsError,
    adapter_tensors,
    base_fingerprint,
    load_trainable,
    plain_name,
    policy_tensors,
    trainable_tensors,
)

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, warmup_steps: int, kind: ScheduleKind, end_step: int) -> float:
    """Learning rate of step `step` (the first is 1).

    It rises linearly to `peak`, reached at step `warmup_steps + 1`, then stays (`constant`) or
    falls to 0 just after `end_step` along a line or half a cosine, and stays 0.

    Example: peak 1, warm-up 2, linear to step 6: 1/3, 2/3, 1, 3/4, 1/2, 1/4, 0.
    """
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    if kind == "constant":
        return peak
    progress = (step - 1 - warmup_steps) / max(1, end_step - warmup_steps)
    if progress >= 1.0:
        return 0.0
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def configured_rate(trainer: TrainerSection, step: int) -> float:
    """Learning rate of a step under the settings; a schedule ends with
    the run.
    """
    return learning_rate(
        step,
        peak=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        kind=trainer.schedule,
        end_step=trainer.max_steps,
    )


T = TypeVar("T")


class TorchThread:
    """Runs one function after another."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")

    async def run(self, work: Callable[[], T]) -> T:
        """The result or exception of `work`, after all earlier calls are done."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def shutdown(self) -> None:
        """Accept no more work; the current call ends by itself."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class Learner:
    """Trains the configured model on batches, one step each. With `parallel`, it trains together
    with other processes, which then must make the same calls.

    Raises (on construction) ModelLoadError or ValueError if the configuration does not suit the
    model; the message names cause and remedy.
    """

    def __init__(self, config: NodeConfig, parallel: Parallel = ALONE) -> None:
        trainer = config.trainer
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        policy = load_policy_model(config, parallel)
        if policy.device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._config = trainer
        self._parallel = parallel
        self._device, self.dtype = policy.device, policy.dtype
        wanted = trainer.publish_dtype
        self.published_dtype = policy.dtype if wanted == "auto" else DTYPES[wanted]
        self.delta_rounding: DeltaRounding | None = None
        self.model: Any = policy.model
        self._adapters = _published_adapters(config, self.model, policy.dtype)
        self.tokenizer = policy.tokenizer
        ends = end_tokens(config.model, policy.tokenizer)
        self.rules = IntakeRules.of(
            config,
            policy.tokenizer,
            end_token_id=ends[0],
            end_token_ids=ends,
            vocabulary_size=vocabulary_size(policy.model),
        )
        self._influence = InfluenceRules.of(trainer)
        self.update_config = replace(
            UpdateConfig.of(config),
            budget_tokens=trainer.token_budget,
            packed=self._packs_rows(),
            autocast_bf16=policy.dtype == torch.bfloat16,
            separate_head=separate_head(policy.model, trainer.token_budget),
        )
        self._absurd_text = AbsurdTextRules.of(trainer)
        self._reference = load_reference_model(config, policy, parallel) if self.update_config.objective.needs_reference else None
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = self._new_optimizer()
        self._recent_norms: list[float] = []
        self.trained: list[dict[str, Any]] = []
        """What became of each group of the last step's batch (`services.trainer.records`)."""

    def step(self, batch: Batch) -> StepRecord:
        """Train on a batch. The caller fills in the seconds of `wait`, `publish` and
        `checkpoint`.
        """
        started = time.perf_counter()
        known: KnownLogprobs = {}
        chosen = choose(self.model, batch, self.rules, self.update_config, self._parallel, known)
        taken = take_in(chosen.batch, self.rules)
        intake, absurd, first = self._checked(taken, batch.seed, known)
        intake_s = time.perf_counter() - started
        rate = self._set_learning_rate(batch.number)
        updates = self._updates(intake.groups, known, first)
        if first is not None and first.checked:
            intake, absurd = without_absurd(intake, first.kept)
        gradients = [update.gradient for update in updates]
        self.trained = trained_groups(batch, chosen.left_out, intake, gradients, self.update_config)
        return StepRecord(
            step=batch.number,
            time=time.time(),
            **vars(intake.record()),
            **vars(chosen.record(absurd)),
            **vars(UpdateRecord.of(updates, rate, [node for node, _ in intake.authors])),
            trained_of=trained_of(batch, self.trained),
            phase_seconds=PhaseSeconds(
                intake=intake_s,
                forward_backward=sum(update.forward_backward_s for update in updates),
                optimizer=sum(update.optimizer_s for update in updates),
            ),
        )

    @property
    def policy_metadata(self) -> dict[str, str]:
        return {} if self._adapters is None else self._adapters.metadata()

    def policy(self) -> dict[str, Tensor]:
        """The policy as generators load it: all weights under Hugging Face names, tied tensors
        once, in `published_dtype`; or only the factors of its adapters, in float32.

        Afterwards `delta_rounding` describes what rounding to that dtype loses of merged adapters
        (None without adapters).
        """
        if self._adapters is not None:
            return adapter_tensors(self.model, self._parallel.whole)
        tally = RoundingTally()
        tensors = policy_tensors(self.model, self.published_dtype, self._parallel.whole, tally)
        self.delta_rounding = tally.rounding(self._parallel.number)
        return tensors

    def state(self) -> LearnerState:
        """Everything that the next step depends on, apart from the configuration."""
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        whole = self._parallel.whole
        optimizer = whole_optimizer_state(self._optimizer.state_dict(), whole)
        return LearnerState(trainable_tensors(self.model, whole), optimizer, random, self._recent_norms)

    def restore(self, state: LearnerState) -> None:
        """Continue from `state`.

        Raises:
            WeightsError: it belongs to another model.
            ValueError: its optimizer has other parameters.
        """
        part = self._parallel.part
        load_trainable(self.model, state.weights, part)
        numbered = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._optimizer.load_state_dict(split_optimizer_state(state.optimizer, numbered, part))
        self._recent_norms = state.recent_norms
        torch.set_rng_state(state.random["cpu"])
        if self._device.type == "cuda" and "cuda" in state.random:
            torch.cuda.set_rng_state(state.random["cuda"], self._device)

    def _checked(self, taken: Intake, seed: int, known: KnownLogprobs) -> tuple[Intake, Counter[str], FirstPass | None]:
        """Drop absurd answers now, or let the first update find them while it computes the
        gradient. So no text is computed twice before the weights move.
        """
        config, several = self.update_config, self._config.updates_per_batch > 1
        checked = groups_to_check(taken, config, self._absurd_text, seed)
        if self._first_pass_tells and not are_known([taken.groups[number] for number in checked], known):
            return taken, Counter(), FirstPass(checked, least_logprob(local_means(taken.groups), self._absurd_text))
        intake, absurd = drop_absurd(self.model, taken, config, self._absurd_text, seed, self._parallel, known)
        return intake, absurd, FirstPass() if several and self._first_pass_tells else None

    @property
    def _first_pass_tells(self) -> bool:
        """Say whether the first update can find the policy's logprobs: not where they decide what
        the loss of other answers is.
        """
        config = self.update_config
        objective = config.objective
        return not (config.needs_proximal or objective.needs_reference or objective.objective.uses_group_likelihood)

    def _updates(self, groups: Sequence[TokenGroup], known: KnownLogprobs, first: FirstPass | None) -> list[Update]:
        config = self.update_config
        started = time.perf_counter()
        proximal: BatchLogprobs | None = None
        reference: BatchLogprobs | None = None
        # Only these show what is dropped for its likelihood, which must not count in the divisor.
        if first is None and (self._config.updates_per_batch > 1 or config.needs_proximal):
            proximal = batch_logprobs(self.model, groups, config, self._parallel, counted=True, known=known)
        if self._reference is not None:
            reference = batch_logprobs(self._reference, groups, config, self._parallel)
        before_s = time.perf_counter() - started
        updates: list[Update] = []
        for _ in range(self._config.updates_per_batch):
            if config.objective.objective.keeps is not None:  # what it masks changes with the policy
                current = batch_logprobs(self.model, groups, config, self._parallel) if updates else proximal
                groups = with_masks(groups, config, current)
            update = self._update(groups, proximal, reference, before_s, first)
            updates.append(update)
            if first is not None:
                groups, proximal, first = first.groups, first.logprobs, None
            before_s = 0.0
            if not update.moved:
                break
        # Frees 4 bytes per parameter that are not needed until the next step, on a device that may
        # be shared.
        self._optimizer.zero_grad(set_to_none=True)
        return updates

    def _update(
        self,
        groups: Sequence[TokenGroup],
        proximal: BatchLogprobs | None,
        reference: BatchLogprobs | None,
        before_s: float,
        first: FirstPass | None,
    ) -> Update:
        """One optimizer update. If the norm of the gradient is not finite the weights stay
        unchanged, because AdamW's moments would carry the infinity into every later step.
        `before_s` is the time that the batch took before its first update.
        """
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        gradient = bounded_gradients(
            self.model,
            groups,
            self.update_config,
            self._influence,
            proximal=proximal,
            reference=reference,
            parallel=self._parallel,
            first=first,
            recent=self._recent_norms,
        )
        self._recent_norms = gradient.recent
        computed = time.perf_counter()
        grad_norm, moved = 0.0, False
        if any(parameter.grad is not None for parameter in self._parameters):
            limit = self._config.grad_clip or math.inf
            grad_norm = self._parallel.number(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
            moved = math.isfinite(grad_norm)
        if moved:
            self._optimizer.step()
        ended = time.perf_counter()
        return Update(gradient, grad_norm, moved, before_s + computed - started, ended - computed)

    def _set_learning_rate(self, step: int) -> float:
        rate = configured_rate(self._config, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _packs_rows(self) -> bool:
        if not self._config.packed_rows:
            return False
        reason = plain_rows_reason(self.model)
        if reason and self._parallel.rank == 0:
            structlog.get_logger("trainer").info("rows_not_packed", reason=reason)
        return not reason

    def _new_optimizer(self) -> torch.optim.AdamW:
        trainer = self._config
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": trainer.constants.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=trainer.learning_rate,
            betas=trainer.constants.betas,
            eps=trainer.constants.adam_eps,
            fused=self._device.type in {"cpu", "cuda"},
        )


def _published_adapters(config: NodeConfig, model: Any, dtype: torch.dtype) -> Adapters | None:
    """The adapters to publish instead of merged weights, or None. Generators add them to a base
    that they loaded themselves, so the base's fingerprint is published too; on another base they
    would give another policy.
    """
    lora = config.trainer.lora
    if not lora.rank or lora.publish == "merged":
        return None
    odd = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.ndim != 2]
    if odd:
        raise ValueError(
            f"trainer.lora adapts {plain_name(odd[0])}, whose factors are not matrices, and generators support only matrices: "
            'set trainer.lora.publish = "merged", or omit the layer from trainer.lora.target_modules'
        )
    try:
        base = base_fingerprint(config.model.path, config.model.revision)
    except WeightsError as error:
        raise ValueError(str(error)) from None
    return Adapters(rank=lora.rank, alpha=lora.alpha, base=base, dtype=str(dtype).removeprefix("torch."))
