"""A run that is started again by its name alone has the nodes and ports that it had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from shared.run_records import CHECKPOINT, CHECKPOINTS
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.up import resume_options
from swarm_cli.runs import RunNote, StartOptions, goes_on, write_end, write_note

DEFAULT = StartOptions()


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartOptions:
    """The options that the run `mine` was started with."""
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    options = StartOptions(1, ("gamma",), "/my node.toml", 31_460, "", 31_470)
    write_note(folder, RunNote("nats://127.0.0.1:31460", "none", options))
    return options


def test_what_is_not_given_is_as_the_run_last_had_it_and_is_named(before: StartOptions) -> None:
    given, added = resume_options(DEFAULT, "mine")
    assert given == before
    said = "--nodes 1 --name gamma --config '/my node.toml' --nats-port 31460 --base-port 31470"
    assert " ".join(added) == said


def test_what_is_given_counts_more_and_nothing_contradicts_it(before: StartOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    given, added = resume_options(StartOptions(nodes=2, nats_url="nats://hub:4222", config=str(DEMO_CONFIG)), "mine")
    assert given == StartOptions(2, (), str(DEMO_CONFIG), None, "nats://hub:4222", 31_470) and added == ["--base-port 31470"]
    monkeypatch.setenv("SWARM_CONFIG", str(DEMO_CONFIG))
    assert resume_options(DEFAULT, "mine")[0].config == ""


def test_names_that_are_given_are_as_many_nodes_as_they_are(before: StartOptions) -> None:
    assert resume_options(StartOptions(names=("a", "b", "c")), "mine")[0].nodes is None, "and not the one that the run had"


def test_a_new_run_and_one_that_was_no_swarm_up_take_nothing(before: StartOptions, tmp_path: Path) -> None:
    assert resume_options(DEFAULT, "") == resume_options(DEFAULT, "new") == (DEFAULT, [])
    write_note(tmp_path / "runs" / "mine", RunNote("nats://127.0.0.1:1", "none", "join"))
    assert resume_options(DEFAULT, "mine") == (DEFAULT, [])


@pytest.mark.parametrize(
    "note",
    [
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "goes_on": "swarm up --run mine --nodes 1"}',
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {"config": "relative.toml"}}',
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {"nodes": 65}}',
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {"names": ["Not A Name"]}}',
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {"names": [' + ", ".join(['"a"'] * 65) + "]}}",
        '{"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {"nats_port": ' + "9" * 5_000 + "}}",
    ],
)
def test_a_run_whose_note_this_version_does_not_write_is_gone_on_with_only_if_its_configuration_is_given(
    before: StartOptions, tmp_path: Path, note: str
) -> None:
    """Else it would go on with the demo's configuration, whatever it was started with."""
    (tmp_path / "runs" / "mine" / "up.json").write_text(note)
    with pytest.raises(CommandError, match=r"run mine .*another version wrote.*--config"):
        resume_options(DEFAULT, "mine")
    given = StartOptions(config=str(DEMO_CONFIG))
    assert resume_options(given, "mine") == (given, [])
    assert goes_on(tmp_path / "runs" / "mine") == "swarm up --run mine, with the options that it was started with"


def test_a_configuration_in_the_run_s_own_folder_is_used_only_if_it_is_given(
    before: StartOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    (folder / "c.toml").touch()
    (tmp_path / "outside.toml").symlink_to(folder / "c.toml")
    (folder / "link.toml").symlink_to(DEMO_CONFIG)
    (tmp_path / "runs" / "other").symlink_to(tmp_path / "runs" / "mine")
    for named in ("runs/mine/c.toml", "outside.toml", "runs/mine/link.toml", "runs/none/../mine/c.toml", "runs/other/c.toml"):
        write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions(1, config=f"{tmp_path}/{named}")))
        with pytest.raises(CommandError, match=r"lies in a run's folder.*--config"):
            resume_options(DEFAULT, "mine")
        assert resume_options(StartOptions(config=str(DEMO_CONFIG)), "mine")[0].config == str(DEMO_CONFIG)


