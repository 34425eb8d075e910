"""Which verifier is said to have scored a run's answers: the one of the run's own configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from shared.config import ConfigError, load_config
from shared.contracts.messages import ScoredGroup
from shared.run_records import CHECKPOINTS
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.model.evaluate import evaluate
from swarm_cli.rollouts.judge import Judged, judge_of
from swarm_cli.runs import RunNote, StartOptions, write_note
from tests.unit.page_batches import item


def scored() -> ScoredGroup:
    return item("alpha", "alpha", 1.0).scored


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started with a configuration whose verifier is `exact`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    (tmp_path / "ex.toml").write_text('[[tasks]]\ndataset = "gcd"\nverifier = "exact"\n')
    folder = tmp_path / "runs" / "ex"
    folder.mkdir(parents=True)
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config=f"{tmp_path}/ex.toml")))
    return folder


def rules(given: Path | None = None, run: str = "ex") -> str:
    return judge_of(load_config(given or DEMO_CONFIG), given, run).rules(scored())


def test_a_runs_answers_are_judged_by_the_configuration_that_it_was_started_with(folder: Path) -> None:
    assert rules() == "exact" and rules(Path("ex.toml")) == "exact"
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions()))
    assert rules() == "reasoning_gym", "the demo's, with which it was started"


def test_a_reward_of_a_file_is_named_without_its_folder_and_gets_all_of_the_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def short(answer, reference):\n    return 1.0\n")
    judged = {}
    for line in ('reward = "rewards.py:short"', 'verifier = "math"'):
        (tmp_path / "ex.toml").write_text(f'[[tasks]]\ndataset = "gcd"\n{line}\n')
        found = judge_of(load_config(Path("ex.toml")), Path("ex.toml"), "ex").of(scored(), 0, r"\boxed{19}, not 3", 1.0)
        judged[line] = (found.verifier, found.read_as)
    assert list(judged.values()) == [("reward rewards.py:short", None), ("math", "19")]


def test_a_run_keeps_what_it_was_judged_by_after_its_configuration_was_edited(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(answer, reference):\n    return 1.0\n\nshort = right\n")
    both = 'rewards = [{use = "rewards.py:right"}, {use = "rewards.py:short", weight = 0.1}]'

    def judged(entry: str, before: ScoredGroup) -> Judged:
        (tmp_path / "ex.toml").write_text(f'[[tasks]]\ndataset = "gcd"\n{entry}\n')
        return judge_of(load_config(Path("ex.toml")), None, "ex").of(before, 0, r"\boxed{19}, not 3", 1.0)

    (tmp_path / "ex.toml").write_text(f'[[tasks]]\ndataset = "gcd"\n{both}\n')
    spec = load_config(Path("ex.toml")).tasks[0]
    group = replace(scored(), scorer=spec.scorer_id, parts={"rewards.py:right": [1.0], "rewards.py:short": [1.0]})
    assert judged(both, group).verifier == "reward rewards.py:right + 0.1 * rewards.py:short"
    edited = judged('reward = "rewards.py:right"', group)
    assert "rewards.py:short" in edited.verifier and "has changed since" in edited.verifier and edited.read_as is None
    assert judged('verifier = "math"', replace(group, parts={})).verifier.startswith("not known: ")


def test_another_configuration_is_named_where_it_is_the_one_that_tells(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[[tasks]]\ndataset = "gcd"\nverifier = "math"\n')
    assert rules(Path("other.toml")) == "math (by other.toml; --config names another)"
    assert rules(run="").startswith("reasoning_gym (by ") and "demo.toml; --config names another)" in rules(run="")
    note = folder / "up.json"
    note.write_text(note.read_text().replace("ex.toml", "other.toml"))
    assert rules().startswith("reasoning_gym (by "), "somebody else may have written the note"
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config=f"{tmp_path}/gone.toml")))
    assert rules().startswith("reasoning_gym (by "), "the file is gone"
    (tmp_path / "ex.toml").rename(tmp_path / "gone.toml")
    assert rules() == "exact"
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config="gone.toml")))
    assert rules().startswith("reasoning_gym (by "), "in which folder, the note does not say"


def test_the_reward_of_a_run_of_another_folder_is_not_that_of_this_one(folder: Path, tmp_path: Path) -> None:
    assert rules(run="elsewhere").startswith("not known: run elsewhere ")
    assert rules(Path("ex.toml"), run="elsewhere").startswith("exact (by ex.toml")
    judge = judge_of(load_config(DEMO_CONFIG), None, "elsewhere")
    with pytest.raises(CommandError, match="--config"):
        asyncio.run(judge.score_again([scored()]))
    away = tmp_path / "away" / "var" / "runs" / "elsewhere"
    away.mkdir(parents=True)
    write_note(away, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config=f"{tmp_path}/ex.toml")))
    with holding_run(away):
        assert rules(run="elsewhere") == "exact", "by its own configuration, as it is running on this machine"


def test_a_nodes_policy_is_evaluated_by_the_configuration_that_its_run_was_started_with(folder: Path, tmp_path: Path) -> None:
    """Of a file that is gone, which says which file it was."""
    (folder / "alpha" / CHECKPOINTS).mkdir(parents=True)
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config=f"{tmp_path}/gone.toml")))
    with pytest.raises(ConfigError, match="gone.toml does not exist"):
        evaluate(str(folder / "alpha"))
    write_note(folder, RunNote("nats://127.0.0.1:4222", "none", StartOptions(config=f"{folder}/gone.toml")))
    with pytest.raises(CommandError, match="no checkpoint"):
        evaluate(str(folder / "alpha"))
