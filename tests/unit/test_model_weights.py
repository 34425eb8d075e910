"""Models by path, and their weights under Hugging Face names with ties and adapters resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from services.trainer.policy_model import with_adapters
from shared.config.model_section import ModelSection
from shared.config.trainer_section import LoraSection
from shared.model.configuration import ModelLoadError
from shared.model.loading import load_causal_lm, resolve_device, resolve_dtype, vocabulary_size
from shared.model.reading import end_tokens, load_tokenizer, model_max_length
from shared.model.weights import (
    WeightsError,
    load_policy_tensors,
    load_trainable,
    policy_tensors,
    serialize,
    trainable_tensors,
)
from tests.architectures.tiny import tiny_model
from tests.integration.trainer_life import tiny_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny", tied=request.param)


def loaded(folder: Path) -> Any:
    return load_causal_lm(ModelSection(path=str(folder)), dtype=torch.float32, device=CPU)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.arange(40, 60).unsqueeze(0)).logits
    return result


def test_a_policy_goes_through_its_file_and_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    model, other = loaded(folder), loaded(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    file = tmp_path / "policy.safetensors"
    file.write_bytes(serialize(policy_tensors(model)))
    load_policy_tensors(other, load(file.read_bytes()))
    assert torch.equal(logits(model), logits(other))
    assert ("lm_head.weight" in load(file.read_bytes())) == (not model.config.tie_word_embeddings)


def test_the_same_tensors_give_the_same_bytes(folder: Path) -> None:
    tensors = policy_tensors(loaded(folder))
    assert serialize(tensors) == serialize(dict(reversed(tensors.items())))


def test_merged_adapters_compute_what_the_adapted_model_computes_under_the_base_models_names(folder: Path) -> None:
    base = loaded(folder)
    adapted = get_peft_model(loaded(folder), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    tensors = policy_tensors(adapted)
    assert tensors.keys() == policy_tensors(base).keys()
    load_policy_tensors(base, tensors)
    assert (logits(base) - logits(adapted)).abs().max() < 1e-4
    assert (logits(base) - logits(loaded(folder))).abs().max() > 0.1
    assert all(torch.equal(before[name], value) for name, value in adapted.state_dict().items())


def test_only_what_is_trained_is_taken_and_put_back(folder: Path) -> None:
    def adapted() -> Any:
        return get_peft_model(loaded(folder), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))

    one, other = adapted(), adapted()
    tensors = trainable_tensors(one)
    assert tensors and all("lora_" in name for name in tensors)
    load_trainable(other, tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in trainable_tensors(other).items())


def test_weights_of_another_model_are_refused_with_the_tensors_name(folder: Path) -> None:
    model = loaded(folder)
    tensors = policy_tensors(model)
    with pytest.raises(WeightsError, match="1 missing, 0 unknown, e.g. it lacks model.norm.weight"):
        load_policy_tensors(model, {name: value for name, value in tensors.items() if name != "model.norm.weight"})
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(5,\), the model's is \(32,\)"):
        load_policy_tensors(model, {**tensors, "model.norm.weight": torch.zeros(5)})


def test_facts_of_a_model_are_read_from_its_folder(folder: Path) -> None:
    model, tokenizer = loaded(folder), load_tokenizer(ModelSection(path=str(folder)))
    assert vocabulary_size(model) == 300 and end_tokens(ModelSection(path=str(folder)), tokenizer) == (256,)
    assert [model_max_length(ModelSection(path=str(folder), max_length=n)) for n in (0, 100, 999)] == [256, 100, 256]


def test_a_model_that_cannot_be_loaded_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    def load_it(path: Path) -> None:
        load_causal_lm(ModelSection(path=str(path)), dtype=torch.float32, device=CPU)

    with pytest.raises(ModelLoadError, match="is not a folder: check the spelling, import a model with"):
        load_it(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="'models/nowhere' is not a folder"):
        load_tokenizer(ModelSection(path="models/nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="folder without config.json"):
        load_it(tmp_path / "empty")
    with pytest.raises(ModelLoadError, match="folder without config.json"):
        model_max_length(ModelSection(path=str(tmp_path / "empty")))
    adapted = tiny_policy(tmp_path / "adapted")
    (adapted / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": "(a+)+b"}')
    with pytest.raises(ModelLoadError, match="holds an adapter for another model: merge the two"):
        load_it(adapted)
    with pytest.raises(ModelLoadError, match="holds an adapter for another model"):
        load_tokenizer(ModelSection(path=str(adapted)))
    broken = tiny_policy(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="model.safetensors is not a safetensors file, or its header is truncated"):
        load_it(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="the configuration of model.path .* cannot be read"):
        load_it(broken)


def test_a_device_that_is_not_there_is_an_error_with_a_remedy() -> None:
    assert resolve_device("cpu").type == "cpu" and resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cuda")) == resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ModelLoadError, match="model.device 'nonsense' cannot be used"):
        resolve_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="model.device 'cuda' cannot be used"):
            resolve_device("cuda")


def test_the_policy_is_published_in_the_dtype_asked_for(folder: Path) -> None:
    tensors = policy_tensors(loaded(folder), torch.bfloat16)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_router_s_bias_is_not_rounded_with_the_weights(lora_rank: int, tmp_path: Path) -> None:
    """Engines keep it in float32, and its small differences decide which expert a token goes to."""
    base = tiny_model("deepseek_v3")
    bias = next(value for name, value in base.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.copy_(5.0 + torch.linspace(0, 1e-3, bias.numel()))
    base.save_pretrained(tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16 if lora_rank else torch.float32)
    if lora_rank:
        trained = with_adapters(trained, LoraSection(rank=lora_rank, target_modules=["o_proj"]))
    tensors = policy_tensors(trained, torch.bfloat16)
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    load_policy_tensors(engine, tensors)
    found = next(value for name, value in engine.named_buffers() if name.endswith("e_score_correction_bias"))
    assert found.dtype == torch.float32 and torch.equal(found, bias)
    kept = [name for name, value in tensors.items() if value.dtype != torch.bfloat16]
    assert kept and all("e_score_correction_bias" in name for name in kept)
