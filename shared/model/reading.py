"""Reads what services need to know of a model besides its weights: tokenizer, end tokens and the
length of its context. Each is read here for all of them, and refused with cause and remedy.

Nothing here needs torch, so that a command that only checks a configuration answers sooner.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from shared.config.model_section import ModelSection
from shared.hub_models import hub_arguments, may_only_be_folder, pin_problem
from shared.model.chat_template import ending_token, template_problem
from shared.model.configuration import ModelLoadError, read_configuration, reading, rope_problem, steady_rope_length
from shared.model.prompts import answer_text

_UNBOUNDED = 2**20
_TRIAL = "The quick brown fox jumps over a lazy dog: 12 + 34 = 46?\n(7 - 5) * 8 / 2 < 9 > [1]\nGive 567089, or NONE."
_SIGNS = "+-*/=<>()[]"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(model: ModelSection) -> Any:
    """The model's tokenizer.

    Raises:
        ModelLoadError: there is none, it does not fit the model, `model.path` is a hub name without
            a commit, or the chat template cannot write prompts.
    """
    origin = check_source(model)
    config = _configuration(model, origin)
    tokenizer = read_tokenizer(model, origin)
    check_tokenizer(tokenizer, config, origin, model.system_prompt)
    return tokenizer


def read_tokenizer(model: ModelSection, origin: str) -> Any:
    """The tokenizer, of which nothing is known yet. Raises ModelLoadError: there is none."""
    folder = Path(model.path)
    # Without any of these transformers creates an empty tokenizer of the model's kind.
    if folder.is_dir() and not any(found for pattern in _TOKENIZER_FILES for found in folder.glob(pattern)):
        raise ModelLoadError(f"{origin} holds no tokenizer (such as tokenizer.json): copy the whole folder")
    with reading(origin, "tokenizer"):
        return AutoTokenizer.from_pretrained(model.path, **hub_arguments(model.path, model.revision))


def check_tokenizer(tokenizer: Any, config: Any, origin: str, system_prompt: str = "") -> None:
    """Check that a tokenizer can write prompts for the model that `config` describes.

    Raises:
        ModelLoadError: it writes nothing or not what it is given, has tokens without weights, or
            its chat template has a problem.
    """
    with reading(origin, "tokenizer"):
        vocabulary, written = tokenizer.get_vocab(), tokenizer("1 + 1", add_special_tokens=False)["input_ids"]
    if not written:
        raise ModelLoadError(f"{origin}: its tokenizer writes no token for '1 + 1': copy the model's own tokenizer into the folder")
    _check_carries_text(tokenizer, origin)
    rows = int(getattr(config.get_text_config(), "vocab_size", 0) or 0)
    if rows and max(vocabulary.values()) >= rows:
        beyond = sorted((number, token) for token, number in vocabulary.items() if number >= rows)
        raise ModelLoadError(
            f"{origin}: its tokenizer has {len(beyond)} tokens without weights, such as {beyond[0][1]!r} (number {beyond[0][0]}; "
            f"the model has {rows} rows): take them out of the tokenizer, or resize the model's embeddings "
            "(resize_token_embeddings)"
        )
    declared = [getattr(each, "eos_token_id", None) for each in (config, config.get_text_config())]
    ends = [token for each in declared for token in (each if isinstance(each, list) else [each]) if isinstance(token, int)]
    if problem := template_problem(tokenizer, system_prompt, ends):
        raise ModelLoadError(f"{origin}: {problem}")


def _check_carries_text(tokenizer: Any, origin: str) -> None:
    """Refuse a tokenizer that gives back other letters, digits, operators or brackets than it was
    given, or other tokens each time. Case, white space and other punctuation may be lost, as with
    some real models.
    """
    with reading(origin, "tokenizer"):
        written, *again = ([int(each) for each in tokenizer(_TRIAL, add_special_tokens=False)["input_ids"]] for _ in range(4))
        said = answer_text(tokenizer, written)
    if any(each != written for each in again):
        raise ModelLoadError(
            f"{origin}: its tokenizer writes the same text with other tokens each time, so that nodes would not understand each "
            "other: set dropout to null in tokenizer.json, or switch off its sampling"
        )
    meant, got = ("".join(sign for sign in text if sign.isalnum() or sign in _SIGNS).casefold() for text in (_TRIAL, said))
    if meant != got:
        raise ModelLoadError(
            f"{origin}: its tokenizer changes text: of {_TRIAL!r} it makes {said[:120]!r}, so that questions and answers would "
            "lose letters, digits or operators: copy the model's own tokenizer, with its normalizer and decoder (tokenizer.json), "
            "into the folder"
        )


def end_tokens(model: ModelSection, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer, for trainer and engines alike: those that generation
    configuration, configuration and tokenizer declare.

    The first is the one that is written after an answer that ended: the one with which the chat
    template ends a turn, else the tokenizer's, else the first that the configuration declares.

    Raises:
        ModelLoadError: nothing declares one, or one is plain text or has no weights.
    """
    origin = check_source(model)
    config = _configuration(model, origin)
    sources = {
        "the tokenizer": tokenizer.eos_token_id,
        "generation_config.json": _generation_config(model, origin).get("eos_token_id"),
        "config.json": getattr(config, "eos_token_id", None),
        "the text part of config.json": getattr(config.get_text_config(), "eos_token_id", None),
    }
    ends: list[int] = []
    rows = int(getattr(config.get_text_config(), "vocab_size", 0) or 0)
    for source, declared in sources.items():
        for token in declared if isinstance(declared, list) else [declared]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0 or (rows and token >= rows):
                raise ModelLoadError(
                    f"{origin}: {source} declares the end token {token!r}, which the model does not have: correct it"
                )
            if token not in tokenizer.added_tokens_decoder and token not in tokenizer.all_special_ids and tokenizer.decode([token]):
                raise ModelLoadError(
                    f"{origin}: {source} declares that token {token} ends an answer (eos_token_id), which is the plain text "
                    f"{tokenizer.decode([token])!r} for the tokenizer: answers would end in the middle; set it to the tokenizer's "
                    f"end token ({tokenizer.eos_token_id})"
                )
            ends.append(token)
    if not ends:
        raise ModelLoadError(
            f"{origin} has no token that ends an answer (eos_token_id), so answers would never end: set it in config.json or in "
            "the tokenizer"
        )
    first = ending_token(tokenizer, ends)
    return tuple(dict.fromkeys(ends if first is None else [first, *ends]))


