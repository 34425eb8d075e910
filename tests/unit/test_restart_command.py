"""Which options `swarm restart` needs is decided in one place, and with them it finds the run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarm_cli.local.control import holding_run
from swarm_cli.observe.remedies import remedies
from swarm_cli.runs import VAR_DIR_VARIABLE, restart_options, starts_again
from swarm_cli.target import running_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Runs that this process holds until the test ends, which is in the folder `here`."""
    monkeypatch.delenv(VAR_DIR_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ExitStack() as held:
        yield held


def started(held: ExitStack, var_dir: Path, name: str) -> Path:
    folder = var_dir / "runs" / name
    held.enter_context(holding_run(folder))
    return folder


def found_with(options: str) -> Path:
    """The run that `swarm restart` finds with the options."""
    given = dict(zip(*[iter(shlex.split(options))] * 2, strict=True))
    set_here = given.get("--var-dir")
    return running_run(given.get("--run", ""), Path(set_here) if set_here else None).resolve()


def test_the_only_run_here_needs_no_option_and_one_of_several_its_name(runs: ExitStack) -> None:
    one = started(runs, Path("var"), "lone-1")
    assert restart_options(one) == "" == restart_options(one.absolute())
    assert found_with("") == one.resolve()
    two = started(runs, Path("var"), "lone-2")
    for run in (one, two):
        assert restart_options(run) == f" --run {run.name}" and found_with(restart_options(run)) == run.resolve()


def test_a_run_in_another_folder_is_named_and_one_whose_name_runs_twice_by_its_folder_too(runs: ExitStack, tmp_path: Path) -> None:
    away = started(runs, tmp_path / "a way" / "var", "away-1")
    assert restart_options(away) == " --run away-1" and found_with(" --run away-1") == away
    started(runs, tmp_path / "other" / "var", "away-1")
    assert restart_options(away) == f" --var-dir '{tmp_path}/a way/var'" and found_with(restart_options(away)) == away
    started(runs, tmp_path / "a way" / "var", "away-2")
    assert restart_options(away).startswith(" --run away-1 --var-dir ") and found_with(restart_options(away)) == away


def test_where_a_variable_names_the_folder_of_runs_another_one_is_named_against_it(
    runs: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = started(runs, tmp_path / "away", "set-1")
    monkeypatch.setenv(VAR_DIR_VARIABLE, str(tmp_path / "away"))
    assert restart_options(away) == ""
    monkeypatch.setenv(VAR_DIR_VARIABLE, str(tmp_path / "nothing"))
    assert restart_options(away) == f" --var-dir {tmp_path}/away" and found_with(restart_options(away)) == away


def test_the_commands_and_the_page_put_it_in_the_same_words(runs: ExitStack) -> None:
    started(runs, Path("var"), "lone-1")
    two = started(runs, Path("var"), "lone-2")
    sentence = "`swarm restart alpha-trainer --run lone-2` starts it again (with `--now` if it hangs)"
    assert starts_again("alpha-trainer", restart_options(two)) == sentence
    assert remedies(["alpha-trainer"], two) == [sentence]
