"""A hash that tells whether two nodes' token ids stand for the same text, over everything that
determines it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) over vocabulary, added tokens, the model behind them (merges), chat template
    and end token.

    The place that a tokenizer was loaded from, its padding and its truncation are not included.
    Nodes with equal hashes may use each other's token ids and behaviour logprobs.
    """
    identity = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "added": sorted((int(index), _added_token(token)) for index, token in tokenizer.added_tokens_decoder.items()),
        "model": _model_json(tokenizer),
        "chat_template": tokenizer.chat_template or "",
        "eos_token_id": tokenizer.eos_token_id,
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _added_token(token: Any) -> list[object]:
    flags = (token.special, token.lstrip, token.rstrip, token.normalized, token.single_word)
    return [str(token), *map(bool, flags)]


def _model_json(tokenizer: Any) -> object:
    """The model in a fast tokenizer's JSON; a slow tokenizer has no such JSON and is identified by
    its class.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__
    model = json.loads(backend.to_str())["model"]
    # Loaders write "no prefix" as null or as an empty string; the vocabulary is hashed separately.
    return {key: value for key, value in model.items() if key != "vocab" and value not in (None, "")}