def declared_ends(model: ModelSection) -> list[int]:
    """The end tokens in generation_config.json, the only ones that other programs may read; empty
    if it declares none. Raises ModelLoadError.
    """
    declared = _generation_config(model, check_source(model)).get("eos_token_id")
    return [token for token in (declared if isinstance(declared, list) else [declared]) if isinstance(token, int)]


def model_max_length(model: ModelSection) -> int:
    """Maximum tokens of prompt and completion together: `model.max_length`, but never more than the
    model's config allows.

    Raises:
        ModelLoadError: the config cannot be read, or up to `model.max_length` a text's logprobs
            depend on its length.
    """
    config = _configuration(model, check_source(model))
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0) or _UNBOUNDED
    if not model.max_length:
        return min(positions, steady_rope_length(config) or positions)
    length = min(model.max_length, positions)
    if problem := rope_problem(config, length):
        raise ModelLoadError(f"model.max_length {model.max_length}: {problem}")
    return length


def check_source(model: ModelSection) -> str:
    """Check that `model.path` is a model's folder or a hub name with its commit. Returns how
    messages name it.

    Raises:
        ModelLoadError: it is neither, or a folder with an adapter.
    """
    model_path = model.path
    folder = Path(model_path)
    origin = f"model.path {model_path!r}"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"{origin} is a folder without config.json: give a Hugging Face model folder, or import a "
                f"model with `swarm model import SOURCE {model_path}`"
            )
        # transformers would load it too, and match its author's regular expressions against names.
        if os.path.lexists(folder / "adapter_config.json"):
            raise ModelLoadError(f"{origin} holds an adapter for another model: merge the two and give the merged model's folder")
        return origin
    if folder.exists() or may_only_be_folder(model_path):
        raise ModelLoadError(
            f"{origin} is not a folder: check the spelling, import a model with "
            f"`swarm model import SOURCE {model_path}`, or build the toy policy in models/base with `swarm model init`"
        )
    problem = pin_problem(model_path, model.revision)
    if problem:
        raise ModelLoadError(problem)
    return origin


def _configuration(model: ModelSection, origin: str) -> Any:
    with reading(origin, "configuration"):
        return read_configuration(model.path, model.revision)


def _generation_config(model: ModelSection, origin: str) -> Mapping[str, Any]:
    pinned = {"revision": model.revision} if model.revision else {}
    with reading(origin, "generation configuration"):
        # Not every model has one, and without a connection one cannot tell.
        absent = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
        file = cached_file(model.path, "generation_config.json", **absent, **pinned)
        found = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("generation_config.json holds no JSON object")
        return found
