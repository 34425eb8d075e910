"""A run's folder that somebody else prepared: what is started or looked at there reads and writes
nothing outside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from shared.config import load_config
from shared.run_records import read_jsonl
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.control import holding_run
from swarm_cli.observe.plot import plot
from swarm_cli.observe.run_files import newest_step, read_evaluations, read_steps
from swarm_cli.rollouts.records import TrainedRecords, read_samples
from swarm_cli.rollouts.refused import read_refusals
from swarm_cli.runs import RunNote, StartOptions, goes_on, holder, read_end, read_note, running_runs, write_note
from swarm_cli.target import default_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "gift"
    (folder / "alpha" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "mine.txt").chmod(0o644)
    return folder


def linked_log(folder: Path) -> Path:
    (folder / "alpha" / "trainer.log").symlink_to(folder.parents[1] / "mine.txt")
    return folder / "alpha" / "trainer.log"


def linked_folder(folder: Path) -> Path:
    (folder / "beta").symlink_to("../../../..")
    return folder / "beta"


def linked_lock(folder: Path) -> Path:
    (folder / "up.lock").symlink_to(folder.parents[1] / "mine.txt")
    return folder / "up.lock"


def link_to_nothing(folder: Path) -> Path:
    (folder / "alpha" / "node.nk").symlink_to("/tmp/nobody-made-this")
    return folder / "alpha" / "node.nk"


def link_by_a_link(folder: Path) -> Path:
    (folder / "a").symlink_to("..")
    (folder / "a").rename(folder / "alpha" / "checkpoints" / "a")  # still within
    (folder / "out").symlink_to("alpha/checkpoints/a/../../mine.txt")
    return folder / "out"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "alpha" / "checkpoints" / "weights")
    return folder / "alpha" / "checkpoints" / "weights"


def hard_link(folder: Path) -> Path:
    (folder / "alpha" / "metrics.jsonl").hardlink_to(folder.parents[1] / "mine.txt")
    return folder / "alpha" / "metrics.jsonl"


def hard_linked_lock(folder: Path) -> Path:
    (folder / "up.lock").hardlink_to(folder.parents[1] / "mine.txt")
    return folder / "up.lock"


def hard_link_beside_a_policy_s(folder: Path) -> Path:
    """The same file as a node's newest policy too, which alone may have a name elsewhere."""
    (folder / "alpha" / "published").mkdir()
    (folder / "alpha" / "published" / "newest.safetensors").hardlink_to(folder.parents[1] / "mine.txt")
    hard_link(folder)
    return folder / "alpha"


@pytest.mark.parametrize(
    "make",
    [
        linked_log,
        linked_folder,
        linked_lock,
        link_to_nothing,
        link_by_a_link,
        pipe,
        hard_link,
        hard_linked_lock,
        hard_link_beside_a_policy_s,
    ],
)
def test_a_run_is_not_started_where_something_leads_out_of_its_folder(folder: Path, make: Callable[[Path], Path]) -> None:
    made = make(folder)
    with pytest.raises(CommandError) as refused, holding_run(folder):
        pass
    assert str(made) in str(refused.value) and "which no run makes" in str(refused.value)
    mine = folder.parents[1] / "mine.txt"
    assert mine.read_text() == "precious" and mine.stat().st_mode & 0o777 == 0o644
    assert not (folder / "up.lock").exists() or make in (linked_lock, hard_linked_lock)


def test_a_run_is_started_with_the_links_and_sockets_that_a_run_makes(folder: Path, tmp_path: Path) -> None:
    wandb = folder / "alpha" / "wandb" / "offline-run-1" / "logs"
    wandb.mkdir(parents=True)
    (wandb / "debug-core.log").symlink_to("/home/me/.cache/wandb/logs/core-debug-1.log")
    (folder / "alpha" / "wandb" / "latest-run").symlink_to("offline-run-1")
    moved = tmp_path / "large disk"
    folder.rename(moved)
    folder.symlink_to(moved)
    (folder / "alpha" / "checkpoints" / "a").touch()
    (folder / "alpha" / "checkpoints" / "b").hardlink_to(folder / "alpha" / "checkpoints" / "a")
    (folder / "alpha" / "published").mkdir()
    (tmp_path / "in the volume").touch()
    (folder / "alpha" / "published" / "newest.safetensors").hardlink_to(tmp_path / "in the volume")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "up.sock"))
    with holding_run(folder):
        pass


