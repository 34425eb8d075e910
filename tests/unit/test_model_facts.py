"""What `swarm config check` reads of a model without torch is what the services read with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from shared.config.model_section import ModelSection
from shared.model.configuration import ModelLoadError
from shared.model.reading import load_tokenizer, model_max_length
from swarm_cli.model.facts import ModelFacts, read_facts
from tests.architectures.tiny import tiny_config
from tests.integration.trainer_life import tiny_policy

pytestmark = pytest.mark.slow


def facts_in_this_process(model: ModelSection) -> ModelFacts:
    try:
        tokenizer = load_tokenizer(model)
        most = min(int(tokenizer.model_max_length), 2**62)
        return ModelFacts([], model_max_length(model), bool(tokenizer.chat_template), tokenizer_tokens=most)
    except ModelLoadError as error:
        return ModelFacts([str(error)])


def model_folder(folder: Path, change: str) -> Path:
    tiny_policy(folder)
    config, tokenizer_config = folder / "config.json", folder / "tokenizer_config.json"
    match change:
        case "no template":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.chat_template = None
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            tokenizer.save_pretrained(folder)
        case "torn config":
            config.write_text("{")
        case "torn tokenizer":
            (folder / "tokenizer.json").write_text('{"model": ')
        case "unknown class":
            tokenizer_config.write_text(json.dumps({**json.loads(tokenizer_config.read_text()), "tokenizer_class": "NoSuch"}))
        case "template that fails":
            (folder / "chat_template.jinja").write_text("{{ raise_exception('no questions today') }}")
        case "half precision":
            config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
        case "gemma3_text" | "mixtral":
            tiny_config(change).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        "",
        "no template",
        "torn tokenizer",
        "unknown class",
        "template that fails",
        # Each process imports transformers; these read the same files of the same kind.
        pytest.param("torn config", marks=pytest.mark.long),
        pytest.param("gemma3_text", marks=pytest.mark.long),
        pytest.param("half precision", marks=pytest.mark.long),
        pytest.param("mixtral", marks=pytest.mark.long),
    ],
)
def test_facts_read_without_torch_are_those_read_with_it(change: str, tmp_path: Path) -> None:
    model = ModelSection(path=str(model_folder(tmp_path / "model", change)), max_length=0)
    expected = facts_in_this_process(model)
    assert (
        bool(expected.problems) == (change in {"torn config", "torn tokenizer", "template that fails"}) or change == "unknown class"
    )
    assert read_facts(model)() == expected


def test_a_path_that_is_no_model_is_refused_without_a_process(tmp_path: Path) -> None:
    assert "no such folder" in read_facts(ModelSection(path=str(tmp_path / "nowhere")))().problems[0]


def test_a_template_that_never_ends_is_a_sentence_within_seconds(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(endless)
    (problem,) = read_facts(ModelSection(path=str(folder)))().problems
    assert "chat template" in problem and "2 s" in problem and str(folder) in problem


def test_a_model_that_takes_too_long_to_read_is_a_sentence_and_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model", "")
    monkeypatch.setattr("swarm_cli.model.facts.DEADLINE_S", 0.1)
    (problem,) = read_facts(ModelSection(path=str(folder)))().problems
    assert "took longer than" in problem and str(folder) in problem


def test_a_model_that_takes_too_much_memory_to_read_is_a_sentence(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "")
    (folder / "chat_template.jinja").write_text("{% set much = 'a' * 9000000000 %}{{ much }}")
    (problem,) = read_facts(ModelSection(path=str(folder)))().problems
    assert "256 MiB of memory" in problem


def test_that_weights_passed_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes seconds, so it is asked once for the same files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = model_folder(tmp_path / "model", "")
    model = ModelSection(path=str(folder))
    assert not read_facts(model)().problems
    (kept,) = (tmp_path / "cache").rglob("*.passed")
    assert not read_facts(model)().problems
    file = folder / "model.safetensors"
    before, tensors = file.stat(), load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy may keep it
    assert "model.norm.weight" in read_facts(model)().problems[0]
    save_file({f"module.{name}": value for name, value in tensors.items()}, file, {"format": "pt"})
    assert "'module.'" in read_facts(model)().problems[0]
    assert list((tmp_path / "cache").rglob("*.passed")) == [kept], "a refusal is not kept"
