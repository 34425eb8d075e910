"""Settings of the generator. Every field's description states its meaning, its unit and the reason
for its default.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from shared.config.section import BaseUrl, Section
from shared.registry import ENGINES


class GeneratorSection(Section):
    """Sampling of rollout groups."""

    kv_cache_mb: ClassVar[int] = 0
    """vLLM's memory for keys and values; 0: 1024 MiB on a CPU, else what gpu_memory_fraction
    leaves.
    """
    start_timeout_s: ClassVar[int] = 1800
    """Longest start of vLLM, with reading the model and compiling; a startup probe allows more."""
    call_timeout_s: ClassVar[float] = 1800.0
    """Deadline of an engine call: beyond it a process is restarted, a server asked again."""
    policy_load_timeout_s: ClassVar[float] = 120.0
    """Deadline for loading a new policy: beyond it the generator keeps the old one."""
    lease_s: ClassVar[float] = 120.0
    """Silence after which a replica loses its draws to another. It renews its claim three times in
    that.
    """

    engine: str = Field(
        "auto",
        description="vllm, transformers, openai, or a `swarm.engines` entry point. auto: vllm on a GPU if it is installed, else "
        "transformers.",
    )
    engine_options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of an engine from an installed package, by name; see that engine's documentation.",
    )
    openai_url: BaseUrl = Field(
        "", description="Base URL of an OpenAI-compatible server, for engine openai; model.path then only provides the tokenizer."
    )
    openai_key_variable: str = Field(
        "",
        pattern=r"^[A-Za-z_0-9]*$",
        description="Environment variable with the API key for that server, such as OPENAI_API_KEY, sent as a bearer token. None "
        "is read by default, so that no server gets a key meant for another.",
    )
    openai_model: str = Field(
        "", description="The model's name on that server; empty: model.name, or the only model that the server lists."
    )
    completions: int = Field(8, ge=2, le=1024, description="L: completions per group, 8 as in the paper.")
    groups_per_call: int = Field(
        8,
        ge=1,
        le=4096,
        description="Tasks sampled together in one engine call; more is faster, but staler.",
    )
    temperature: float = Field(
        1.0, gt=0, le=10, description="Sampling temperature; the trainer computes logprobs at the same temperature."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling. Below 1, tokens outside the nucleus get no gradient for not being sampled.",
    )
    top_k: int = Field(0, ge=0, description="Sample only from this many likeliest tokens; 0: off.")
    max_new_tokens: int = Field(
        256,
        ge=1,
        le=1_048_576,
        description="Longest completion in tokens, including the end token; models that think for longer need more.",
    )
    groups_per_minute: float = Field(
        0.0,
        ge=0,
        description="Most groups that one generator makes per minute, to leave room for others on its machine or server; 0: as "
        "fast as they are taken.",
    )
    gpu_memory_fraction: float = Field(
        0.5, gt=0, le=1, description="vLLM's share of the GPU's memory; 0.5 leaves the other half to a trainer on the same GPU."
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Number of GPUs that vLLM splits one copy of the model over; above 1 if one GPU cannot hold it."
    )

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, value: str) -> str:
        return ENGINES.check(value, ("auto",))
