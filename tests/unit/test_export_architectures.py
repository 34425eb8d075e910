"""What was trained whole comes out whole, also of models that keep floats which no gradient
moves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.checkpoint import CheckpointStore, LearnerState, PolicyVersion, TrainedModel
from services.trainer.export import export_policy
from shared.model.weights import trainable_tensors
from shared.run_records import CHECKPOINTS
from swarm_cli.errors import CommandError
from swarm_cli.model.commands import export_node
from tests.architectures.tiny import byte_model
from tests.engines.tiny_models import write_model_folder


def trained(folder: Path, base: Path, weights: dict[str, torch.Tensor]) -> Path:
    model = TrainedModel(model_path=str(base), dtype="float32", lora_rank=0, lora_alpha=16.0, lora_target_modules="all-linear")
    position = PolicyVersion(batch_number=1, stream_seq=1, consumed_local=1)
    store = CheckpointStore(folder / CHECKPOINTS, keep=1, keep_best=False)
    store.save(LearnerState(weights, {}, {"cpu": torch.get_rng_state()}), position, model)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "apertus", "gemma4_text", "marian", "camembert", "llama", "gpt2"])
def test_a_policy_trained_whole_is_exported_with_what_its_model_keeps_besides(kind: str, tmp_path: Path) -> None:
    base = write_model_folder(tmp_path / "base", byte_model(kind))
    # As a trainer loads it: from the files, and what transformers then lets be trained.
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = {name: value + 0.01 for name, value in trainable_tensors(model).items()}
    exported = export_policy(trained(tmp_path / "alpha", base, weights), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32).state_dict()
    moved = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {name: value for name, value in model.state_dict().items() if value.data_ptr() not in moved}
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert (kind in ("deepseek_v3", "glm4_moe", "apertus", "gemma4_text")) == bool(kept)


def test_a_checkpoint_of_another_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = byte_model("llama")
    base = write_model_folder(tmp_path / "base", model)
    weights = trainable_tensors(model)
    del weights["model.norm.weight"]
    with pytest.raises(CommandError, match="nothing was exported: these weights do not fit the model: 1 missing"):
        export_node(trained(tmp_path / "alpha", base, weights), tmp_path / "out")
