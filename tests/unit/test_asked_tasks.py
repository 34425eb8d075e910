"""Task sources named on the command line are answered with all that is wrong with them, and a file
that never ends with a sentence.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.config import ConfigError, load_config
from shared.config.load import MAX_FILE_BYTES
from shared.registry import DEFAULT_VERIFIER
from swarm_cli.app import app
from swarm_cli.asked_tasks import asked_sources, task_sources
from swarm_cli.errors import CommandError

NO_END = [
    ("device", r"\(not a regular file\)"),
    ("pipe", r"\(not a regular file\)"),
    ("large", rf"\(larger than {MAX_FILE_BYTES} bytes\)"),
]


def without_end(kind: str, folder: Path) -> Path:
    file = folder / "node.toml"
    if kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as large:
            large.truncate(2**31)
    return file


@pytest.mark.parametrize(("kind", "why"), NO_END)
def test_a_configuration_without_an_end_is_a_sentence(kind: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"configuration file .*node.toml cannot be read {why}: correct the path"):
        load_config(without_end(kind, tmp_path))


@pytest.mark.parametrize(("kind", "why"), NO_END)
def test_a_file_of_task_sources_without_an_end_is_a_sentence(kind: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=rf"--tasks .*node.toml: cannot be read {why}: correct the path"):
        task_sources(str(without_end(kind, tmp_path)))


def test_a_configuration_is_read_through_a_link_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    (tmp_path / "..data").write_text('[[tasks]]\ndataset = "gcd"\n')
    (tmp_path / "node.toml").symlink_to("..data")
    assert load_config(tmp_path / "node.toml").tasks[0].dataset == task_sources(str(tmp_path / "node.toml"))[0].dataset == "gcd"


def test_the_columns_of_a_file_are_those_that_the_configuration_of_this_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    Path("../sums.csv").write_text("frage,antwort\n1 + 1,2\n2 + 3,5\n")
    asked = (["../sums.csv"], DEFAULT_VERIFIER, "", "{}")
    with pytest.raises(CommandError, match="no column"):
        asked_sources(*asked)
    Path("node.toml").write_text('[[tasks]]\nsource = "file"\npath = "../sums.csv"\nquestion = "frage"\nanswer = "antwort"\n')
    (found,) = asked_sources(*asked)
    assert (found.question, found.answer) == ("frage", "antwort")
    assert asked_sources([str(tmp_path / "sums.csv")], *asked[1:])[0].dataset == found.dataset, "by its whole path too"
    Path("node.toml").write_text("[[tasks")
    with pytest.raises(CommandError, match="no column"):
        asked_sources(*asked)


def refused(*arguments: str) -> list[str]:
    error = CliRunner().invoke(app, ["task", *arguments]).exception
    assert isinstance(error, CommandError), error
    return str(error).splitlines()


@pytest.mark.slow
def test_a_file_of_task_sources_is_answered_with_every_mistake_of_every_entry(tmp_path: Path) -> None:
    file = tmp_path / "tasks.toml"
    file.write_text('[[tasks]]\ndataset = "gcd"\nweight = -1\nweigth = 1\n[[tasks]]\ndataset = "Gcd"\n[[tasks]]\nweight = 2\n')
    with pytest.raises(CommandError) as answer:
        task_sources(str(file))
    first, *lines = str(answer.value).splitlines()
    begin = [
        "1: weight: Input should be",
        "1: weigth: unknown key",
        "2: dataset: must be",
        "3: dataset is missing",
    ]
    assert first == f"--tasks {file}: cannot be used:" and len(lines) == len(begin), lines
    assert all(line.startswith(f"  [[tasks]] {each}") for line, each in zip(lines, begin, strict=True)), lines


@pytest.mark.slow
def test_a_task_is_answered_with_all_that_is_wrong_with_it() -> None:
    asked = ("score", "gdc", "--answer", "1", "--verifier", "nope", "--settings")
    verifier, settings, dataset = refused(*asked, '{"max')
    assert "no verifier is called 'nope'" in verifier and "--settings is not JSON" in settings and "did you mean gcd" in dataset
    _, seed = refused("score", "gcd", *asked[2:], '{"seed": 1}')
    assert seed == "`seed` is chosen by each task draw; remove it from the dataset's config"


@pytest.mark.slow
def test_all_names_of_an_audit_are_tried_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q"}\n{"answer": "a"}\n')
    said = refused("audit", str(tmp_path / "a.jsonl"), "gdc", "b.jsonl", "--verifier", "nope")
    assert "no verifier is called 'nope'" in said[0] and "did you mean gcd" in said[-1]
    assert sum("b.jsonl: no such file" in line for line in said) == 1 and sum("a.jsonl" in line for line in said) == 2, said
    columns, missing = refused("show", "b.jsonl", "--columns", "question")
    assert "--columns question: give two names" in columns and "b.jsonl: no such file" in missing
