"""Policies that are adapters beside the base: engines answer as both together do, and refuse
adapters of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.generator.engines import Engine, PolicyLoadError, Sample, SamplingParams, create_engine
from services.generator.engines.transformers_engine import AdapterSlot
from shared.model.weights import (
    METADATA_KEY,
    Adapters,
    WeightsError,
    adapter_tensors,
    base_fingerprint,
    modules_of,
    write_peft_folder,
    write_tensors,
)
from tests.engines.conftest import BASE_SEED, CONTEXT_LENGTH, Run, needs_vllm
from tests.engines.reference import reference_logprobs
from tests.engines.test_engine_conformance import PROMPTS
from tests.engines.tiny_models import random_policy, write_policy_file

RANK = 5
"""No rank that vLLM has room for exactly."""
ENGINES = pytest.mark.parametrize("answering", ["transformers", pytest.param("vllm", marks=needs_vllm)], indirect=True)


@dataclass
class Answering:
    engine: Engine
    folder: Path
    kind: str


@pytest.fixture(scope="module")
def answering(request: pytest.FixtureRequest, run: Run, model_folders: dict[bool, Path]) -> Iterator[Answering]:
    folder = model_folders[True]
    engine = create_engine(
        request.param,
        str(folder),
        max_model_len=CONTEXT_LENGTH,
        threads=1,
        kv_cache_bytes=64 * 1024**2,
        device="cpu",
        adapter_rank=RANK,
    )
    run(engine.start())
    yield Answering(engine, folder, request.param)
    run(engine.close())


def adapted(seed: int, *, rank: int = RANK, alpha: float = 8.0, targets: Any = "all-linear") -> Any:
    """The base with adapters that change its answers."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(random_policy(BASE_SEED, tied=True), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model.eval()


def publish(model: Any, folder: Path, file: Path, *, rank: int = RANK, alpha: float = 8.0) -> Path:
    described = Adapters(rank=rank, alpha=alpha, base=base_fingerprint(str(folder)), dtype="float32")
    write_tensors(adapter_tensors(model), file, described.metadata())
    return file


def greedy(answering: Answering, run: Run) -> list[tuple[int, ...]]:
    groups: list[list[Sample]] = run(
        answering.engine.generate(PROMPTS, 1, SamplingParams(temperature=0, max_new_tokens=10), seed=0)
    )
    return [sample.token_ids for (sample,) in groups]


def answers_as(answering: Answering, run: Run, model: Any, version: int) -> None:
    params = SamplingParams(max_new_tokens=12)
    for prompt, group in zip(PROMPTS, run(answering.engine.generate(PROMPTS, 2, params, seed=8)), strict=True):
        for sample in group:
            assert sample.policy_version == version
            expected = reference_logprobs(model, prompt, sample.token_ids, params)
            np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)
    scores = run(answering.engine.score(PROMPTS, [[1, 2, 3]] * len(PROMPTS), params))
    for prompt, score in zip(PROMPTS, scores, strict=True):
        np.testing.assert_allclose(score, reference_logprobs(model, prompt, [1, 2, 3], params), atol=2e-4)


@ENGINES
def test_after_every_load_samples_and_scores_are_those_of_base_and_adapters(answering: Answering, run: Run, tmp_path: Path) -> None:
    seen = set()
    for version in (11, 12, 13):
        model = adapted(version)
        run(answering.engine.load_policy(publish(model, answering.folder, tmp_path / f"{version}.safetensors"), version))
        assert answering.engine.policy_version == version
        answers_as(answering, run, model, version)
        seen.add(tuple(greedy(answering, run)))
    assert len(seen) == 3
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors"}, "others' folders are left as they are"


@ENGINES
def test_other_modules_a_smaller_rank_and_another_scale_are_taken(answering: Answering, run: Run, tmp_path: Path) -> None:
    settings = [(2, 16.0, ["q_proj", "down_proj"]), (RANK, 1.0, ["v_proj"]), (3, 8.0, "all-linear")]
    for version, (rank, alpha, targets) in enumerate(settings, 21):
        model = adapted(version, rank=rank, alpha=alpha, targets=targets)
        file = publish(model, answering.folder, tmp_path / f"{version}.safetensors", rank=rank, alpha=alpha)
        run(answering.engine.load_policy(file, version))
        answers_as(answering, run, model, version)


