"""Reads a model's tokenizer and the length of its context by folder or hub name, with a clear error
if that fails.

Nothing here needs torch, so that a command that only checks a configuration answers sooner.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer

from shared.config.sections import ModelSection
from shared.hub_models import hub_arguments, may_only_be_folder, pin_problem
from shared.model.chat_template import template_problem
from shared.model.rope import rope_problem, steady_rope_length
from shared.runtime.errors import FatalError

LOAD_ERRORS = (OSError, ValueError, KeyError, SafetensorError, RuntimeError)
"""What transformers raises for a model that cannot be loaded."""

_UNBOUNDED = 2**20


class ModelLoadError(FatalError):
    """A model or tokenizer cannot be loaded, and a restart would not help; the message names the
    cause and the remedy.
    """


def load_tokenizer(model: ModelSection) -> Any:
    """The model's tokenizer.

    Raises:
        ModelLoadError: there is none, `model.path` is a hub name without a commit, or the chat
            template has no place for `model.system_prompt`.
    """
    check_source(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model.path, **hub_arguments(model.path, model.revision))
    except LOAD_ERRORS as error:
        raise ModelLoadError(load_problem(model.path, "tokenizer", error)) from None
    if problem := template_problem(tokenizer, model.system_prompt):
        raise ModelLoadError(f"model.path {model.path!r}: {problem}")
    return tokenizer


def model_max_length(model: ModelSection) -> int:
    """Maximum tokens of prompt and completion together: `model.max_length`, but never more than the
    model's config allows.

    Raises:
        ModelLoadError: the config cannot be read, or up to `model.max_length` a text's logprobs
            depend on its length.
    """
    check_source(model)
    try:
        config = AutoConfig.from_pretrained(model.path, **hub_arguments(model.path, model.revision))
    except LOAD_ERRORS as error:
        raise ModelLoadError(load_problem(model.path, "config", error)) from None
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0) or _UNBOUNDED
    if not model.max_length:
        return min(positions, steady_rope_length(config) or positions)
    length = min(model.max_length, positions)
    if problem := rope_problem(config, length):
        raise ModelLoadError(f"model.max_length {model.max_length}: {problem}")
    return length


def check_source(model: ModelSection) -> None:
    """Check that `model.path` is a model's folder or a hub name with its commit.

    Raises:
        ModelLoadError: it is neither, or a folder with an adapter.
    """
    model_path = model.path
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"model.path {model_path!r} is a folder without config.json: give a Hugging Face model folder, or import a "
                f"model with `swarm model import SOURCE {model_path}`"
            )
        # transformers would load it too, and match its author's regular expressions against names.
        if os.path.lexists(folder / "adapter_config.json"):
            raise ModelLoadError(
                f"model.path {model_path!r} holds an adapter for another model: merge the two and give the merged model's folder"
            )
        return
    if folder.exists() or may_only_be_folder(model_path):
        raise ModelLoadError(
            f"model.path {model_path!r} is not a folder: check the spelling, import a model with "
            f"`swarm model import SOURCE {model_path}`, or build the toy policy in models/base with `swarm model init`"
        )
    problem = pin_problem(model_path, model.revision)
    if problem:
        raise ModelLoadError(problem)


def load_problem(model_path: str, part: str, error: Exception) -> str:
    """Names cause and remedy for a `part` of a model that transformers cannot load."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    where = "folder" if Path(model_path).is_dir() else "hub name"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return (
        f"the {part} of model.path {model_path!r} cannot be loaded from that {where}{offline}: {lines[0][:300]}: check the "
        "spelling, the files and the connection to the hub"
    )
