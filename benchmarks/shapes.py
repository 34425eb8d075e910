"""Shapes of models that several benchmarks use, as arguments of transformers' configurations."""

from __future__ import annotations

from typing import Any

SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""Arguments of `LlamaConfig`, from the `config.json` of HuggingFaceTB/SmolLM2-135M-Instruct."""