Spoil = Callable[[dict[str, torch.Tensor], dict[str, str]], None]
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def other_base(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata.update(Adapters(rank=RANK, alpha=8.0, base="0" * 64, dtype="float32").metadata())


def half_a_pair(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    del tensors[FIRST]


def unknown_layer(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    for factor in "AB":
        name = FIRST.replace("_A", f"_{factor}")
        tensors[name.replace("layers.0", "layers.9")] = tensors[name].clone()


def other_rank(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[FIRST] = tensors[FIRST][:2].clone()


def other_width(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[FIRST] = tensors[FIRST][:, :7].clone()


def a_weight_besides(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["model.norm.weight"] = torch.ones(128)


def undescribed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    del metadata[METADATA_KEY]


def described_otherwise(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata[METADATA_KEY] = '{"rank": "many"}'


def turned_round(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    second = FIRST.replace("_A", "_B")
    tensors[FIRST], tensors[second] = tensors[second].T.contiguous(), tensors[FIRST].T.contiguous()


def with_integers(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[FIRST] = tensors[FIRST].long()


def no_numbers(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors[FIRST][0, 0] = float("nan")


FAULTS: dict[Spoil, str] = {
    turned_round: "factors of model.layers.0.mlp.down_proj have shapes",
    with_integers: "is I64, not a float",
    no_numbers: "holds NaN or infinity",
    other_base: "trained on a base model with other weights",
    half_a_pair: r"factors of model.layers.0.mlp.down_proj have shapes \(\)",
    unknown_layer: "adapts model.layers.9.mlp.down_proj, which this model does not have",
    other_rank: "and the rank 5",
    other_width: r"have shapes \(5, 7\)",
    a_weight_besides: "'model.norm.weight' is not the name of a LoRA factor",
    undescribed: "lacks|holds full weights",
    described_otherwise: "the description of its adapters cannot be read",
}


@ENGINES
def test_faulty_adapters_are_refused_and_the_old_policy_answers_on(answering: Answering, run: Run, tmp_path: Path) -> None:
    good = publish(adapted(31), answering.folder, tmp_path / "good.safetensors")
    run(answering.engine.load_policy(good, 31))
    answers = greedy(answering, run)
    for spoil, message in FAULTS.items():
        bad = tmp_path / f"{spoil.__name__}.safetensors"
        with safe_open(str(publish(adapted(32), answering.folder, tmp_path / "next.safetensors")), framework="pt") as whole:
            metadata = dict(whole.metadata())
        tensors = load_file(tmp_path / "next.safetensors")
        spoil(tensors, metadata)
        save_file(tensors, bad, metadata=metadata)
        with pytest.raises(PolicyLoadError, match=message):
            run(answering.engine.load_policy(bad, 32))
        assert answering.engine.policy_version == 31
        assert greedy(answering, run) == answers
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(PolicyLoadError, match="unreadable or truncated"):
        run(answering.engine.load_policy(truncated, 33))
    assert greedy(answering, run) == answers


@pytest.mark.parametrize("answering", ["transformers"], indirect=True)
def test_adapters_that_peft_cannot_place_leave_the_old_ones_answering(
    answering: Answering, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(35)
    run(answering.engine.load_policy(publish(model, answering.folder, tmp_path / "good.safetensors"), 35))
    other = publish(adapted(36, rank=2), answering.folder, tmp_path / "other.safetensors", rank=2)
    real, calls = LoraModel.__init__, []

    def halfway(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not this layer")

    monkeypatch.setattr(LoraModel, "__init__", halfway)
    with pytest.raises(PolicyLoadError, match="do not fit this model .*not this layer"):
        run(answering.engine.load_policy(other, 36))
    answers_as(answering, run, model, 35)


def test_adapters_whose_shapes_do_not_fit_leave_the_old_ones_and_their_places() -> None:
    old, wrong = adapted(37), adapted(38, rank=2)
    model = random_policy(BASE_SEED, tied=True)
    slot = AdapterSlot(model)
    tensors = adapter_tensors(old)
    modules = modules_of({name: tuple(value.shape) for name, value in tensors.items()})
    slot.load(tensors, Adapters(rank=RANK, alpha=8.0, base="", dtype="float32"), modules)
    expected = reference_logprobs(old, PROMPTS[0], [1, 2, 3], SamplingParams())
    bad = {name: value[:, :3] if "lora_A" in name else value for name, value in adapter_tensors(wrong).items()}
    with pytest.raises(ValueError, match="another shape"):
        slot.load(bad, Adapters(rank=2, alpha=8.0, base="", dtype="float32"), modules)
    np.testing.assert_allclose(reference_logprobs(model, PROMPTS[0], [1, 2, 3], SamplingParams()), expected, atol=2e-4)


@pytest.mark.parametrize("answering", ["transformers"], indirect=True)
def test_adapters_after_whole_weights_are_those_of_the_base_and_whole_weights_after_adapters_stand_alone(
    answering: Answering, run: Run, tmp_path: Path
) -> None:
    whole, model = random_policy(41, tied=True), adapted(42)
    weights = write_policy_file(tmp_path / "whole.safetensors", whole)
    adapters = publish(model, answering.folder, tmp_path / "adapters.safetensors")
    for version, (file, expected) in enumerate([(weights, whole), (adapters, model), (weights, whole), (adapters, model)], 41):
        run(answering.engine.load_policy(file, version))
        answers_as(answering, run, expected, version)


@pytest.mark.vllm
@pytest.mark.parametrize("answering", [pytest.param("vllm", marks=needs_vllm)], indirect=True)
def test_vllm_refuses_a_rank_above_the_one_it_was_started_for(answering: Answering, run: Run, tmp_path: Path) -> None:
    file = publish(adapted(51, rank=9), answering.folder, tmp_path / "9.safetensors", rank=9)
    with pytest.raises(PolicyLoadError, match="adapters of rank 9, but this vLLM was started for rank 5"):
        run(answering.engine.load_policy(file, 51))


@pytest.mark.vllm
@pytest.mark.parametrize("answering", [pytest.param("vllm", marks=needs_vllm)], indirect=True)
def test_vllm_does_not_pass_by_layers_that_it_has_under_another_name(answering: Answering, run: Run, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    model = adapted(55)
    run(answering.engine.load_policy(publish(model, answering.folder, tmp_path / "good.safetensors"), 55))
    tensors = {name.replace("layers.3", "layers.7"): value for name, value in adapter_tensors(adapted(56)).items()}
    described = Adapters(rank=RANK, alpha=8.0, base="", dtype="float32")
    save_file(tensors, tmp_path / "elsewhere.safetensors")
    write_peft_folder(tmp_path / "elsewhere.safetensors", described, modules_of(tensors), tmp_path / "folder")
    request = LoRARequest(lora_name="elsewhere", lora_int_id=999, lora_path=str(tmp_path / "folder"))
    engine: Any = answering.engine
    with pytest.raises(PolicyLoadError, match=r"would ignore 7 of its adapted layers, first model.layers.7.mlp.down_proj"):
        run(engine._adapters.add(request, 56))
    answers_as(answering, run, model, 55)


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    """A delta between two versions wants the same header, and a replay the same bytes."""
    tensors = adapter_tensors(adapted(61))
    described = Adapters(rank=RANK, alpha=8.0, base="0" * 64, dtype="float32").metadata()
    for number in range(20):
        write_tensors(tensors, tmp_path / str(number), described)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(20)}) == 1


def test_a_file_that_transformers_does_not_load_is_no_part_of_the_base(model_folders: dict[bool, Path], tmp_path: Path) -> None:
    random_policy(BASE_SEED, tied=True).save_pretrained(tmp_path)
    before = base_fingerprint(str(tmp_path))
    save_file({"whole": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    assert base_fingerprint(str(tmp_path)) == before
    random_policy(BASE_SEED, tied=True).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    first = base_fingerprint(str(tmp_path / "shards"))
    random_policy(BASE_SEED + 1, tied=True).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert base_fingerprint(str(tmp_path / "shards")) != first
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="holds no weights"):
        base_fingerprint(str(empty))


def test_one_changed_layer_is_another_base(tmp_path: Path) -> None:
    model = random_policy(BASE_SEED, tied=True)
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "b")
    assert base_fingerprint(str(tmp_path / "a")) != base_fingerprint(str(tmp_path / "b"))


def test_a_base_is_told_by_its_weights_wherever_it_lies(model_folders: dict[bool, Path], tmp_path: Path) -> None:
    folder = model_folders[True]
    copy = tmp_path / "copy"
    random_policy(BASE_SEED, tied=True).save_pretrained(copy)
    assert base_fingerprint(str(copy)) == base_fingerprint(str(folder))
    trained = random_policy(BASE_SEED, tied=True)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.001)
    trained.save_pretrained(tmp_path / "trained")
    assert base_fingerprint(str(tmp_path / "trained")) != base_fingerprint(str(folder))
