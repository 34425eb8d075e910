"""The engine over plain transformers: the default on a machine without a GPU.

One worker thread owns the model, so the event loop stays responsive, and calls and swaps run one
after the other. So no sample mixes two versions, and no locks are needed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from services.generator.engines.base import Engine, EngineError, EngineSettings, PolicyLoadError, Sample, SamplingParams
from services.generator.engines.batching import WAYS, Batching, BatchRows, UnsafeModel, batches, choose_batching
from services.generator.engines.model_folder import (
    ModelFolder,
    adapters_in,
    check_policy_file,
    load_base,
    read_model_folder,
    warn_of_dtype,
)
from shared.model.loading import resolve_device, resolve_dtype
from shared.model.weights import Adapters, adapted_module, plain_name

_T = TypeVar("_T")
_NAME = "default"


class TransformersEngine(Engine):
    """Samples in a batched loop with a key-value cache; exact and reproducible on a CPU.

    Args:
        model_path: Model folder or hub name.
        revision: Commit of a hub name.
        dtype: A torch dtype's name, or `auto`: see `resolve_dtype`.
        device: Torch device, or `auto`: the GPU if there is one.
        max_model_len: Most tokens of prompt and completion together.
        threads: Torch threads for the whole process, or None to leave them unchanged.
        max_batch_rows: Most completions computed together, where one prompt's `n` always stay
            together; limits memory.
    """

    name = "transformers"

    def __init__(
        self,
        model_path: str,
        *,
        revision: str = "",
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int = 2048,
        threads: int | None = None,
        max_batch_rows: int = 256,
    ) -> None:
        self._model_path = model_path
        self._revision = revision
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._dtype = resolve_dtype(dtype, self._device)
        self._max_model_len = max_model_len
        self._threads = threads
        self._max_batch_rows = max_batch_rows
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self._closing = threading.Event()
        self._model: Any = None
        self._adapters: AdapterSlot | None = None
        self._is_base = True
        self._told_of_dtype = False
        self._folder: ModelFolder | None = None
        self._way = WAYS[-1]

    async def start(self) -> None:
        """Load the model in the worker thread."""
        await self._in_worker(self._start)

    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample as `Engine.generate` describes. Calls are queued."""
        given_up = threading.Event()
        try:
            return await self._in_worker(lambda: self._generate(prompts, n, params, seed, given_up))
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Load as `Engine.load_policy` describes, after all earlier calls."""
        await self._in_worker(lambda: self._load_policy(weights_file, version))

    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Score as `Engine.score` describes."""
        return await self._in_worker(lambda: score_completions(self._model, prompts, completions, params))

    async def rest(self) -> None:
        """Wait for an abandoned call to end and free torch's cached memory on a GPU. The weights
        stay.
        """
        if self._folder is not None and not self._closing.is_set():
            await self._in_worker(torch.cuda.empty_cache if self._device.type == "cuda" else lambda: None)

    async def close(self) -> None:
        """Stop at the next token, then release the model."""
        self._closing.set()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._model = None

    async def _in_worker(self, work: Callable[[], _T]) -> _T:
        if self._closing.is_set():
            raise EngineError("the transformers engine is closed: create a new one")
        if self._folder is None and work != self._start:
            raise EngineError("the transformers engine has not started: await start() first")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _start(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._model = load_base(self._model_path, self._revision, dtype=self._dtype, device=self._device).requires_grad_(False)
        folder = read_model_folder(self._model_path, max_model_len=self._max_model_len, revision=self._revision, model=self._model)
        self._adapters = AdapterSlot(self._model)
        try:
            self._way = choose_batching(self._model, context_length=folder.context_length, pad_token_id=folder.pad_token_id)
        except UnsafeModel as error:
            raise EngineError(f"model {self._model_path}: {error}: use another engine or another model") from error
        if self._way is not WAYS[0]:
            structlog.get_logger("generator").warning("engine_batches_less", model=self._model_path, way=self._way.name)
        self._folder = folder

    def _generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, seed: int, given_up: threading.Event
    ) -> list[list[Sample]]:
        assert self._folder is not None

        # A thread cannot be cancelled. This check before every token ends it within one.
        def keep_on(ended: int, sampled: int) -> None:
            self.completions_ended, self.tokens_sampled = ended_before + ended, sampled_before + sampled
            if self._closing.is_set():
                raise EngineError("the transformers engine was closed while it was sampling")
            if given_up.is_set():
                raise EngineError("the caller no longer waits for these samples")

        limits = self._folder.new_token_limits(prompts, params.max_new_tokens)
        generator = torch.Generator(self._device).manual_seed(seed)
        n_sampled = 1 if params.temperature == 0.0 else n
        prompts_at_once = max(1, self._max_batch_rows // n_sampled)
        groups: list[list[Sample]] = [[] for _ in prompts]
        for numbers in batches(prompts, self._way, prompts_at_once):
            ended_before, sampled_before = self.completions_ended, self.tokens_sampled
            rows = sample_completions(
                self._model,
                [prompts[number] for number in numbers],
                n_sampled,
                params,
                [limits[number] for number in numbers],
                way=self._way,
                generator=generator,
                end_token_ids=self._folder.end_token_ids,
                pad_token_id=self._folder.pad_token_id,
                keep_on=keep_on,
            )
            samples = map(self._sample, rows)
            for number in numbers:
                groups[number] = list(itertools.islice(samples, n_sampled)) * (n // n_sampled)
        return groups

    def _sample(self, row: Row) -> Sample:
        assert self._folder is not None
        return Sample(
            token_ids=tuple(row.token_ids),
            text=self._folder.text(row.token_ids),
            finish_reason=row.finish_reason,
            logprobs=tuple(row.logprobs),
            policy_version=self.policy_version,
        )

    def _load_policy(self, weights_file: Path, version: int) -> None:
        assert self._folder is not None and self._adapters is not None
        adapters = adapters_in(weights_file, self._folder, self._model_path, self._revision)
        if adapters is None:
            check_policy_file(weights_file, self._folder)
        try:
            # Read everything into memory before the first parameter changes, so that an I/O error
            # cannot leave half a policy.
            loaded = load_file(weights_file, device="cpu")
        except (OSError, SafetensorError) as error:
            raise PolicyLoadError(f"policy file {weights_file}: unreadable ({error}): fetch it again") from error
        if adapters is None:
            self._adapters.clear()
            self._is_base = False
            self._copy(loaded)
        else:
            self._load_adapters(weights_file, loaded, *adapters)
        self.policy_version = version

    def _load_adapters(self, weights_file: Path, tensors: dict[str, torch.Tensor], adapters: Adapters, modules: list[str]) -> None:
        assert self._adapters is not None
        base: dict[str, torch.Tensor] | None = None
        try:
            if not self._is_base:
                # The trainer may have trained full weights before; its adapters belong to the
                # base's weights.
                base = load_base(self._model_path, self._revision, dtype=self._dtype, device=torch.device("cpu")).state_dict()
            self._adapters.load(tensors, adapters, modules)
        except EngineError as error:
            raise PolicyLoadError(f"policy file {weights_file}: holds adapters, and their base cannot be read: {error}") from error
        except (ValueError, MemoryError, RuntimeError) as error:
            raise PolicyLoadError(
                f'policy file {weights_file}: its adapters do not fit this model ({error}): set trainer.lora.publish = "merged"'
            ) from error
        if base is not None:
            self._copy(base)
            self._is_base = True
        if not self._told_of_dtype:
            warn_of_dtype(adapters, self._model.dtype)
            self._told_of_dtype = True

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        assert self._folder is not None and self._adapters is not None
        mine = self._adapters.base_tensors()
        with torch.no_grad():
            for tensor_name in self._folder.tensor_shapes:
                mine[tensor_name].copy_(weights[tensor_name])


def open_engine(settings: EngineSettings) -> TransformersEngine:
    """The engine for `generator.engine = "transformers"`. Raises `ModelLoadError` if the machine
    lacks its device.
    """
    return TransformersEngine(
        settings.model_path,
        revision=settings.revision,
        dtype=settings.dtype,
        device=str(resolve_device(settings.device)),
        max_model_len=settings.max_model_len,
        threads=settings.threads,
    )


@dataclass(slots=True)
class Row:
    """One completion while it grows."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities `[..., vocabulary]`, float32, after temperature, top-k and top-p; `-inf`
    for excluded tokens.
    """
    logits = logits.float()
    if params.temperature == 0.0:
        return torch.log_softmax(logits, dim=-1)
    if params.temperature != 1.0:
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        threshold = torch.topk(logits, params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if params.top_p < 1.0:
        ascending, order = torch.sort(logits, dim=-1)
        cut = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1.0 - params.top_p
        cut[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def draw_tokens(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one index of each row `[rows, vocabulary]`, as `torch.multinomial` does; `[rows, 1]`.

    The sums are exact enough in float64, and on a CPU this takes a tenth of multinomial's time,
    which was a tenth of a step of a small model.
    """
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.rand(len(sums), 1, dtype=torch.float64, device=sums.device, generator=generator) * sums[:, -1:]
    # Of equal sums the first belongs to the token with a probability. Never past the last of these.
    return torch.searchsorted(sums, torch.minimum(drawn, sums[:, -1:] * (1 - 1e-12)), right=True)


@torch.inference_mode()
def sample_completions(
    model: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    params: SamplingParams,
    limits: Sequence[int],
    *,
    way: Batching,
    generator: torch.Generator,
    end_token_ids: Sequence[int],
    pad_token_id: int,
    keep_on: Callable[[int, int], None],
) -> list[Row]:
    """Sample `n` completions of each prompt and return them prompt by prompt.

    The prompts are computed together, so they must have the same length unless `way` pads. Rows
    that have ended are dropped once they are an eighth of the batch. `limits[i]` is the most tokens
    that may follow prompt i. `keep_on` is called after every step with the number of completions
    that have ended and of tokens sampled so far, and before the first; it may raise.
    """
    device = model.device
    text = BatchRows(model, prompts, n, way, pad_token_id)
    row_limits = torch.tensor(limits, device=device).repeat_interleave(n)
    ends = torch.tensor(list(end_token_ids), device=device)

    rows = [Row([], [], "length") for _ in range(len(prompts) * n)]
    batch = list(range(len(rows)))
    alive = torch.ones(len(rows), dtype=torch.bool, device=device)
    n_alive, sampled = len(rows), 0
    keep_on(0, 0)
    for step in range(1, max(limits) + 1):
        logprobs = processed_logprobs(text.logits, params)
        greedy = params.temperature == 0.0
        chosen = logprobs.argmax(dim=-1, keepdim=True) if greedy else draw_tokens(logprobs.exp(), generator)
        ended = torch.isin(chosen.squeeze(1), ends)
        for row, token_id, logprob, is_alive, is_end in zip(
            batch,
            chosen.squeeze(1).tolist(),
            logprobs.gather(1, chosen).squeeze(1).tolist(),
            alive.tolist(),
            ended.tolist(),
            strict=True,
        ):
            if is_alive:
                rows[row].token_ids.append(token_id)
                rows[row].logprobs.append(logprob)
                if is_end:
                    rows[row].finish_reason = "stop"
        alive = alive & ~ended & (row_limits > step)
        sampled += n_alive
        n_alive = int(alive.sum())
        keep_on(len(rows) - n_alive, sampled)
        if n_alive == 0:
            break
        if 8 * n_alive <= 7 * len(batch) and text.can_keep:
            kept = alive.nonzero().squeeze(1)
            text.keep(kept)
            chosen, row_limits = chosen[kept], row_limits[kept]
            batch = [batch[index] for index in kept.tolist()]
            alive = alive[kept]
        text.append(chosen)
    return rows


@torch.inference_mode()
def score_completions(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[float]]:
    """Teacher-forced processed logprobs of the completions' tokens, one sequence at a time."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion], device=model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = processed_logprobs(logits, params)
        scores.append(logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1).tolist())
    return scores


class AdapterSlot:
    """The adapters of a transformers model: none until some are loaded, and none again after
    `clear`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: tuple[Adapters, list[str]] | None = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], adapters: Adapters, modules: list[str]) -> None:
        """Use these adapters from now on. Factors that already exist in the model are overwritten
        in place.

        Raises:
            ValueError: peft cannot add the adapters; the model then keeps the previous ones.
        """
        before, kept = self._held, self._factors()
        if before is None or _places(*before) != _places(adapters, modules):
            self._make_places(adapters, modules, kept)
        parameters = self._factors()
        wanted = {".".join(adapted_module(name)): value for name, value in tensors.items()}
        misfit = [name for name, value in wanted.items() if name not in parameters or parameters[name].shape != value.shape]
        if misfit:
            self._restore(before, kept)
            raise ValueError(f"{misfit[0]} has another shape in this model")
        for name, value in wanted.items():
            parameters[name].copy_(value)
        self._held = adapters, modules

    def clear(self) -> None:
        """Use the base model without adapters."""
        for name, module in list(self._model.named_modules()):
            if _is_adapted(module):
                parent, _, child = name.rpartition(".")
                setattr(self._model.get_submodule(parent), child, module.get_base_layer())
        if hasattr(self._model, "peft_config"):
            del self._model.peft_config
        self._held = None

    def base_tensors(self) -> dict[str, Tensor]:
        """The model's own weights under their Hugging Face names, without adapters."""
        return {plain_name(name): value for name, value in self._model.state_dict().items() if ".lora_" not in name}

    def _factors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._model.named_parameters() if ".lora_" in name}

    def _make_places(self, adapters: Adapters, modules: list[str], kept: Mapping[str, Tensor]) -> None:
        before = self._held
        self.clear()
        try:
            self._inject(adapters, modules)
        except Exception as error:  # noqa: BLE001 (peft and each layer say in their own ways what they cannot have)
            self._restore(before, kept)
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _restore(self, before: tuple[Adapters, list[str]] | None, kept: Mapping[str, Tensor]) -> None:
        """Restore the adapted modules and factors that the model had before."""
        self.clear()
        if before is None:
            return
        self._inject(*before)
        for name, value in self._factors().items():
            value.copy_(kept[name])
        self._held = before

    def _inject(self, adapters: Adapters, modules: list[str]) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=modules, inference_mode=True)
        LoraModel(self._model, {_NAME: config}, _NAME)
        self._model.eval().requires_grad_(False)
        found = sum(_is_adapted(module) for module in self._model.modules())
        if found != len(modules):
            raise ValueError(f"{len(modules)} modules are adapted, and {found} of them are in this model")
        for factor in self._factors().values():
            # In float32 like the trainer's; peft would use the base's dtype.
            factor.data = factor.data.float()


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "get_base_layer") and hasattr(module, "lora_A")


def _places(adapters: Adapters, modules: list[str]) -> tuple[int, float, list[str]]:
    return adapters.rank, adapters.alpha, modules
