"""Any causal language model of transformers, made small: hidden size 32, two layers, random weights
far from uniform.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shared.model.configuration import meant_attention
from tests.engines.tiny_models import END_TOKEN_ID

BYTE_VOCABULARY = 260
VOCABULARY = 97
WINDOW = 8
"""Of every kind of local attention, so that texts of forty tokens go past it."""
MOST_PARAMETERS = 8_000_000

ARCHITECTURES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The model types that `AutoModelForCausalLM` knows."""

_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "moe_layer_freq", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff", "dff"), 64),
    **dict.fromkeys(("dim_feedforward", "ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions", "prompt_length"), 128),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "index_head_dim", "time_step_rank", "conv_kernel"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("lru_width",), 32),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {"head_dim": None, "num_key_value_heads": 4}
"""Compressed attention: transformers derives its head size."""
_DECODER = {"is_decoder": True}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "camembert": _DECODER,
    "data2vec-text": _DECODER,
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "electra": _DECODER,
    "ernie": _DECODER,
    "falcon": {"head_dim": None},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "megatron-bert": _DECODER,
    "ministral": {"head_dim": 8},
    "longcat_flash": {"head_dim": 4},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "rembert": _DECODER,
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roformer": _DECODER,
    "vaultgemma": {"attn_logit_softcapping": 0.5},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}


class NotSmall(Exception):
    """The architecture cannot be built small here; the message is the reason for the table."""


def tiny_config(kind: str, **options: Any) -> Any:
    """The configuration of `kind` with small sizes; `options` come last.

    Raises:
        NotSmall: transformers does not take these sizes.
    """
    try:
        config_class = CONFIG_MAPPING[kind]
        default = config_class()
        named = _named(default)
        sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in named and named[name] is not None}
        if "qk_rope_head_dim" in named:
            sizes |= _MLA
        sizes |= _OWN.get(kind, {})
        sizes = {name: size for name, size in sizes.items() if size is not None} | options
        return config_class(**sizes)
    except Exception as error:  # noqa: BLE001 (each architecture fails in its own way)
        raise NotSmall(_first_line(error)) from error


def tiny_model(kind: str, *, attention: str | None = None, **options: Any) -> PreTrainedModel:
    """A float32 model of `kind` in eval mode, the same one every time.

    Raises:
        NotSmall: it cannot be built, or not small (images and sound bring encoders of their own).
    """
    config = tiny_config(kind, **options)
    attention = attention or meant_attention(config)
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, **chosen)
    except Exception as error:  # noqa: BLE001
        raise NotSmall(_first_line(error)) from error
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if parameters > MOST_PARAMETERS:
        raise NotSmall(f"{parameters / 1e6:.0f} million parameters at the smallest: it is more than a language model")
    torch.manual_seed(0)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **chosen).float().eval()
        sharpen(model)
        with torch.no_grad():
            width = model(input_ids=torch.arange(3, 23)[None], use_cache=False).logits.shape
    except Exception as error:  # noqa: BLE001
        raise NotSmall(_first_line(error)) from error
    vocabulary = options.get("vocab_size", VOCABULARY)
    if width != (1, 20, vocabulary):
        raise NotSmall(f"its logits have shape {tuple(width)}, not one row of {vocabulary} a token: no causal text model")
    return model


def byte_model(kind: str, **options: Any) -> PreTrainedModel:
    """A model as `tiny_model` makes it that fits `tests.engines.tiny_models.byte_tokenizer`."""
    named = [name for name in ("vocab_size", "vocab_size_per_layer_input") if hasattr(tiny_config(kind), name)]
    return tiny_model(kind, **dict.fromkeys(named, BYTE_VOCABULARY), eos_token_id=END_TOKEN_ID, **options)


def sharpen(model: PreTrainedModel) -> None:
    """Random matrices large enough that an error in attention shows in the logprobs, and biases
    that padding shows through.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2, generator=generator)


def _named(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _SIZES if _settable(config, name)}


def _settable(config: Any, name: str) -> bool:
    try:
        getattr(config, name)
    except Exception:  # noqa: BLE001 (per-layer attributes refuse to be read at once)
        return False
    known = getattr(type(config), name, None)
    return not (isinstance(known, property) and known.fset is None)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[1] if len(lines) > 1 and lines[0].startswith("Class validation") else (lines[0] if lines else "")
    return f"{type(error).__name__}: {said[:160]}"
