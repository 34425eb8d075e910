"""Numbers in a config.json that no model can compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from shared.model.configuration import read_configuration


def folder_with(folder: Path, **values: Any) -> Path:
    Qwen2Config(num_hidden_layers=2).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -1),
        ("sliding_window", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("layer_norm_eps", 1),
    ],
)
def test_a_number_outside_its_range_is_refused_with_its_key(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} is {value} in its config.json; it must be .*: take the original model's number"):
        read_configuration(folder_with(tmp_path, use_sliding_window=True, **{key: value}))


@pytest.mark.parametrize("value", [0, -2.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["factor", "attention_factor", "short_factor", "long_factor"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_factor_of_rotary_positions_that_is_not_above_0_is_refused(tmp_path: Path, place: str, key: str, value: float) -> None:
    stated = [1.0, value] if key in ("short_factor", "long_factor") else value
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, key: stated}
    with pytest.raises(ValueError, match=f"{key} is {value} in its config.json; it must be above 0 and finite"):
        read_configuration(folder_with(tmp_path, **{place: rope}))


def test_a_key_that_stands_twice_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    folder_with(tmp_path)
    written = (tmp_path / "config.json").read_text().rstrip().removesuffix("}")
    for twice, key in (', "hidden_size": 64}', "hidden_size"), (', "rope_scaling": {"a": 1, "a": 2}}', "a"):
        (tmp_path / "config.json").write_text(written + twice)
        with pytest.raises(ValueError, match=f"{key} stands twice in its config.json: remove one"):
            read_configuration(tmp_path)


def test_numbers_that_models_have_are_taken(tmp_path: Path) -> None:
    for stated in ({"sliding_window": None}, {"sliding_window": 0, "use_sliding_window": False}, {"rms_norm_eps": 0.0}):
        read_configuration(folder_with(tmp_path, **stated))
