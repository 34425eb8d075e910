"""A hub model is loaded at one commit or not at all. The hub is its cache folder here (offline):
nothing else of it can be had.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.generator.engines import create_engine
from services.generator.engines.base import EngineSettings
from services.generator.engines.vllm_engine import VllmProcess
from shared.config.model_section import ModelSection
from shared.hub_models import UnpinnedModelError, hub_arguments, pin_problem
from shared.model.configuration import ModelLoadError
from shared.model.reading import load_tokenizer
from swarm_cli.local.base_model import model_problem
from tests.integration.trainer_life import tiny_policy

ROOT = Path(__file__).parents[2]
NAME = "somebody/some-model"
PINNED, MOVED, ADAPTER = "a" * 40, "b" * 40, "c" * 40
PROGRAM = """
import asyncio, json, sys, torch
from shared.config.model_section import ModelSection
from shared.model.loading import load_causal_lm
from shared.model.reading import load_tokenizer, model_max_length
from services.generator.engines import create_engine
async def engine(model):
    started = create_engine("transformers", model.path, revision=model.revision, device="cpu", threads=1)
    await started.start()
    found = float(started._model.get_input_embeddings().weight[0, 0])
    end = started._folder.end_token_ids
    await started.close()
    return found, end
def answer(revision):
    model = ModelSection(path=sys.argv[1], revision=revision)
    loaded = load_causal_lm(model, dtype=torch.float32, device=torch.device("cpu"))
    weight = float(loaded.get_input_embeddings().weight[0, 0])
    return weight, load_tokenizer(model).eos_token, model_max_length(model), *asyncio.run(engine(model))
