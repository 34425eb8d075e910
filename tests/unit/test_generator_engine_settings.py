"""What the engine is told of the configuration, and how a node ends whose engine cannot be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.generator.engines.vllm_engine import VllmEngine
from services.generator.service import _engine_of
from shared.config import load_config
from shared.runtime import FatalError
from tests.installed_packages import forget, install


@pytest.mark.slow
def test_a_start_and_a_model_over_several_gpus_are_as_the_configuration_says(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'node = { id = "alpha" }\nmodel = { path = "models/base" }\ntasks = [{ dataset = "gcd" }]\n'
        'generator = { engine = "vllm", tensor_parallel = 2 }\n'
    )
    engine = _engine_of(load_config(file), 512)
    assert isinstance(engine, VllmEngine)
    told = engine._process._settings
    assert (told.start_timeout_s, told.tensor_parallel_size) == (1800, 2)


@pytest.fixture
def _forget_packages() -> Iterator[None]:
    yield
    forget()


ABSTRACT = """
from services.generator.engines.base import Engine
class mine(Engine):
    def __init__(self, settings): pass
"""


@pytest.mark.usefixtures("_forget_packages")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "cannot be loaded: ModuleNotFoundError: .*no_such_module.* change generator.engine"),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("mine = 'an engine'", "is a str: its entry point must name a function"),
        ("def mine(settings): return 3", "made a int: .* returns an Engine"),
        ("def mine(): pass", "cannot be made: .*takes 0 positional arguments"),
        (ABSTRACT, "cannot be made: .*abstract"),
        ("def mine(settings): raise RuntimeError('no GPU')", "cannot be made: RuntimeError: no GPU: .* change generator.engine"),
        ("def mine(settings): raise SystemExit(3)", "cannot be made: SystemExit: 3"),
    ],
)
def test_an_engine_that_cannot_be_made_ends_the_generator_for_good_with_a_sentence(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.engines", "mine", code)
    config = load_config(None, {"tasks": [{"dataset": "gcd"}], "generator": {"engine": "mine"}})
    with pytest.raises(FatalError, match=f"engine mine of the package my-package {words}"):
        _engine_of(config, 512)
