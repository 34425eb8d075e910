"""Small random models and ragged groups for the trainer's numerical tests."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from services.trainer.gradient.rows import TokenGroup, TokenRows, build_rows, plan_rows

VOCABULARY = 37


def small_model(
    family: str = "qwen2",
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 32,
    layers: int = 2,
    **options: object,
) -> PreTrainedModel:
    """A random model whose weights are large enough that its logprobs are far from uniform."""
    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_implementation=attention,
        **options,
    )
    # Matrices this small gain nothing from a second thread, and lose seconds to it when the machine
    # is busy.
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return model_class(config).to(dtype)


def ragged_groups(
    count: int = 4,
    *,
    seed: int = 0,
    prompt: tuple[int, int] = (3, 12),
    length: tuple[int, int] = (1, 9),
    completions: tuple[int, int] = (2, 6),
    with_behaviour: bool = True,
) -> list[TokenGroup]:
    """Groups whose prompts, completions and sizes all differ; every third group comes without
    behaviour logprobs.
    """
    generator = torch.Generator().manual_seed(seed)

    def integer(bounds: tuple[int, int]) -> int:
        return int(torch.randint(bounds[0], bounds[1] + 1, (), generator=generator))

    def tokens(size: int) -> list[int]:
        return torch.randint(VOCABULARY, (size,), generator=generator).tolist()

    groups = []
    for index in range(count):
        texts = [tokens(integer(length)) for _ in range(integer(completions))]
        known = with_behaviour and index % 3 != 2
        groups.append(
            TokenGroup(
                prompt_ids=tokens(integer(prompt)),
                completions=texts,
                behaviour_logprobs=[
                    (-3.6 + torch.randn(len(text), generator=generator) * 0.5).tolist() if known else None for text in texts
                ],
                advantages=torch.randn(len(texts), generator=generator).tolist(),
                is_local=index % 2 == 0,
            )
        )
    return groups


def rows_of(groups: list[TokenGroup], *, packed: bool = False) -> TokenRows:
    """All of the groups' texts in one pass."""
    return build_rows(groups, plan_rows(groups, packed=packed, budget_tokens=1 << 20), packed=packed)


def gradients(model: PreTrainedModel) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