def told(revision):
    try:
        return answer(revision)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(json.dumps({revision: told(revision) for revision in sys.argv[2:]}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two commits of one model, in the layout of huggingface_hub; `main` has moved on
    to the second, which is evil.
    """
    import torch
    from transformers import AutoModelForCausalLM

    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--somebody--some-model"
    first = tiny_policy(repository / "snapshots" / PINNED)
    second = repository / "snapshots" / MOVED
    shutil.copytree(first, second)
    for folder, value in ((first, 0.25), (second, 0.75)):
        model = AutoModelForCausalLM.from_pretrained(str(folder))
        with torch.no_grad():
            model.get_input_embeddings().weight[0, 0] = value
        model.save_pretrained(folder)
    third = repository / "snapshots" / ADAPTER
    shutil.copytree(first, third)
    (third / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/other-model", "peft_type": "LORA"}))
    other = home / "hub" / "models--somebody--other-model"
    shutil.copytree(second, other / "snapshots" / MOVED)
    (other / "refs").mkdir()
    (other / "refs" / "main").write_text(MOVED)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(MOVED)
    return home


@pytest.fixture(scope="module")
def loaded(hub: Path) -> dict[str, Any]:
    """Return what a process that finds all commits has of each that it wants, or its error."""
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", PROGRAM, NAME, PINNED, MOVED, ADAPTER, ""]
    answer = subprocess.run(command, cwd=hub, env=environment, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.mark.slow
def test_a_name_that_moved_on_still_loads_the_commit_that_was_looked_at(loaded: dict[str, Any]) -> None:
    """Weights, tokenizer, config and the engine's own reading of them."""
    for revision, value in ((PINNED, 0.25), (MOVED, 0.75)):
        weight, _, _, engine_weight, _ = loaded[revision]
        assert weight == engine_weight == value


@pytest.mark.slow
def test_a_name_without_its_commit_is_refused_by_everything_that_loads_a_model(loaded: dict[str, Any]) -> None:
    assert isinstance(loaded[""], str) and "model.revision is not set" in loaded[""]
    with pytest.raises(
        ModelLoadError, match=r"a name on the hub and model\.revision is not set.*model_info\('somebody/some-model'\)"
    ):
        load_tokenizer(ModelSection(path=NAME))
    assert "model.revision" in (model_problem(NAME) or "") and model_problem(NAME, PINNED) is None
    for revision in ("", "main", "v1.0", "a" * 39, "a" * 41, "A" * 40, "a" * 40 + "\n", "g" * 40):
        with pytest.raises(UnpinnedModelError):
            hub_arguments(NAME, revision)


@pytest.mark.slow
def test_a_commit_that_only_names_another_model_is_refused(loaded: dict[str, Any]) -> None:
    """Transformers would turn to the adapter's base, which is another repository, and say that its
    files are missing.
    """
    assert isinstance(loaded[ADAPTER], str) and "holds an adapter for another model" in loaded[ADAPTER]


@pytest.mark.parametrize("kind", ["transformers", "vllm", "openai"])
async def test_no_engine_starts_on_a_name_without_its_commit(kind: Any) -> None:
    engine = create_engine(kind, NAME, device="cpu", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(Exception, match=r"model\.revision is not set"):
        await engine.start()
    await engine.close()


def test_vllm_is_told_the_commit_for_weights_and_tokenizer_and_never_to_run_a_models_code(tmp_path: Path) -> None:
    """Its arguments at the border to vLLM; vLLM itself is not started."""
    pinned = VllmProcess(EngineSettings(model_path=NAME, revision=PINNED)).pinned()
    assert pinned == {"trust_remote_code": False, "revision": PINNED, "tokenizer_revision": PINNED}
    assert VllmProcess(EngineSettings(model_path=str(tmp_path))).pinned() == {"trust_remote_code": False}


def test_a_folder_needs_no_commit(tmp_path: Path) -> None:
    assert pin_problem(str(tmp_path), "") is None
    assert hub_arguments(str(tmp_path), "") == {"trust_remote_code": False}


@pytest.mark.parametrize("revision", ["main", "a" * 39, "A" * 40, "a" * 40 + "\n"])
def test_the_configuration_takes_a_full_commit_hash_alone(revision: str) -> None:
    with pytest.raises(ValueError, match="revision") as raised:
        ModelSection(path=NAME, revision=revision)
    told = str(raised.value)
    assert "branch such as main moves" in told and "full hash of the commit" in told and f"model_info('{NAME}')" in told


@pytest.mark.parametrize("name", ["x\x1b[2J", "a\u202eb", "two\nlines", "x" * 513])
def test_a_public_name_that_other_nodes_would_refuse_is_refused_here(name: str) -> None:
    with pytest.raises(ValueError):
        ModelSection(name=name)
    with pytest.raises(ValueError, match="set model.name"):
        ModelSection(path=name)
    if len(name) < 513:
        assert ModelSection(path=name, name="plain").public_name == "plain"


def test_every_hub_model_in_examples_and_documents_comes_with_a_commit() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "config").rglob("*.toml"), *(ROOT / "k8s").rglob("*.toml")]
    found = 0
    for file in files:
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            named = re.match(r'[#\s]*(?:model\.)?path = "([^"]+)"', line)
            if named and re.fullmatch(r"[A-Z]\w+/[\w.-]+", named[1]):
                found += 1
                assert "revision = " in "\n".join(lines[number : number + 3]), f"{file.relative_to(ROOT)}:{number + 1}"
    assert found


@pytest.mark.slow
def test_nothing_loads_a_model_without_saying_which_commit() -> None:
    sources = [
        each for folder in ("services", "shared", "benchmarks", "swarm_cli", "lab") for each in (ROOT / folder).rglob("*.py")
    ]
    found = 0
    for source in sources:
        if "from_pretrained" not in (text := source.read_text()):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
                found += 1
                keywords = {keyword.arg for keyword in call.keywords}  # None stands for `**hub_arguments(...)`
                assert keywords & {None, "revision"}, f"{source.relative_to(ROOT)}:{call.lineno}"
    assert found >= 8


def test_where_a_model_lies_on_this_machine_is_not_published() -> None:
    assert ModelSection(path="/home/somebody/models/mine").public_name == "mine"
    assert ModelSection(path="models/base").public_name == "models/base" and ModelSection(path=NAME).public_name == NAME
