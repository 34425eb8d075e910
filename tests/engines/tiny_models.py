"""Tiny random Qwen2 models on disk, with a byte-level tokenizer: all that an engine needs to be
tried for real.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from shared.model.weights import policy_tensors, write_tensors

END_TOKEN_ID = 256
PAD_TOKEN_ID = 257
VOCAB_SIZE = 300
"""More rows than tokens, as real models have: ids 258..299 can be sampled and decode to nothing."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 0..255), then the end and the padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def random_policy(seed: int, *, tied: bool) -> Qwen2ForCausalLM:
    """A float32 Qwen2 of 4 layers of 128 whose next-token distribution is far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model


def write_model_folder(folder: Path, model: Qwen2ForCausalLM) -> Path:
    """Write what `from_pretrained` reads: config, weights, tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_policy_file(path: Path, model: Qwen2ForCausalLM, *, leave_out: str | None = None) -> Path:
    """Write the weights as a trainer publishes them, by its own code; a name left out if asked."""
    tensors = {name: tensor for name, tensor in policy_tensors(model).items() if name != leave_out}
    write_tensors(tensors, path)
    return path
