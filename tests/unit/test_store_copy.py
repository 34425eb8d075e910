"""A run that somebody else made is looked at without following it out of its folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_cli.errors import CommandError
from swarm_cli.looking import store_copy
from swarm_cli.looking.store_copy import server_on_copy

STREAM = Path("jetstream/$G/streams/NODE_ALPHA_SCORED")


def link_out(stream: Path) -> None:
    (stream / "msgs").symlink_to("/etc")


def pipe(stream: Path) -> None:
    os.mkfifo(stream / "1.blk")


def linked_stream(stream: Path) -> None:
    stream.rmdir()
    stream.symlink_to("/etc")


def linked_account(stream: Path) -> None:
    account = stream.parents[1]
    account.rename(account.with_name("elsewhere"))
    account.symlink_to("elsewhere")


def endless_block(stream: Path) -> None:
    with (stream / "1.blk").open("wb") as file:
        file.truncate(2**40)  # and nothing of it takes room


def many_holes(stream: Path) -> None:
    for place in range(8):
        with (stream / f"{place}.blk").open("wb") as file:
            file.truncate(64 << 20)


def one_block_by_many_names(stream: Path) -> None:
    (stream / "0.blk").write_bytes(bytes(8 << 20))
    for place in range(1, 40):
        (stream / f"{place}.blk").hardlink_to(stream / "0.blk")


@pytest.mark.parametrize(
    "make", [link_out, pipe, linked_stream, linked_account, endless_block, many_holes, one_block_by_many_names]
)
def test_a_store_with_what_no_server_makes_is_not_copied(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "runs" / "given"
    (folder / STREAM).mkdir(parents=True)
    make(folder / STREAM)
    with pytest.raises(CommandError, match="no NATS server makes"), server_on_copy(folder, tmp_path):
        pass
    assert not list((tmp_path / "looks").glob("*"))


def test_a_store_that_would_fill_the_disk_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "large"
    (folder / STREAM).mkdir(parents=True)
    (folder / STREAM / "1.blk").write_bytes(bytes(1_000))
    monkeypatch.setattr(store_copy, "_SPARED_BYTES", shutil.disk_usage(tmp_path).total)
    monkeypatch.setattr(store_copy, "_FICLONE", 0)  # as on a file system whose files share no blocks
    with pytest.raises(CommandError, match=r"run large cannot be copied.*stay free"), server_on_copy(folder, tmp_path):
        pass
    assert not list((tmp_path / "looks").glob("*"))


def test_what_others_put_among_temporary_files_neither_hinders_a_look_nor_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, mine, folder = tmp_path / "tmp", tmp_path / "mine", tmp_path / "runs" / "given"
    for each in (temporary, mine, folder / STREAM):
        each.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    link_out(folder / STREAM)
    (mine / "lock").touch()
    (temporary / "swarm-look-link").symlink_to(mine)
    made = {name: temporary / f"swarm-look-{name}" for name in ("pipe", "linked", "other", "left")}
    for each in made.values():
        each.mkdir()
    os.mkfifo(made["pipe"] / "lock")
    (made["linked"] / "lock").symlink_to(mine / "lock")
    (made["other"] / "lock").touch()
    (made["left"] / "lock").touch()
    if os.geteuid() == 0:
        os.chown(made["other"], 65_534, 65_534)
    with pytest.raises(CommandError, match="no NATS server makes"), server_on_copy(folder, tmp_path):
        pass
    assert (mine / "lock").exists() and made["linked"].exists() and made["pipe"].exists()
    assert made["other"].exists() or os.geteuid() != 0
    assert not made["left"].exists(), "a killed command's"
