"""The contract of every engine: token ids in; token ids, text and behaviour logprobs out; weights
are replaced completely or not at all.

A sample's logprobs are *processed*: those of the distribution that the token was drawn from, after
temperature, top-k and top-p, in that order. At temperature 0 the likeliest token is taken, top-k
and top-p have no effect, and the logprob is that of temperature 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.config.sections import GeneratorSection

MIN_TEMPERATURE = 0.01
"""vLLM raises any smaller temperature but 0 to this one; refusing them keeps the engines alike."""


class EngineError(RuntimeError):
    """An engine cannot do what was requested; the message names the cause and the remedy."""


class PolicyLoadError(EngineError):
    """A policy was not loaded. The version that answered before still does."""


class UnsupportedByEngine(EngineError):
    """This engine cannot do it at all; no retry will help."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off, `max_new_tokens`
    counts the end token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256

    @classmethod
    def of(cls, generator: GeneratorSection) -> SamplingParams:
        """As the configuration says for what is trained on."""
        return cls(generator.temperature, generator.top_p, generator.top_k, generator.max_new_tokens)

    def __post_init__(self) -> None:
        """Refuse what no engine could sample from."""
        if self.temperature != 0.0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature}: use 0 (greedy) or a number of at least {MIN_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p}: use a number above 0 and at most 1 (1 is off)")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: use 0 (off) or a positive number")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: use at least 1")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    `token_ids` holds the end token when `finish_reason` is `stop`; `logprobs` has one number a
    token; `text` is decoded without special tokens. `policy_version` is the version that sampled
    every one of these tokens. With `logprobs` None only the text is the policy's: `token_ids` are
    that text encoded again.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: tuple[float, ...] | None
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is told; each takes what it knows.

    model_path: model folder or hub name.
    revision: commit of a hub name.
    dtype: a torch dtype's name, or `auto`: bfloat16 on a GPU, else float32.
    device: torch device, or `auto`.
    max_model_len: most tokens of prompt and completion together.
    threads: CPU threads; None: the engine's choice.
    kv_cache_bytes: memory for keys and values; None: the engine's choice.
    gpu_memory_utilization: share of the GPU's memory.
    tensor_parallel_size: GPUs that one copy of the model is spread over.
    start_timeout_s, swap_timeout_s, request_timeout_s: deadlines.
    adapter_rank: of the LoRA adapters that policies are; 0 where they are all weights.
    rests: whether `Engine.rest` is going to be called.
    base_url, served_model, api_key: of a server.
    options: those of an engine of one's own (`generator.engine_options`).
    """

    model_path: str
    revision: str = ""
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int = 2048
    threads: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    start_timeout_s: int = 1800
    swap_timeout_s: float = 120.0
    adapter_rank: int = 0
    rests: bool = False
    base_url: str | None = None
    served_model: str | None = None
    api_key: str | None = None
    request_timeout_s: float = 120.0
    options: Mapping[str, float | int | bool | str] = field(default_factory=dict)


class Engine(ABC):
    """A model that answers. All methods are safe to call concurrently from one event loop, which
    they never block for long.
    """

    name: str
    """What it is called in the configuration, logs and metrics."""
    loads_policies: bool = True
    """Whether `load_policy` can replace the weights. If not, the engine's weights are not trained
    here.
    """
    shares_device: bool = True
    """Whether it computes on this machine and so may have to take turns."""
    good_calls: int = 1
    """The number of concurrent calls that keep it busy, if the configuration does not say."""
    metrics_prefix: str = ""
    """Of the metrics that it puts into prometheus_client's default registry; they are served with
    the generator's.
    """
    policy_version: int = 0
    """Version of the weights that answer now; 0 is the base policy."""

    @abstractmethod
    async def start(self) -> None:
        """Load the base policy. Raises `EngineError` when that cannot be done."""

    @abstractmethod
    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample `n` completions of each prompt of token ids.

        All samples of one call come from one policy version: a swap waits for the calls that run,
        later calls wait for the swap. The same seed, prompts and weights give the same samples
        (transformers on CPU: bit for bit; vLLM: up to rounding that depends on what else is in its
        batch). A completion also ends, with `length`, where the model's context does.
        """

    @abstractmethod
    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Replace the weights by those in a safetensors file with Hugging Face parameter names, or
        add its adapters to the base.

        Names and shapes are checked before anything is touched. Raises `PolicyLoadError` and keeps
        the old policy on failure.
        """

    @abstractmethod
    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """Return the processed logprob of each given completion token (`completions[i]` after
        `prompts[i]`).

        A token that top-k or top-p would never have let through scores `-inf`.
        """

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the device, if it is shared in turns (`model.device_turns`): call `start`,
        `generate`, `load_policy` and `score` within. The wait for a turn may be long and must not
        count toward a call's deadline. Raises `EngineError`.
        """
        yield

    async def rest(self) -> None:  # noqa: B027 (most engines hold nothing that they could give back)
        """Give the device's memory back as far as this can be undone quickly; called between calls,
        never during one. Does nothing before `start` and after `close`."""

    async def wake(self) -> None:  # noqa: B027
        """Take back what `rest` gave. Raises `EngineError` when that cannot be done."""

    @abstractmethod
    async def close(self) -> None:
        """Free all that `start` took. Calls in flight fail; closing twice is fine."""