@pytest.mark.parametrize(
    "options", [StartOptions(), StartOptions(1, config="/mine.toml"), StartOptions(64, nats_url="nats://stranger:4222")]
)
def test_a_copied_run_goes_on_only_with_a_configuration_that_is_given_and_takes_nothing_from_its_note(
    before: StartOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: StartOptions
) -> None:
    folder = tmp_path / "runs" / "mine"
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", options))
    shutil.copytree(folder, folder.with_name("given"))
    shutil.move(folder.with_name("given"), folder.with_name("moved"))
    with pytest.raises(CommandError, match=r"copied here.*opens their NATS store.*--config") as refused:
        resume_options(DEFAULT, "moved")
    assert all(word in str(refused.value) for word in options.words())
    assert resume_options(DEFAULT, "mine")[0] == options
    given = StartOptions(config=str(DEMO_CONFIG), nats_port=4333)
    assert resume_options(given, "moved") == (given, [])
    monkeypatch.setenv("SWARM_CONFIG", str(DEMO_CONFIG))
    assert resume_options(DEFAULT, "moved") == (DEFAULT, [])


def test_a_store_without_a_note_is_opened_only_with_a_configuration_that_is_given(before: StartOptions, tmp_path: Path) -> None:
    (tmp_path / "runs" / "gift" / "jetstream").mkdir(parents=True)
    with pytest.raises(CommandError, match=r"copied here.*--config"):
        resume_options(DEFAULT, "gift")
    given = StartOptions(config=str(DEMO_CONFIG))
    assert resume_options(given, "gift") == (given, [])


def test_a_run_whose_model_lies_where_it_was_started_goes_on_there_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the toy policy was built anew, and the run went on with two base policies."""
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    folder, started, other = tmp_path / "runs" / "mine", tmp_path / "started", tmp_path / "other"
    for each in (folder, started / "models" / "base", other):
        each.mkdir(parents=True)
    write_note(folder, RunNote("nats://127.0.0.1:31460", "none", StartOptions(), "mine", str(started)))
    monkeypatch.chdir(started)
    assert resume_options(DEFAULT, "mine")[0] == DEFAULT
    monkeypatch.chdir(other)
    with pytest.raises(CommandError, match="names models/base relative to that folder: start it there") as refused:
        resume_options(DEFAULT, "mine")
    assert str(started) in str(refused.value)
    monkeypatch.setenv("SWARM_MODEL__PATH", str(started / "models" / "base"))
    assert resume_options(DEFAULT, "mine")[0] == DEFAULT, "a whole path is the same from anywhere"


def test_the_number_of_steps_is_remembered_until_they_are_taken_and_the_command_then_asks_for_more(
    before: StartOptions, tmp_path: Path
) -> None:
    """The same number would end the run at once, whether `--steps` gave it or the configuration."""
    folder = tmp_path / "runs" / "mine"
    write_note(folder, RunNote("nats://127.0.0.1:31460", "none", structs.replace(before, steps=40), ends_after=40))
    assert resume_options(DEFAULT, "mine")[0].steps == 40 and "--steps 40" in goes_on(folder)
    assert resume_options(StartOptions(steps=60), "mine")[0].steps == 60
    assert resume_options(StartOptions(steps=0), "mine")[0].steps is None, "until Ctrl-C"
    write_end(folder, 130, None)
    assert resume_options(DEFAULT, "mine")[0].steps == 40, "it was stopped before"
    for node in ("gamma", "delta"):
        (folder / node / CHECKPOINTS / f"{CHECKPOINT}40").mkdir(parents=True)
        (folder / node / "trainer.log").touch()
    assert resume_options(DEFAULT, "mine")[0].steps is None, "it was stopped while the last policy was evaluated"
    assert "--steps 80" in goes_on(folder)
    (folder / "gamma" / CHECKPOINTS / f"{CHECKPOINT}90").mkdir()
    write_end(folder, 0, "progress")
    assert resume_options(DEFAULT, "mine")[0].steps is None and "--steps 180" in goes_on(folder)
    write_note(folder, RunNote("nats://127.0.0.1:31460", "none", before, ends_after=40))
    assert "--steps 180" in goes_on(folder), "of its configuration"
