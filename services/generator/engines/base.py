"""The contract of every engine: token ids in; token ids, text and behaviour logprobs out. Weights
are replaced completely or not at all.

A sample's logprobs are *processed*: those of the distribution that the token was drawn from, after
temperature, top-k and top-p, in that order. At temperature 0 the likeliest token is taken, top-k
and top-p have no effect, and the logprob is that of temperature 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared.config.generator_section import GeneratorSection
from shared.contracts.messages import pieces

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures other than 0 to this one. Refusing them keeps the engines
alike.
"""


class EngineError(RuntimeError):
    """An engine cannot do what was requested. The message names the cause and the remedy."""


class EngineAway(EngineError):
    """The engine's server does not answer; the same call may succeed when it is back."""


class WrongSetting(EngineError):
    """The engine cannot go on until a setting is corrected; a restart does not help."""


class PolicyLoadError(EngineError):
    """A policy was not loaded. The engine still uses the previous version."""


class UnsupportedByEngine(EngineError):
    """This engine does not support the operation; retrying does not help."""


class Prompt(list[int]):
    """A prompt's token ids. `messages`: the conversation that they write, as objects with role and
    content, for a server that takes nothing else.
    """

    def __init__(self, token_ids: Iterable[int], messages: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(token_ids)
        self.messages = messages


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off;
    `max_new_tokens` includes the end token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256

    @classmethod
    def of(cls, generator: GeneratorSection) -> SamplingParams:
        """The parameters for training samples, from the configuration."""
        return cls(generator.temperature, generator.top_p, generator.top_k, generator.max_new_tokens)

    def __post_init__(self) -> None:
        """Refuse parameters that no engine could sample with."""
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

    `token_ids` contains the end token if `finish_reason` is `stop`; `logprobs` has one number per
    token; `text` is decoded without special tokens. `policy_version` is the version that sampled
    all of these tokens. If `logprobs` is None, the server returned only text, and `token_ids` are
    that text encoded again.

    A sample of several turns (`services.generator.episodes`; engines make none) has only what the
    policy said: `turn_tokens` and `turn_chars` are where each turn ends in tokens and text, and
    `replies` what the environment said after each but the last.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None
    policy_version: int = 0
    turn_tokens: tuple[int, ...] = ()
    turn_chars: tuple[int, ...] = ()
    replies: tuple[str, ...] = ()

    @property
    def turns(self) -> list[str]:
        """The policy's turns as texts."""
        return pieces(self.text, self.turn_chars) if self.turn_chars else [self.text]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine; each engine uses those that apply to it.

    model_path: model folder or hub name. revision: commit of a hub name. dtype: a torch dtype's
    name, or `auto`: bfloat16 on a GPU, else float32. device: torch device, or `auto`.
    max_model_len: most tokens of prompt and completion together. threads: CPU threads; None: the
    engine's choice. kv_cache_bytes: memory for keys and values; None: the engine's choice.
    gpu_memory_utilization: share of the GPU's memory. tensor_parallel_size: number of GPUs that one
    copy of the model is split over. start_timeout_s, request_timeout_s: deadlines in
    seconds. adapter_rank: rank of LoRA policies; 0 if policies are full weights. rests: whether
    `Engine.rest` will be called. base_url, served_model, api_key: of a server. options: for an
    engine from an installed package (`generator.engine_options`).
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
    adapter_rank: int = 0
    rests: bool = False
    base_url: str | None = None
    served_model: str | None = None
    api_key: str | None = None
    request_timeout_s: float = 120.0
    options: Mapping[str, float | int | bool | str] = field(default_factory=dict)


class Engine(ABC):
    """A model that samples. All methods may be called concurrently from one event loop, and never
    block it for long.
    """

    name: str
    """The engine's name in the configuration, logs and metrics."""
    loads_policies: bool = True
    """Whether `load_policy` can replace the weights. If not, this node does not train them."""
    shares_device: bool = True
    """Whether it computes on this machine and so may have to take turns."""
    good_calls: int = 1
    """Number of concurrent calls that keep it busy."""
    metrics_prefix: str = ""
    """Prefix of the metrics that it registers with prometheus_client's default registry, which the
    generator then serves too.
    """
    policy_version: int = 0
    """Version of the weights in use; 0 is the base policy."""
    completions_ended: int = 0
    tokens_sampled: int = 0
    """How many completions have ended, and how many tokens were sampled, in all calls since the
    start: while a long call runs, people see how far it is. 0 if the engine does not count.
    """

    @abstractmethod
    async def start(self) -> None:
        """Load the base policy. Raises `EngineError` on failure. After `EngineAway` an engine
        that runs elsewhere (`shares_device` is False) is started again until it answers.
        """

    @abstractmethod
    async def generate(self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, seed: int) -> list[list[Sample]]:
        """Sample `n` completions of each prompt of token ids.

        All samples of one call come from one policy version: a swap waits for running calls, and
        later calls wait for the swap. The same seed, prompts and weights give the same samples
        (transformers on CPU: bit for bit; vLLM: up to rounding that depends on the rest of its
        batch). A completion also ends, with `length`, when the model's context is full.

        An engine that loads no policies may give no samples of a prompt that its server refuses.
        """

    @abstractmethod
    async def load_policy(self, weights_file: Path, version: int) -> None:
        """Replace the weights by those in a safetensors file with Hugging Face parameter names, or
        add its adapters to the base.

        Names and shapes are checked before anything is changed. On failure it raises
        `PolicyLoadError` and keeps the old policy. Its deadline is the caller's, who cancels it.
        """

    @abstractmethod
    async def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]]:
        """The processed logprob of each given completion token (`completions[i]` after
        `prompts[i]`).

        A token that top-k or top-p excludes scores `-inf`.
        """

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the device if processes share it in turns (`model.device_turns`); call `start`,
        `generate`, `load_policy` and `score` inside. The wait for a turn may be long and must not
        count toward a call's deadline. Raises `EngineError`.
        """
        yield

    async def rest(self) -> None:  # noqa: B027 (most engines hold nothing that they could give back)
        """Free the device's memory as far as this can be undone quickly. Called between calls,
        never during one. Has no effect before `start` and after `close`.
        """

    async def wake(self) -> None:  # noqa: B027
        """Undo `rest`. Raises `EngineError` on failure."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything that `start` allocated. Calls in progress fail; closing twice is
        allowed.
        """
