"""Reads what engines need of a model (end tokens, context length, tensor shapes, tokenizer), and
checks that a policy file, of full weights or of adapters, fits it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from transformers.pytorch_utils import Conv1D

from services.generator.engines.base import EngineError, PolicyLoadError
from shared.config.model_section import ModelSection
from shared.model.configuration import ModelLoadError
from shared.model.loading import NO_NUMBERS, check_stored_numbers, load_causal_lm
from shared.model.prompts import answer_text
from shared.model.reading import end_tokens, load_tokenizer, model_max_length
from shared.model.weights import Adapters, WeightsError, adapted_module, base_fingerprint, modules_of, read_adapters
from shared.seeds import number_from

_REMEDY = "publish the policy from the model that this generator was started with"
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
    """The base policy, as `load_causal_lm` loads it for the trainer; with `NO_NUMBERS` the numbers
    in its files are checked, too. Raises EngineError.
    """
    try:
        section = _section_of(model_path, revision)
        model = load_causal_lm(section, dtype=dtype, device=device)
        if device == NO_NUMBERS:
            check_stored_numbers(section, model)
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
    if missing:
        raise PolicyLoadError(f"policy file {weights_file}: lacks {len(missing)} tensors, first {missing[0]}: {_REMEDY}")
    if foreign:
        raise PolicyLoadError(f"policy file {weights_file}: holds {len(foreign)} unknown tensors, first {foreign[0]}: {_REMEDY}")
    if reshaped:
        name = reshaped[0]
        raise PolicyLoadError(
            f"policy file {weights_file}: {name} has shape {shapes[name]}, the model's is {model.tensor_shapes[name]}: {_REMEDY}"
        )
    if apart:
        raise PolicyLoadError(
            f"policy file {weights_file}: {' and '.join(apart[0])} differ, and are one tensor in this model: {_REMEDY}"
        )
    if untyped:
        raise PolicyLoadError(f"policy file {weights_file}: {untyped[0]} is {dtypes[untyped[0]]}, not a float: {_REMEDY}")


def adapters_in(weights_file: Path, model: ModelFolder, model_path: str, revision: str) -> tuple[Adapters, list[str]] | None:
    """Which adapters a policy file contains, and the modules that they adapt; None: the file
    contains full weights.

    Raises:
        PolicyLoadError: it is unreadable, or its adapters are not for this model.
    """
    try:
        adapters = read_adapters(weights_file)
        if adapters is None:
            return None
        shapes = _factor_shapes(weights_file)
        modules = modules_of(shapes)
        base = base_fingerprint(model_path, revision)
    except WeightsError as error:
        raise PolicyLoadError(str(error)) from None
    if adapters.base != base:
        raise PolicyLoadError(
            f"policy file {weights_file}: its adapters were trained on a base model with other weights than {model_path}: use the "
            "same model.path files for trainer and generator"
        )
    _check_shapes(weights_file, shapes, adapters, model)
    return adapters, modules


def _factor_shapes(weights_file: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(str(weights_file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                part = tensors.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in WEIGHT_DTYPES:
                    raise PolicyLoadError(f"policy file {weights_file}: {name} is {part.get_dtype()}, not a float: {_REMEDY}")
                if not bool(tensors.get_tensor(name).isfinite().all()):
                    raise PolicyLoadError(f"policy file {weights_file}: {name} holds NaN or infinity: {_REMEDY}")
    except (OSError, SafetensorError) as error:
        raise PolicyLoadError(f"policy file {weights_file}: unreadable or truncated ({error}): fetch it again") from error
    return shapes


def _check_shapes(weights_file: Path, shapes: Mapping[str, tuple[int, ...]], adapters: Adapters, model: ModelFolder) -> None:
    """Check that every adapted module has both factors, and that their product has the shape of its
    weight.
    """
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, below = adapted_module(name)
        factors.setdefault(module, {})[below.split(".")[0].removeprefix("lora_").removeprefix("embedding_")] = shape
    for module, pair in factors.items():
        weight = model.tensor_shapes.get(f"{module}.weight")
        if weight is None:
            raise PolicyLoadError(f"policy file {weights_file}: adapts {module}, which this model does not have: {_REMEDY}")
        first, second = pair.get("A", ()), pair.get("B", ())
        fits = len(first) == len(second) == len(weight) == 2 and first[0] == second[1] == adapters.rank
        wanted = weight[::-1] if f"{module}.weight" in model.transposed_names else weight
        if not fits or (second[0], first[1]) != wanted:
            raise PolicyLoadError(
                f"policy file {weights_file}: the factors of {module} have shapes {first} and {second}, its weight is {weight} "
                f"and the rank {adapters.rank}: {_REMEDY}"
            )


def warn_of_dtype(adapters: Adapters, dtype: object) -> None:
    """Warn if the engine's base has another dtype than the trainer's, because rounding then makes
    it a different base.
    """
    mine = str(dtype).removeprefix("torch.")
    if mine != adapters.dtype:
        structlog.get_logger("generator").warning(
            "adapters_beside_another_dtype",
            trainer=adapters.dtype,
            generator=mine,
            consequence="samples come from a slightly different policy than the one being trained",
            remedy="use the same model.dtype for trainer and generator",
        )


def derived_seed(seed: int, index: int) -> int:
    """A 56-bit seed for prompt `index` of a call. vLLM adds the sample's number to it, so
    neighbouring seeds must be far apart.
    """
    return number_from(f"{seed}/{index}", 7)
