"""Builds the tokenizer that a GGUF file describes, correcting what `transformers` omits or adds.

A GGUF file states how text is split before merges (`tokenizer.ggml.pre`) and whether a text begins
with the BOS token (`tokenizer.ggml.add_bos_token`). If either is ignored, texts become tokens that
the model has rarely seen, without any error. In addition, if a vocabulary has no `<|endoftext|>`,
the class that `transformers` uses adds GPT-2's, a token without weights.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoTokenizer

from shared.hub_models import hub_arguments
from shared.model.gguf_header import GgufHeader

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