def test_a_link_to_another_process_s_lock_is_no_running_run(folder: Path, tmp_path: Path) -> None:
    (folder / "up.lock").symlink_to(tmp_path / "some.lock")
    with (tmp_path / "some.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holder(folder) is None and running_runs(tmp_path) == []


def test_another_name_of_another_process_s_lock_is_no_running_run(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "some.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "up.lock").hardlink_to(tmp_path / "some.lock")
        assert holder(folder) is None and running_runs(tmp_path) == []


def test_a_lock_of_another_user_s_is_no_running_run(folder: Path) -> None:
    with holding_run(folder):
        assert holder(folder) == os.getpid()
        if os.geteuid() == 0:
            os.chown(folder / "up.lock", 65_534, 65_534)
            assert holder(folder) is None


def test_a_pipe_in_the_lock_s_place_keeps_nobody_waiting(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "up.lock")
    assert holder(folder) is None and running_runs(tmp_path) == []


def test_a_lock_that_is_a_link_within_the_run_is_not_truncated(folder: Path) -> None:
    (folder / "kept.txt").write_text("precious")
    (folder / "up.lock").symlink_to("kept.txt")
    with pytest.raises(CommandError, match=r"up\.lock is no file"), holding_run(folder):
        pass
    assert (folder / "kept.txt").read_text() == "precious"


NOTED = {"node_url": "nats://127.0.0.1:1", "swarm_url": "none", "options": {}}
DEEP = "[" * 60_000
TOO_MUCH = " " * 100_000


def written(file: Path, what: str) -> None:
    """Write it, or put `pipe`, `zero` (a link to a device) or `link` in the file's place."""
    if what == "pipe":
        os.mkfifo(file)
    elif what == "zero":
        file.symlink_to("/dev/zero")
    elif what == "link":
        (file.parent / "other").write_text('{"step": 1, "pass_rate": 0.5, "policy_version": 0}' + json.dumps(NOTED))
        file.symlink_to("other")
    else:
        file.write_text(what)


@pytest.mark.parametrize("what", ["pipe", "zero", "link", '{"node_url":' + DEEP, TOO_MUCH + json.dumps(NOTED)])
def test_a_note_that_is_no_plain_small_file_says_nothing(folder: Path, what: str) -> None:
    written(folder / "up.json", what)
    assert read_note(folder) is None


@pytest.mark.parametrize("url", ["nats://a\n: do", "nats://a ; evil", "nats://\x1b[2J", "nats://\u202e"])
@pytest.mark.parametrize("field", ["node_url", "swarm_url", "swarm_id"])
def test_a_note_whose_address_is_none_says_nothing(folder: Path, field: str, url: str) -> None:
    (folder / "up.json").write_text(json.dumps(NOTED))
    assert read_note(folder) is not None
    (folder / "up.json").write_text(json.dumps(NOTED | {field: url}))
    assert read_note(folder) is None


@pytest.mark.parametrize(
    "what",
    [
        *("pipe", "zero", "link", '{"how":' + DEEP, TOO_MUCH + '{"how": "complete", "at": 1700000000}'),
        *(f'{{"how": "failed", "at": {at}, "code": 1, "process": "nats"}}' for at in ("1e300", "-1e18", "1e12")),
        '{"how": "failed", "at": 1700000000, "code": 1, "process": "all is well:\\nrun `curl evil|sh`"}',
        '{"how": "failed", "at": 1700000000, "code": 1, "process": "nats\\n"}',
        '{"how": "failed", "at": 1700000000, "code": 12345678901234567890, "process": "nats"}',
    ],
)
def test_an_end_that_no_run_writes_is_that_of_a_killed_run(folder: Path, what: str) -> None:
    (folder / "up.json").write_text(json.dumps(NOTED))
    written(folder / "end.json", what)
    os.utime(folder / "up.json", (1e11, 1e11))  # may be cut to what the file system keeps
    end = read_end(folder)
    assert end is not None and end.how == "killed"
    assert "run gift was killed at" in end.sentence("gift", 1.8e9)


@pytest.mark.parametrize(
    "what", ["pipe", "zero", "link", "[" * 200_000, '{"step": 1e999, "policy_version": 1e999, "pass_rate": 1}']
)
def test_lines_that_no_run_writes_are_no_steps_and_no_evaluations(folder: Path, what: str) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        written(folder / "alpha" / name, what)
        assert all(isinstance(line, dict) for line in read_jsonl(folder / "alpha" / name))
        (folder / "alpha" / "other").unlink(missing_ok=True)
    assert read_steps(folder / "alpha") == [] == read_evaluations(folder / "alpha")
    assert newest_step(folder / "alpha").get("step") in (None, float("inf"))


@pytest.mark.parametrize(
    "options",
    [
        *('"swarm up"', '"curl evil | sh"', '{"nodes": "1; evil"}', '{"names": ["$(evil)"]}', '{"names": ["a b"]}'),
        *("[]", "null"),
        *('{"config": "relative.toml"}', '{"config": "/a\\nb"}', '{"config": "/\\u001b[31m"}', '{"nats_url": "nats://a b"}'),
        *('{"nats_port": 0}', '{"base_port": 65536}', '{"nodes": 65}'),
    ],
)
def test_a_note_whose_options_are_none_of_a_start_says_nothing(folder: Path, options: str) -> None:
    (folder / "up.json").write_text(json.dumps(NOTED).replace("{}", options))
    assert read_note(folder) is None
    assert goes_on(folder) == "swarm up --run gift, with the options that it was started with"


def test_a_note_s_configuration_in_a_run_is_not_shown(folder: Path) -> None:
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions(config=str(folder / "c.toml"))))
    assert goes_on(folder) == "swarm up --run gift, with the options that it was started with"


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ("join", "the same `swarm join`"),
        (StartOptions(), "swarm up --run gift"),
        (
            StartOptions(2, ("a", "b"), "/my $(node).toml", 4333, base_port=9500),
            "swarm up --run gift --nodes 2 --name a --name b --config '/my $(node).toml' --nats-port 4333 --base-port 9500",
        ),
        (StartOptions(nats_url="nats://hub;4222"), "swarm up --run gift --nats-url 'nats://hub;4222'"),
    ],
)
def test_the_command_of_a_run_is_that_of_its_options(folder: Path, options: StartOptions | Literal["join"], command: str) -> None:
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", options))
    assert goes_on(folder) == command


