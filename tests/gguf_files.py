"""Writes small real GGUF files: random llamas of two layers, with llama.cpp's own package in the
way its converters do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

BOS, END, TURN, TURN_END = "<|begin|>", "<|end|>", "<|turn|>", "<|turn_end|>"
CHAT = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|turn_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
SPACES = "\u0120\u0120"
"""Two spaces as one token. Whether it occurs before a digit shows how a text was split."""
TOKENS = [BOS, END, TURN, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet()), SPACES]
_FIRST, _CONTROL_TOKENS = 0, 4

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def random_llama(*, rows: int = len(TOKENS), tied: bool = True) -> LlamaForCausalLM:
    """A float32 llama whose next-token distribution is far from uniform."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    *,
    quantised: Any = None,
    template: str | None = CHAT,
    end: str = TURN_END,
    begins_with_bos: bool | None = None,
    architecture: str = "llama",
    leave_out: str | None = None,
    add: dict[str, np.ndarray] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write `model`, or a random one.

    quantised: a type number for the matrices. end: the end token declared in the file. leave_out,
    add: tensors by their GGUF name. settings: additional metadata.
    """
    model = model or random_llama()
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, template, end, begins_with_bos)
    for key, value in (settings or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for name, values in {**_tensors(model), **(add or {})}.items():
        if name == leave_out:
            continue
        if quantised is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_type(path: Path, tensor: str, number: int) -> Path:
    """Change the type number of a tensor in a file's header, and nothing else."""
    content = bytearray(path.read_bytes())
    place = content.index(tensor.encode()) + len(tensor)
    dimensions = int.from_bytes(content[place : place + 4], "little")
    place += 4 + 8 * dimensions
    content[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    return path


def _add_tokenizer(writer: Any, template: str | None, end: str, begins_with_bos: bool | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * _CONTROL_TOKENS + [1] * (len(TOKENS) - _CONTROL_TOKENS))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(_FIRST)
    writer.add_eos_token_id(TOKENS.index(end))
    if begins_with_bos is not None:
        writer.add_add_bos_token(begins_with_bos)
    if template is not None:
        writer.add_chat_template(template)


def _tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    state, config = model.state_dict(), model.config
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    layer_names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight" for ours, theirs in layer_names.items()}
    tensors = {ours: state[theirs].numpy() for ours, theirs in names.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return {name: _turned(values, heads.get(name.split(".")[-2])) for name, values in tensors.items()}


def _turned(values: np.ndarray, heads: int | None) -> np.ndarray:
    # llama.cpp rotates neighbouring pairs, transformers the two halves of a head
    # (convert_hf_to_gguf.py, `permute`).
    if heads is None:
        return values
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
