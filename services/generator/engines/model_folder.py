"""Reads what engines need from a model's folder or hub name besides its weights: end tokens,
context length, tensor shapes, tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.pytorch_utils import Conv1D

from services.generator.engines.base import EngineError, PolicyLoadError
from shared.config.sections import ModelSection
from shared.model.loading import LOOKED_AT, load_causal_lm, outer_matrices
from shared.model.prompts import answer_text
from shared.model.quiet_reading import ModelLoadError
from shared.model.reading import end_tokens, load_tokenizer, model_max_length
from shared.model.weight_files import check_values, local_weights
from shared.seeds import number_from

WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ModelFolder:
    """Properties of a model.

    `tensor_shapes` are those that a policy file must contain, all floats. `ties` are tensors that
    are another one in the model, by that one's name: they may be in the file if they are the same
    there. `transposed_names` are weights stored with the inputs first, as in GPT-2's layers and in
    embeddings.
    """

    tokenizer: Any
    end_token_ids: tuple[int, ...]
    pad_token_id: int
    context_length: int
    tensor_shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    transposed_names: frozenset[str]

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens, keeping spaces unchanged."""
        return answer_text(self.tokenizer, token_ids)

    def new_token_limits(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
        """For each prompt, how many tokens may follow before the context is full."""
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.context_length:
                raise EngineError(
                    f"prompt {index} has {len(prompt)} tokens, the context holds {self.context_length} with at least one of each: "
                    "raise max_model_len or omit the task"
                )
        return [min(max_new_tokens, self.context_length - len(prompt)) for prompt in prompts]


def read_model_folder(model_path: str, *, max_model_len: int, revision: str = "", model: Any = None) -> ModelFolder:
    """Read everything but the weights; for a hub name, at the commit `revision`.

    model: the model as `shared.model.loading` loads it for the trainer, from which the tensors of
    a policy file follow; None: the engine loads no policies.

    Raises:
        EngineError: something cannot be read or used; the message says why.
    """
    try:
        section = _section_of(model_path, revision)
        tokenizer = load_tokenizer(section)
        context_length = model_max_length(section.model_copy(update={"max_length": max_model_len}))
        end_token_ids = end_tokens(section, tokenizer)
    except (ModelLoadError, ValueError) as error:
        raise EngineError(str(error)) from error
    ties: dict[str, str] = {} if model is None else model.all_tied_weights_keys or {}
    state = {} if model is None else model.state_dict()
    modules = [] if model is None else model.named_modules()
    return ModelFolder(
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        pad_token_id=end_token_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id),
        context_length=context_length,
        tensor_shapes={name: tuple(part.shape) for name, part in state.items() if name not in ties and part.is_floating_point()},
        ties=dict(ties),
        transposed_names=frozenset(f"{name}.weight" for name, part in modules if isinstance(part, (Conv1D, torch.nn.Embedding))),
    )


def load_base(model_path: str, revision: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The base policy, as `load_causal_lm` loads it for the trainer; with `LOOKED_AT` the numbers
    in its files are checked, too. Raises EngineError.
    """
    try:
        model = load_causal_lm(_section_of(model_path, revision), dtype=dtype, device=device)
        if device == LOOKED_AT:
            check_values(local_weights(model_path, revision), model.all_tied_weights_keys or {}, outer_matrices(model))
        return model
    except (ModelLoadError, ValueError) as error:
        raise EngineError(str(error)) from error


def _section_of(model_path: str, revision: str) -> ModelSection:
    """The model's section, for an engine that has only its path."""
    return ModelSection(path=model_path, revision=revision, name="base")


def check_policy_file(weights_file: Path, model: ModelFolder) -> None:
    """Raise `PolicyLoadError` unless the file is complete and contains exactly the model's tensors
    in their shapes.
    """
    try:
        with safe_open(str(weights_file), framework="pt") as tensors:
            found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
            shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
            dtypes = {name: part.get_dtype() for name, part in found.items()}
            both = [pair for pair in model.ties.items() if found.keys() >= set(pair)]
            apart = [pair for pair in both if not torch.equal(*map(tensors.get_tensor, pair))]
    except (OSError, SafetensorError) as error:
        raise PolicyLoadError(f"policy file {weights_file}: unreadable or truncated ({error}): fetch it again") from error
    missing = sorted(model.tensor_shapes.keys() - shapes.keys())
    foreign = sorted(shapes.keys() - model.tensor_shapes.keys() - model.ties.keys())
    reshaped = sorted(name for name, shape in model.tensor_shapes.items() if shapes.get(name, shape) != shape)
    untyped = sorted(name for name, dtype in dtypes.items() if dtype not in WEIGHT_DTYPES)
    remedy = "publish the policy from the model that this generator was started with"
    if missing:
        raise PolicyLoadError(f"policy file {weights_file}: lacks {len(missing)} tensors, first {missing[0]}: {remedy}")
    if foreign:
        raise PolicyLoadError(f"policy file {weights_file}: holds {len(foreign)} unknown tensors, first {foreign[0]}: {remedy}")
    if reshaped:
        name = reshaped[0]
        raise PolicyLoadError(
            f"policy file {weights_file}: {name} has shape {shapes[name]}, the model's is {model.tensor_shapes[name]}: {remedy}"
        )
    if apart:
        raise PolicyLoadError(
            f"policy file {weights_file}: {' and '.join(apart[0])} differ, and are one tensor in this model: {remedy}"
        )
    if untyped:
        raise PolicyLoadError(f"policy file {weights_file}: {untyped[0]} is {dtypes[untyped[0]]}, not a float: {remedy}")


def derived_seed(seed: int, index: int) -> int:
    """A 56-bit seed for prompt `index` of a call. vLLM adds the sample's number to it, so
    neighbouring seeds must be far apart.
    """
    return number_from(f"{seed}/{index}", 7)
