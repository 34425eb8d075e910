"""Logits in chunks: the same logprobs, entropies and gradients as all at once, in the memory of one
chunk.

Written down before it was measured: gradients differ by 1e-6 of the largest in float32 and 1e-12 in
float64; memory beyond hidden states and the gradients themselves is at most 1.3 chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import services.trainer.gradient.forward as forward
from benchmarks.memory import peak_bytes
from services.trainer.gradient.forward import LogitTransform, SeparateHead, chunked_logprobs, completion_logprobs
from services.trainer.gradient.rows import TokenRows, build_rows, plan_rows
from services.trainer.gradient.update import UpdateConfig, accumulate_gradients
from services.trainer.policy_model import NotSeparate, probed, separate_head
from tests.unit.trainer_models import VOCABULARY, ragged_groups, small_model

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2, tied": lambda: small_model("qwen2", tie_word_embeddings=True),
    "llama": lambda: small_model("llama", tie_word_embeddings=False),
    "gemma2, soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "cohere2, scaled": lambda: Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.25)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "phi, head with bias": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "gpt2, tied": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
}
CHUNK_BYTES = 7 * VOCABULARY * 4


def model_named(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype)
    model.eval()  # GPT-2 and Phi drop out in training.
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model


def rows_of(count: int = 5) -> TokenRows:
    groups = ragged_groups(count)
    return build_rows(groups, plan_rows(groups, packed=False, budget_tokens=1 << 20), packed=False)


def scored_with_gradients(model: nn.Module, head: SeparateHead | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad()
    rows = rows_of()
    scored = completion_logprobs(model, rows, temperature=0.7, separate_head=head)
    pull = torch.randn(scored.logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (scored.logprobs * pull.to(scored.logprobs.dtype)).sum().backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return scored.logprobs.detach(), scored.entropy, found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_logprobs_entropies_and_gradients_of_all_logits_at_once(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = model_named(name, dtype)
    head = SeparateHead(transform=probed(model).transform, chunk_bytes=CHUNK_BYTES)
    assert head.is_used(model.get_output_embeddings(), int(rows_of().mask.sum()))  # type: ignore[operator]
    logprobs, entropy, gradients = scored_with_gradients(model, None)
    in_chunks, entropy_in_chunks, gradients_in_chunks = scored_with_gradients(model, head)
    torch.testing.assert_close(in_chunks, logprobs, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(entropy_in_chunks, entropy, rtol=tolerance, atol=10 * tolerance)
    assert gradients.keys() == gradients_in_chunks.keys()
    # The gradient of one parameter is compared with the whole gradient's largest entry: some parts
    # are 0 but for rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert (gradients_in_chunks[parameter] - gradient).abs().max() <= tolerance * largest, parameter


def test_adapters_and_recomputed_activations_change_nothing() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        small_model(dtype=torch.float64),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    head = SeparateHead(transform=probed(model).transform, chunk_bytes=CHUNK_BYTES)
    _, _, gradients = scored_with_gradients(model, None)
    _, _, gradients_in_chunks = scored_with_gradients(model, head)
    assert gradients and all("lora" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_in_chunks[name], gradient, rtol=1e-10, atol=1e-12)


def test_bfloat16_products_are_added_up_in_float32() -> None:
    groups = ragged_groups(5)
    found = []
    for head in (None, SeparateHead(chunk_bytes=CHUNK_BYTES)):
        model = small_model()
        accumulate_gradients(model, groups, UpdateConfig(autocast_bf16=True, separate_head=head))
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert found[0].dtype == found[1].dtype == torch.float32
    assert (found[0] - found[1]).norm() <= 0.02 * found[0].norm()


def test_few_tokens_are_computed_all_at_once() -> None:
    model = model_named("llama", torch.float32)
    calls: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: calls.append(output.shape))  # type: ignore[union-attr]
    tokens = int(rows_of().mask.sum())
    completion_logprobs(model, rows_of(), separate_head=SeparateHead(chunk_bytes=tokens * VOCABULARY * 4))
    completion_logprobs(model, rows_of(), separate_head=SeparateHead(chunk_bytes=tokens * VOCABULARY * 4 - 1))
    hook.remove()
    assert [shape.numel() for shape in calls] == [tokens * VOCABULARY, VOCABULARY]


def test_the_entropy_of_a_ruled_out_token_is_zero_and_not_nan() -> None:
    hidden, weight = torch.ones(3, 2), torch.ones(4, 2)
    bias = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    logprobs, entropy = chunked_logprobs(hidden, weight, bias, torch.tensor([0, 2, 0]), chunk_bytes=32)
    torch.testing.assert_close(entropy, torch.full((3,), 2.0).log())
    torch.testing.assert_close(logprobs, -torch.full((3,), 2.0).log())


# What cannot be separated with certainty is computed as before.


class _Doubled(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2.0 * super().forward(hidden)


def doubled_head(model: nn.Module) -> None:
    head = model.lm_head
    model.lm_head = _Doubled(head.in_features, head.out_features, bias=False)  # type: ignore[union-attr, arg-type]


def capped_unknown_to_the_configuration(model: nn.Module) -> None:
    forward = model.forward

    def capped(*positional: object, **named: object) -> object:
        output = forward(*positional, **named)
        output.logits = output.logits.clamp(-30.0, 30.0)
        return output

    model.forward = capped  # type: ignore[method-assign]


def hooked(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output + 1.0)  # type: ignore[union-attr]


def adapted_head(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model.lm_head = peft.tuners.lora.layer.Linear(model.lm_head, "default", config=lora, r=2)


@pytest.mark.parametrize("change", [doubled_head, capped_unknown_to_the_configuration, hooked, adapted_head])
def test_a_model_whose_logits_are_more_than_its_output_layer_is_not_separated(change: Callable[[nn.Module], None]) -> None:
    model = small_model(tie_word_embeddings=False)
    with torch.no_grad():
        # So small that a cap at 30 does not act on any logit the model makes.
        model.lm_head.weight.mul_(0.01)
    assert probed(model).transform == LogitTransform()
    change(model)
    with pytest.raises(NotSeparate):
        probed(model)


def test_refusal_is_a_line_in_the_log_and_the_present_way(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model(tie_word_embeddings=False)
    assert separate_head(model, budget_tokens=1024) is None, "the logits of a small vocabulary fit into one chunk"
    assert "logits_not_chunked" not in capsys.readouterr().out
    model.train()
    assert separate_head(model, budget_tokens=1 << 30) == SeparateHead()
    hooked(model)
    assert separate_head(model, budget_tokens=1 << 30) is None
    assert "logits_not_chunked" in capsys.readouterr().out
    assert model.training


def test_a_gpus_larger_chunks_and_fewer_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: `benchmarks.gpu` compares the results there."""
    model = model_named("gemma2, soft cap")
    head = SeparateHead(transform=probed(model).transform, chunk_bytes=CHUNK_BYTES)
    logprobs, entropy, gradients = scored_with_gradients(model, head)
    as_on_a_gpu(monkeypatch)
    on_gpu, entropy_on_gpu, gradients_on_gpu = scored_with_gradients(model, head)
    torch.testing.assert_close(on_gpu, logprobs, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(entropy_on_gpu, entropy, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(gradients_on_gpu, gradients, rtol=1e-10, atol=1e-11)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = forward._sizes
    monkeypatch.setattr(forward, "_sizes", lambda _device, chunk_bytes: chosen(torch.device("cuda"), chunk_bytes))


# Memory, as the allocator counts it.


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_memory_is_at_most_1_3_chunks_beyond_the_gradients(softcap: float | None) -> None:
    tokens, vocabulary, hidden_size, chunk_bytes = 512, 16_384, 8, 2**22
    peak = peak_bytes(tokens, vocabulary, hidden_size, chunk_bytes=chunk_bytes, softcap=softcap)
    gradients = 4 * hidden_size * (tokens + vocabulary)
    assert 0.9 * chunk_bytes <= peak - gradients <= 1.3 * chunk_bytes
    # The same count finds what the plain way holds.
    assert peak_bytes(tokens, vocabulary, hidden_size, chunk_bytes=None, softcap=softcap) >= 3 * 4 * tokens * vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_gpus_chunks_need_less_than_the_five_that_are_reckoned_with(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    tokens, vocabulary, hidden_size, chunk_bytes = 512, 16_384, 8, 2**21
    with torch.autocast("cpu", torch.bfloat16):
        peak = peak_bytes(tokens, vocabulary, hidden_size, chunk_bytes=chunk_bytes, softcap=softcap)
    gradients = 6 * hidden_size * (tokens + vocabulary)  # and the weights in bfloat16
    assert 3 * chunk_bytes <= peak - gradients <= 4.2 * chunk_bytes
