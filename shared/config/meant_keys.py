"""Guesses which setting an unknown key was meant to be. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from shared.suggestion import asked_for, closest

OTHER_NAMES = {
    **dict.fromkeys(("group_size", "num_generations", "rollouts_per_prompt", "samples_per_prompt"), "generator.completions"),
    **dict.fromkeys(("max_tokens", "max_completion_length", "max_response_length"), "generator.max_new_tokens"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "sampler.local and sampler.external"),
    **dict.fromkeys(("kl_coef", "kl_beta", "beta"), "trainer.kl_coefficient"),
    **dict.fromkeys(("steps", "total_steps"), "trainer.max_steps"),
    **dict.fromkeys(("micro_batch_size", "max_tokens_per_micro_batch"), "trainer.token_budget"),
    **dict.fromkeys(("loss", "loss_type", "algorithm", "algo"), "trainer.objective"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "trainer.grad_clip"),
    **dict.fromkeys(("lora_rank", "r"), "trainer.lora.rank"),
    **dict.fromkeys(("prompt", "prompt_column", "question_column"), "tasks.question"),
    **dict.fromkeys(("answer_column", "solution", "ground_truth"), "tasks.answer"),
    "columns": "tasks.question and tasks.answer",
    "gpu_memory_utilization": "generator.gpu_memory_fraction",
    "tensor_parallel_size": "generator.tensor_parallel",
    "lr": "trainer.learning_rate",
    "model_name_or_path": "model.path",
    "eval_every": "eval.every_versions",
}
"""What other trainers call these settings. The names are too different for a spelling suggestion,
but may be misspelt themselves.
"""


def meant_key(location: Sequence[int | str], settings: type[BaseModel]) -> str:
    """A question to ask about the unknown key at `location`; empty if there is no good guess.

    Example: for `("trainer", "learing_rate")` it is `did you mean learning_rate?`; for `("trainer",
    "top_p")`, a key of another section, `did you mean generator.top_p?`; for `("generator",
    "groups_size")`, close to what others say, `did you mean generator.completions?`.
    """
    *path, key = location
    if usual := OTHER_NAMES.get(str(key)):
        return asked_for([usual])
    section = _section(path, settings)
    name = str(key)
    elsewhere = [found for found in _keys(settings) if found.rpartition(".")[2] == name]
    if elsewhere:
        return asked_for(sorted(elsewhere)[:3])
    close = closest(name, [*(section.model_fields if section else ()), *OTHER_NAMES])
    return asked_for(dict.fromkeys(OTHER_NAMES.get(each, each) for each in close))


def _section(path: Sequence[int | str], settings: type[BaseModel]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = settings
    for name in path:
        if isinstance(name, int):
            continue  # an index into a list, whose section was already found by the list's name
        field = section.model_fields.get(name) if section else None
        section = _as_section(field.annotation) if field else None
    return section


def _as_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, directly or in a list."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = _as_section(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        elif name != "tasks":
            yield from _keys(inner, f"{prefix}{name}.")
