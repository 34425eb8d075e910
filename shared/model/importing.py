"""Converts a GGUF file or a Hugging Face folder to the kind of folder that the trainer and every
engine load: safetensors, config, tokenizer.

Headers and sizes are checked before weights are read; tokenizer and weights go through the same
checks as those of `model.path`.
"""

from __future__ import annotations

import errno
import functools
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoTokenizer

from shared.config.sections import ModelSection
from shared.hub_models import hub_arguments
from shared.model.chat_template import ending_token, with_fixed_date
from shared.model.gguf_header import GgufHeader
from shared.model.import_plan import ImportPlan
from shared.model.import_source import ImportSource
from shared.model.loading import DTYPES, load_causal_lm
from shared.model.quiet_reading import ModelLoadError, quietly, reading
from shared.model.reading import check_tokenizer, read_tokenizer

_PROBES = ("12 + 345 = 357", "  two  spaces\n\n 7", "Caf\u00e9 \u2013 na\u00efve \U0001f642", "<answer>x</answer>")


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model in memory, ready to be written. notes: remarks for the user, in sentences."""

    model: Any
    tokenizer: Any
    notes: list[str] = field(default_factory=list)


def read_model(plan: ImportPlan) -> ReadModel:
    """Read weights and tokenizer, and refuse a model that could not be used.

    Raises:
        ModelLoadError: weights are missing or damaged, or the tokenizer does not fit the model.
    """
    source = plan.source
    notes: list[str] = []
    section = _section(source)
    if plan.header is None:
        tokenizer = read_tokenizer(section, source.origin)
    else:
        with reading(source.origin, "tokenizer"):
            tokenizer, notes = read_gguf_tokenizer(plan.header)
    _fix_date(tokenizer, notes)
    check_tokenizer(tokenizer, plan.config, source.origin)
    if plan.size.context_length:
        tokenizer.model_max_length = min(int(tokenizer.model_max_length), plan.size.context_length)
    gguf = None if plan.header is None else (source.path.name, plan.config)
    with redirect_stderr(io.StringIO()):  # for a bar that transformers draws of a GGUF file in any case
        model = load_causal_lm(section, dtype=DTYPES[plan.dtype], device=torch.device("cpu"), origin=source.origin, gguf=gguf)
    _forget_quantiser(model)
    _end_answers(model, tokenizer)
    return ReadModel(model, tokenizer, notes)


def write_model(plan: ImportPlan, read: ReadModel, folder: Path) -> None:
    """Write the model's files into the empty `folder`, and read the tokenizer back as a check.

    Raises:
        ModelLoadError: the tokenizer gives different tokens after it is written.
        OSError: the disk is full or cannot be written.
    """
    with quietly():
        try:
            read.model.save_pretrained(folder)
        except SafetensorError as error:
            # The library keeps only the text of the system's error, not its number.
            raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from None
        read.tokenizer.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder, **hub_arguments(str(folder), ""))
    for text in _PROBES:
        if again(text)["input_ids"] != read.tokenizer(text)["input_ids"]:
            raise ModelLoadError(
                f"{plan.source.origin}: its tokenizer gives different tokens after it is saved ({text!r}): this kind of tokenizer "
                "cannot be imported; give the model's Hugging Face folder"
            )


def _section(source: ImportSource) -> ModelSection:
    """The folder that is read, or that holds the GGUF file."""
    return ModelSection(path=str(source.path if source.kind == "folder" else source.path.parent), name="imported")


def _fix_date(tokenizer: Any, notes: list[str]) -> None:
    """Write a constant where the chat template would write today's date."""
    template = tokenizer.chat_template
    if isinstance(template, str) and (fixed := with_fixed_date(template)) != template:
        tokenizer.chat_template = fixed
        notes.append("the chat template writes today's date into each prompt: a fixed date is written in its place")


def _forget_quantiser(model: Any) -> None:
    # The weights are plain numbers by now. While the model is marked as quantised, transformers
    # refuses to save them.
    for holder, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False


def _end_answers(model: Any, tokenizer: Any) -> None:
    # If the template ends a turn with a token that is not declared as an end token, answers would
    # run on until they are cut off.
    declared = getattr(model.generation_config, "eos_token_id", None)
    ends = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
    turn_token = ending_token(tokenizer)
    if turn_token is not None and turn_token not in ends:
        model.generation_config.eos_token_id = [*ends, turn_token]
        # transformers regenerates a generation config that it created itself from the model's
        # configuration.
        model.generation_config._from_model_config = False


# llama.cpp (llama-vocab.cpp): each digit by itself, then GPT-2's split.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_SPLIT = {"", "default", "gpt-2"}
_BEGINS_WITH_BOS = {"llama3", "llama-v3", "llama-bpe"}


def read_gguf_tokenizer(header: GgufHeader) -> tuple[Any, list[str]]:
    """The tokenizer, and notes on it in sentences.

    Raises:
        OSError, ValueError, KeyError: `transformers` cannot build a tokenizer from the file's data.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(
        header.path.parent, gguf_file=header.path.name, **hub_arguments(str(header.path.parent), "")
    )
    _drop_foreign_tokens(tokenizer, header.metadata.get("tokenizer.ggml.tokens"))
    split = str(header.metadata.get("tokenizer.ggml.pre", ""))
    notes = []
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        if split in _DIGITS_APART:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif split not in _GPT2_SPLIT | _known_splits():
            notes.append(f"the file splits text as {split[:40]!r}, which is not known here: it is split as GPT-2 does instead")
    if _begins_with_bos(header, split) and tokenizer.bos_token is not None:
        _begin_with_bos(tokenizer)
    return tokenizer, notes


def _drop_foreign_tokens(tokenizer: Any, listed: object) -> None:
    if not isinstance(listed, int):
        return
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    foreign = {token["content"] for token in description["added_tokens"] if token["id"] >= listed}
    if not foreign:
        return
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < listed]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))
    for name, token in tokenizer.special_tokens_map.items():
        if token in foreign:
            setattr(tokenizer, name, None)


def _begins_with_bos(header: GgufHeader, split: str) -> bool:
    # llama.cpp's defaults if the file does not state them.
    stated = header.metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return header.metadata.get("tokenizer.ggml.model") == "llama" or split in _BEGINS_WITH_BOS


def _begin_with_bos(tokenizer: Any) -> None:
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def _known_splits() -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # older than 5.19
        return set()
    return set(GGUF_PRE_TOKENIZER_SPLITS)


_MADE_ONCE = ("GGUFReader", "get_tensor_name_map")
"""What `transformers` takes from the package `gguf` at each call."""


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """In the block, a file's reader and an architecture's table of names are made once. Without the
    package `gguf`, nothing is changed.
    """
    try:
        import gguf
    except ImportError:
        yield
        return
    before: dict[str, Any] = {name: getattr(gguf, name) for name in _MADE_ONCE}
    for name, made in before.items():
        setattr(gguf, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)
