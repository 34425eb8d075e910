"""Loads the weights of any causal language model by folder or hub name, and its special tokens;
`shared.model.reading` reads its tokenizer and configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from shared.config.dtypes import Dtype
from shared.config.sections import ModelSection
from shared.hub_models import UnpinnedModelError, hub_arguments
from shared.model.attention import meant_attention
from shared.model.prompts import turn_end
from shared.model.reading import LOAD_ERRORS, ModelLoadError, check_source, load_problem

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}


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


def dtype_name(name: str, *, on_gpu: bool) -> str:
    """`auto` is bfloat16 on a GPU and float32 elsewhere; others are themselves."""
    if name == "auto":
        return "bfloat16" if on_gpu else "float32"
    return name


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `dtype_name` names for `device`."""
    return DTYPES[dtype_name(name, on_gpu=device.type == "cuda")]


def load_causal_lm(model: ModelSection, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model's weights in `dtype` on `device`.

    Raises:
        ModelLoadError: no such folder or hub name, a hub name without a commit, not a causal
            language model, or broken weights.
    """
    check_source(model)
    try:
        loaded: Any = read_causal_lm(model.path, model.revision, dtype=dtype)
    except UnpinnedModelError as error:
        raise ModelLoadError(str(error)) from None
    except LOAD_ERRORS as error:
        raise ModelLoadError(load_problem(model.path, "model", error)) from None
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
