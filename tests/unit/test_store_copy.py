"""A run that somebody else made is looked at without following it out of its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_cli.errors import CommandError
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


@pytest.mark.parametrize("make", [link_out, pipe, linked_stream, linked_account])
def test_a_store_with_what_no_server_makes_is_not_copied(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "runs" / "given"
    (folder / STREAM).mkdir(parents=True)
    make(folder / STREAM)
    with pytest.raises(CommandError, match="no NATS server made"), server_on_copy(folder, tmp_path):
        pass
    assert not list((tmp_path / "looks").glob("*"))
