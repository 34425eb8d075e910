"""What `swarm model import` says of names, places and numbers that make no model: one sentence;
nothing is left behind.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="needs the extra `gguf`")

from shared.model.configuration import MOST_LAYERS
from swarm_cli.errors import CommandError
from swarm_cli.model.importing import import_model
from tests.engines.tiny_models import random_policy, write_model_folder
from tests.gguf_files import write_gguf

pytestmark = pytest.mark.slow  # some are refused only after a model was built and tried


def refusal(source: str | Path, out: Path) -> str:
    """The sentence; the folder `out` lies in is left as it was."""
    before = sorted(entry.name for entry in Path.cwd().iterdir())
    with pytest.raises(CommandError) as caught:
        import_model(str(source), out)
    said = str(caught.value)
    assert said.startswith("nothing was imported: ") and "\n" not in said and said.count(": ") >= 2, said
    assert sorted(entry.name for entry in Path.cwd().iterdir()) == before
    return said


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- names and places


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("~nobody-of-this-name/x", "the home folder of an unknown user"),
        ("", "no source is given"),
        ("/dev/null", "/dev/null is neither a file nor a folder"),
    ],
)
def test_a_source_that_can_be_no_model_is_told_as_what_it_is(tmp_path: Path, source: str, said: str) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert said in refusal(source, tmp_path / "out")


def places(folder: Path) -> dict[str, Path]:
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(folder / "empty")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "file").write_text("x")
    return {
        "is a link": folder / "link",
        "is a link ": folder / "dangling",
        "is the current folder": Path(),
        "has no name that it could be renamed to": Path("nowhere/.."),
        "is a file, so": folder / "file" / "out",
        "the home folder of an unknown user": Path("~nobody-of-this-name/x"),
        "NUL": Path("a\0b"),
    }


def test_a_place_where_no_folder_can_appear_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, out in places(tmp_path).items():
        if out == Path():
            (tmp_path / "here").mkdir()
            monkeypatch.chdir(tmp_path / "here")
        told = refusal("no-such-package-here", out)
        assert said.strip() in told, told
        monkeypatch.chdir(tmp_path)


def test_a_tilde_in_the_place_is_ones_home_as_in_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert import_model(str(write_gguf(tmp_path / "tiny.gguf")), Path("~/model")) == tmp_path / "home" / "model"
    assert (tmp_path / "home" / "model" / "config.json").is_file()


# --- numbers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"llama.attention.head_count": 0}, "a number in it is 0 or too large"),
        ({"llama.attention.head_count_kv": 0}, "a number in it is 0 or too large"),
        ({"llama.rope.dimension_count": 0}, "a number in it is 0 or too large"),
        ({"split.count": float("inf")}, "is one of inf parts"),
        ({"llama.rope.freq_base": 0.0}, "the base of its rotary positions is 0.0"),
        ({"llama.rope.freq_base": float("nan")}, "the base of its rotary positions is nan"),
        ({"llama.rope.freq_base": float("inf")}, "the base of its rotary positions is inf"),
    ],
)
def test_a_gguf_file_whose_numbers_make_no_model_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    file = write_gguf(tmp_path / "odd.gguf", settings=settings)
    told = refusal(file, tmp_path / "out")
    assert said in told and "odd.gguf" in told, told


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", lambda _: None, "config.json holds no JSON object"),
        ("config.json", lambda old: {**old, "num_attention_heads": 0}, "a number in it is 0 or too large"),
        ("config.json", lambda old: {**old, "hidden_size": "x"}, "Field 'hidden_size' expected int, got str"),
        ("config.json", lambda old: {**old, "num_hidden_layers": -1}, "num_hidden_layers"),
        (
            "config.json",
            lambda old: {**old, "rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "the base of its rotary",
        ),
        ("tokenizer.json", lambda _: None, "the tokenizer of folder odd cannot be read"),
        ("tokenizer_config.json", lambda _: None, "the tokenizer of folder odd cannot be read"),
    ],
)
def test_a_folder_whose_files_make_no_model_is_refused(
    tmp_path: Path, file: str, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    folder = write_model_folder(tmp_path / "odd", random_policy(3, tied=True))
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    assert said in refusal(folder, tmp_path / "out")


def test_a_model_that_can_be_read_and_not_sampled_is_refused(tmp_path: Path) -> None:
    # Positive and finite, and the angles of float32 are not. Which check meets that first depends
    # on the processor.
    told = refusal(write_gguf(tmp_path / "odd.gguf", settings={"llama.rope.freq_base": 1e-44}), tmp_path / "out")
    sampled = "it can be read, but not sampled and scored (RuntimeError: probability tensor"
    assert "cannot be used here: " in told and (sampled in told or "its logprobs are not numbers" in told), told
    assert "check its configuration's numbers and weights" in told


def too_late(*_: object) -> None:
    raise AssertionError("still reading")


def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model_folder(tmp_path / "deep", random_policy(3, tied=True))
    config = json.loads((folder / "config.json").read_text())
    # transformers makes a list as long as this before anybody can ask its configuration.
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 30_000_000, "layer_types": None}))
    file = write_gguf(tmp_path / "deep.gguf", settings={"llama.block_count": 1_000_000})
    before = signal.signal(signal.SIGALRM, too_late)
    try:
        for source, layers in ((file, "1,000,000"), (folder, "30,000,000")):
            signal.alarm(5)
            assert f"has {layers} layers; 1 to {MOST_LAYERS}" in refusal(source, tmp_path / "out")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