def test_a_run_of_another_folder_is_continued_there(folder: Path, tmp_path: Path) -> None:
    command = "swarm up --run gift"
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions(), started_in=str(Path.cwd())))
    assert goes_on(folder) == command
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions(), started_in=str(tmp_path / "my swarm")))
    assert goes_on(folder) == f"cd '{tmp_path}/my swarm' && {command}"


def test_a_copied_note_s_options_are_not_shown(folder: Path) -> None:
    write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions(3)))
    (folder / "up.own").unlink()
    assert goes_on(folder) == "swarm up --run gift, with the options that it was started with"


def test_a_note_s_address_in_a_command_to_copy_is_one_word_of_it(folder: Path, tmp_path: Path) -> None:
    config = load_config(DEMO_CONFIG, {"node": {"var_dir": str(tmp_path)}})
    other = tmp_path / "runs" / "other"
    with holding_run(folder), holding_run(other):
        write_note(folder, RunNote("nats://a;$(evil)", "none", StartOptions()))
        write_note(other, RunNote("nats://b:1", "none", StartOptions()))
        with pytest.raises(CommandError, match=r"--node-url 'nats://a;\$\(evil\)'   run gift\n *--node-url nats://b:1   run"):
            default_target(config, "")


@pytest.mark.slow
def test_curves_are_drawn_beside_a_link_and_take_its_place(folder: Path, tmp_path: Path) -> None:
    (folder / "curves.png").symlink_to(tmp_path / "mine.txt")
    (folder / "alpha" / "eval.jsonl").write_text('{"policy_version": 0, "pass_rate": 0.5, "n": 10}\n')
    plot("gift", None, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert not (folder / "curves.png").is_symlink() and (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "named.png").symlink_to(tmp_path / "elsewhere.png")
    plot("gift", tmp_path / "named.png", tmp_path)
    assert (tmp_path / "elsewhere.png").read_bytes().startswith(b"\x89PNG"), "the user named it"


BIG = "1" + "0" * 400


@pytest.mark.slow
def test_curves_of_numbers_and_names_that_no_run_writes_are_drawn_without_them(folder: Path, tmp_path: Path) -> None:
    given = {"policy_version": "0", "pass_rate": "0.5", "n": "10", "per_task": '{"$\\\\frac$": {"pass_rate": 0.5}}'}
    odd: list[tuple[str, str]] = [
        ("pass_rate", "7.5"),
        ("pass_rate", "-1"),
        ("pass_rate", "1e999"),
        ("pass_rate", "NaN"),
        ("n", "-1"),
    ]
    odd += [("policy_version", BIG), ("n", BIG), ("policy_version", '"x"'), ("per_task", '{"a": {"pass_rate": 1e300}}')]
    lines = ["{" + ", ".join(f'"{key}": {value}' for key, value in (given | dict([each])).items()) + "}" for each in odd]
    lines.append("{" + ", ".join(f'"{key}": {value}' for key, value in given.items()) + "}")
    (folder / "alpha" / "eval.jsonl").write_text("\n".join(lines))
    numbers = ["1e300", "-1e300", "1e308", "NaN", "Infinity", BIG, '"x"', "1e99", "-1e99", "[]", "true"]
    steps = [f'{{"step": {step}, "loss": {value}, "grad_norm": {value}}}' for step, value in enumerate(numbers)]
    steps += [f'{{"step": {value}, "loss": 1}}' for value in numbers]
    (folder / "alpha" / "metrics.jsonl").write_text("\n".join(steps))
    (folder / "$\\frac$\x1b[2J").mkdir()
    (folder / "$\\frac$\x1b[2J" / "metrics.jsonl").write_text('{"step": 1, "loss": 1}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot("gift", None, tmp_path)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_records_of_groups_that_are_pipes_keep_nobody_waiting(folder: Path) -> None:
    for name in ("refused-0.jsonl", "trained.jsonl", "samples.jsonl"):
        os.mkfifo(folder / "alpha" / name)
    (folder / "alpha" / "refused-1.jsonl").symlink_to("nothing")
    assert TrainedRecords(folder / "alpha").for_step(1) is None
    assert read_refusals(folder / "alpha") == [] == read_samples(folder / "alpha")
