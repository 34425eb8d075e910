"""A policy file that is not this model's is refused before anything is touched, with its cause, and
the old policy answers on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.generator.engines import PolicyLoadError
from tests.engines.conftest import TRAINABLE, Run, Subject
from tests.engines.test_engine_conformance import greedy_answers
from tests.engines.tiny_models import write_policy_file


def absent(good: Path, bad: Path) -> None:
    pass


def truncated(good: Path, bad: Path) -> None:
    bad.write_bytes(good.read_bytes()[:-1000])


def header_cut(good: Path, bad: Path) -> None:
    bad.write_bytes(good.read_bytes()[:20])


def not_safetensors(good: Path, bad: Path) -> None:
    bad.write_bytes(b"<html>not found</html>")


def lacks_a_tensor(good: Path, bad: Path) -> None:
    tensors = load_file(good)
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, bad)


def wrong_shape(good: Path, bad: Path) -> None:
    tensors = load_file(good)
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, bad)


def unknown_tensor(good: Path, bad: Path) -> None:
    save_file(load_file(good) | {"model.layers.4.mlp.down_proj.weight": torch.ones(128, 256)}, bad)


def integers(good: Path, bad: Path) -> None:
    save_file(load_file(good) | {"model.norm.weight": torch.ones(128, dtype=torch.int64)}, bad)


engines = pytest.mark.parametrize("started", TRAINABLE, indirect=True)

FAULTS = {
    absent: "unreadable or truncated",
    truncated: "unreadable or truncated",
    header_cut: "unreadable or truncated",
    not_safetensors: "unreadable or truncated",
    lacks_a_tensor: "lacks 1 tensors, first model.layers.3.mlp.down_proj.weight",
    wrong_shape: r"model.norm.weight has shape \(64,\), the model's is \(128,\)",
    unknown_tensor: "holds 1 unknown tensors, first model.layers.4",
    integers: "model.norm.weight is I64, not a float",
}


@engines
def test_a_faulty_policy_file_is_refused_and_the_old_policy_answers_on(subject: Subject, run: Run, tmp_path: Path) -> None:
    good = write_policy_file(tmp_path / "good.safetensors", subject.other_policy(seed=5))
    run(subject.engine.load_policy(good, 5))
    answers = greedy_answers(subject, run)
    for number, (spoil, message) in enumerate(FAULTS.items()):
        bad = tmp_path / f"{spoil.__name__}.safetensors"
        spoil(write_policy_file(tmp_path / "next.safetensors", subject.other_policy(seed=6)), bad)
        with pytest.raises(PolicyLoadError, match=message):
            run(subject.engine.load_policy(bad, 6 + number))
        assert subject.engine.policy_version == 5
        assert greedy_answers(subject, run) == answers


@engines
def test_a_file_that_also_names_the_tied_output_layer_is_taken(subject: Subject, run: Run, tmp_path: Path) -> None:
    policy = subject.other_policy(seed=7)
    tensors = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    assert "lm_head.weight" in tensors
    save_file(tensors, tmp_path / "whole.safetensors")
    run(subject.engine.load_policy(tmp_path / "whole.safetensors", 7))
    whole = greedy_answers(subject, run)
    run(subject.engine.load_policy(write_policy_file(tmp_path / "tied-once.safetensors", policy), 7))
    assert greedy_answers(subject, run) == whole
    if subject.tied:
        save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "apart.safetensors")
        with pytest.raises(PolicyLoadError, match="lm_head.weight and model.embed_tokens.weight"):
            run(subject.engine.load_policy(tmp_path / "apart.safetensors", 8))
        assert greedy_answers(subject, run) == whole
