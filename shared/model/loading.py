"""Loads any causal language model and its tokenizer by folder or hub name, with a clear error if
that fails.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from shared.config.sections import ModelSection
from shared.hub_models import UnpinnedModelError, hub_arguments, pin_problem
from shared.model.attention import meant_attention
from shared.model.chat_template import template_problem
from shared.model.prompts import turn_end
from shared.model.rope import rope_problem, steady_rope_length
from shared.runtime.errors import FatalError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNBOUNDED = 2**20
_LOAD_ERRORS = (OSError, ValueError, KeyError, SafetensorError, RuntimeError)


class ModelLoadError(FatalError):
    """A model or tokenizer cannot be loaded, and a restart would not help; the message names the
    cause and the remedy.
    """


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one, else the CPU.

    Raises: ModelLoadError: this machine does not have the device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # A torch built without CUDA raises AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).splitlines()[0]
        raise ModelLoadError(
            f"model.device {name!r} cannot be used ({cause}): set it to auto, cpu or a device of this machine"
        ) from None
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_tokenizer(model: ModelSection) -> Any:
    """The model's tokenizer.

    Raises:
        ModelLoadError: there is none, `model.path` is a hub name without a commit, or the chat
            template has no place for `model.system_prompt`.
    """
    _check_source(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model.path, **hub_arguments(model.path, model.revision))
    except _LOAD_ERRORS as error:
        raise ModelLoadError(_explain(model.path, "tokenizer", error)) from None
    if problem := template_problem(tokenizer, model.system_prompt):
        raise ModelLoadError(f"model.path {model.path!r}: {problem}")
    return tokenizer


def load_causal_lm(model: ModelSection, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model's weights in `dtype` on `device`.

    Raises:
        ModelLoadError: no such folder or hub name, a hub name without a commit, not a causal
            language model, or broken weights.
    """
    _check_source(model)
    try:
        loaded: Any = read_causal_lm(model.path, model.revision, dtype=dtype)
    except UnpinnedModelError as error:
        raise ModelLoadError(str(error)) from None
    except _LOAD_ERRORS as error:
        raise ModelLoadError(_explain(model.path, "model", error)) from None
    model_on_device: PreTrainedModel = loaded.to(device)
    return model_on_device


def read_causal_lm(path: str, revision: str, *, dtype: torch.dtype | str) -> Any:
    """The weights as `transformers` reads them, with its own errors.

    Raises:
        UnpinnedModelError: a hub name without a commit, or a commit that holds an adapter.
            transformers would go on to the model that the adapter names, and look for this commit
            there.
    """
    pinned = hub_arguments(path, revision)
    if "revision" in pinned and find_adapter_config_file(path, revision=revision):
        raise UnpinnedModelError(
            f"model.path {path!r} at {revision[:12]} holds an adapter for another model, which this revision does not pin: "
            "merge the two and give the merged model's folder"
        )
    attention = meant_attention(AutoConfig.from_pretrained(path, **pinned))
    chosen = {} if attention is None else {"attn_implementation": attention}
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **chosen, **pinned)


def model_max_length(model: ModelSection) -> int:
    """Maximum tokens of prompt and completion together: `model.max_length`, but never more than the
    model's config allows.

    Raises:
        ModelLoadError: the config cannot be read, or up to `model.max_length` a text's logprobs
            depend on its length.
    """
    _check_source(model)
    try:
        config = AutoConfig.from_pretrained(model.path, **hub_arguments(model.path, model.revision))
    except _LOAD_ERRORS as error:
        raise ModelLoadError(_explain(model.path, "config", error)) from None
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0) or _UNBOUNDED
    if not model.max_length:
        return min(positions, steady_rope_length(config) or positions)
    length = min(model.max_length, positions)
    if problem := rope_problem(config, length):
        raise ModelLoadError(f"model.max_length {model.max_length}: {problem}")
    return length


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding; every token id must be below this."""
    return int(model.get_input_embeddings().weight.shape[0])


def end_token_id(model: Any, tokenizer: Any) -> int | None:
    """The token that ends an answer: the declared end token that the chat template writes after an
    answer; else the tokenizer's, else the first in the model's config.
    """
    template_end = turn_end(tokenizer, _declared_ends(model, tokenizer))
    if template_end is not None:
        return template_end
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    first = declared[0] if isinstance(declared, list) and declared else declared
    return int(first) if isinstance(first, int) else None


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token at which engines end an answer, the same as
    `services.generator.engines.model_folder` reads; `end_token_id` first.
    """
    first = end_token_id(model, tokenizer)
    return tuple(dict.fromkeys([*([] if first is None else [first]), *_declared_ends(model, tokenizer)]))


def _declared_ends(model: Any, tokenizer: Any) -> list[int]:
    declared = [
        tokenizer.eos_token_id,
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
    ]
    return [int(token) for item in declared for token in (item if isinstance(item, list) else [item]) if token is not None]


def _check_source(model: ModelSection) -> None:
    model_path = model.path
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"model.path {model_path!r} is a folder without config.json: give a Hugging Face model folder, or import a "
                f"model with `swarm model import SOURCE {model_path}`"
            )
        return
    # A hub name is `name` or `owner/name`, which the toy policy's folder, models/base, also
    # matches.
    if folder.exists() or model_path.startswith((".", "/", "~", "models/")) or model_path.count("/") > 1:
        raise ModelLoadError(
            f"model.path {model_path!r} is not a folder: check the spelling, import a model with "
            f"`swarm model import SOURCE {model_path}`, or build the toy policy in models/base with `swarm model init`"
        )
    problem = pin_problem(model_path, model.revision)
    if problem:
        raise ModelLoadError(problem)


def _explain(model_path: str, part: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    where = "folder" if Path(model_path).is_dir() else "hub name"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return (
        f"the {part} of model.path {model_path!r} cannot be loaded from that {where}{offline}: {lines[0][:300]}: check the "
        "spelling, the files and the connection to the hub"
    )


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of a service's log."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
