"""Converts a GGUF file or a Hugging Face folder to the kind of folder that the trainer and every
engine load: safetensors, config, tokenizer.

Headers and sizes are checked before weights are read, and the result is compared with the headers.
Otherwise a parameter missing from the source would silently be filled with random numbers.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.hub_models import hub_arguments
from shared.model.attention import meant_attention
from shared.model.chat_template import ending_token, template_problem
from shared.model.gguf_tokenizer import read_gguf_tokenizer
from shared.model.import_plan import ImportPlan
from shared.model.import_refused import ImportRefused
from shared.model.import_source import ImportSource
from shared.model.loading import DTYPES
from shared.model.quiet_reading import quietly, reading

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
        ImportRefused: weights are missing or damaged, or the tokenizer does not fit the model.
    """
    source = plan.source
    notes: list[str] = []
    with reading(source.origin, "tokenizer"):
        if plan.header is not None:
            tokenizer, notes = read_gguf_tokenizer(plan.header)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source.path, **hub_arguments(str(source.path), ""))
    if problem := template_problem(tokenizer) or _vocabulary_problem(tokenizer, plan.size.vocabulary):
        raise ImportRefused(f"{source.origin}: {problem}")
    if plan.size.context_length:
        tokenizer.model_max_length = min(int(tokenizer.model_max_length), plan.size.context_length)
    with reading(source.origin, "weights"):
        model = _weights(plan)
    _end_answers(source, model, tokenizer)
    return ReadModel(model, tokenizer, notes)


def write_model(plan: ImportPlan, read: ReadModel, folder: Path) -> None:
    """Write the model's files into the empty `folder`, and read the tokenizer back as a check.

    Raises:
        ImportRefused: the tokenizer gives different tokens after it is written.
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
            raise ImportRefused(
                f"{plan.source.origin}: its tokenizer gives different tokens after it is saved ({text!r}): this kind of tokenizer "
                "cannot be imported; give the model's Hugging Face folder"
            )


def _weights(plan: ImportPlan) -> Any:
    source = plan.source
    attention = meant_attention(plan.config)
    chosen = {} if attention is None else {"attn_implementation": attention}
    # For a GGUF file its folder and name; for a folder, the folder.
    place = {"gguf_file": source.path.name} if source.kind == "gguf" else {}
    folder = source.path.parent if source.kind == "gguf" else source.path
    read: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=plan.config,
        dtype=DTYPES[plan.dtype],
        output_loading_info=True,
        **hub_arguments(str(folder), ""),
        **chosen,
        **place,
    )
    model, found = read
    missing = sorted(set(found["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or {}))
    if missing:
        raise ImportRefused(
            f"{source.origin} lacks {len(missing)} weights of its model, such as {missing[0]}, which would be random: give "
            "the complete model"
        )
    _forget_quantiser(model)
    packed = next((name for name, value in model.named_parameters() if not value.is_floating_point()), None)
    if packed is not None:
        raise ImportRefused(
            f"{source.origin}: {packed} stays quantised when it is read and so cannot be trained: give unquantised weights"
        )
    return model.eval()


def _forget_quantiser(model: Any) -> None:
    # The weights are plain numbers by now. While the model is marked as quantised, transformers
    # refuses to save them.
    for holder, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False


def _vocabulary_problem(tokenizer: Any, rows: int) -> str:
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if not beyond:
        return ""
    return (
        f"its tokenizer has {len(beyond)} tokens without weights, such as {beyond[0][1]!r} (number {beyond[0][0]}; the model "
        f"has {rows} rows): take them out of the tokenizer, or resize the model's embeddings (resize_token_embeddings)"
    )


def _end_answers(source: ImportSource, model: Any, tokenizer: Any) -> None:
    # If the template ends a turn with a token that is not declared as an end token, answers would
    # run on until they are cut off.
    declared = getattr(model.generation_config, "eos_token_id", None)
    ends = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
    known = [*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    turn_token = ending_token(tokenizer)
    if turn_token is not None and turn_token not in ends:
        model.generation_config.eos_token_id = [*ends, turn_token]
        # transformers regenerates a generation config that it created itself from the model's
        # configuration.
        model.generation_config._from_model_config = False
    elif not known:
        raise ImportRefused(
            f"{source.origin} has no token that ends an answer (eos_token_id), so answers would never end: set it in "
            "config.json or in the tokenizer"
        )
