"""What the engine is told of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.generator.engines.vllm_engine import VllmEngine
from services.generator.service import _engine_of
from shared.config import load_config


@pytest.mark.slow
def test_a_start_and_a_model_over_several_gpus_are_as_the_configuration_says(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'node = { id = "alpha" }\nmodel = { path = "models/base" }\ntasks = [{ dataset = "gcd" }]\n'
        'generator = { engine = "vllm", start_timeout_s = 2345, tensor_parallel = 2 }\n'
    )
    engine = _engine_of(load_config(file), 512)
    assert isinstance(engine, VllmEngine)
    told = engine._process._settings
    assert (told.start_timeout_s, told.tensor_parallel_size) == (2345, 2)
