"""Files appear complete or not at all, whoever reads, writes or runs out of space meanwhile."""

from __future__ import annotations

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared import atomic_files
from shared.atomic_files import create_once, replace_text, write_all


def test_a_reader_sees_one_text_or_the_other(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "file"
    texts = ["a" * 300_000, "ü" * 200_000]
    replace_text(file, texts[0])
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(lambda: [replace_text(file, texts[turn % 2]) for turn in range(100)])
        seen = {file.read_text(encoding="utf-8") for _ in range(100)}
        writing.result()
    assert seen <= set(texts)
    assert [each.name for each in file.parent.iterdir()] == ["file"]


def test_on_a_full_disk_the_earlier_text_stays_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a real full disk, which needs the superuser: the call that writes fails as one does."""
    file = tmp_path / "file"
    replace_text(file, "earlier")

    def full(block: memoryview, write: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_files, "write_all", full)
    with pytest.raises(OSError):
        replace_text(file, "later")
    assert file.read_text() == "earlier" and list(tmp_path.iterdir()) == [file]


def test_a_disk_that_is_full_only_when_the_file_is_closed_leaves_the_earlier_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system; not a real one, which is not to be had here."""
    file = tmp_path / "file"
    replace_text(file, "earlier")

    class Full(io.FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(atomic_files, "open", lambda path, *_, **__: Full(path, "xb"), raising=False)
    with pytest.raises(OSError, match="quota"):
        replace_text(file, "later")
    assert file.read_text() == "earlier" and list(tmp_path.iterdir()) == [file]


def test_of_several_that_create_a_file_one_does(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with ThreadPoolExecutor(8) as pool:
        new = list(pool.map(lambda number: create_once(file, b"%d" % number, mode=0o600), range(8)))
    assert new.count(True) == 1 and file.read_bytes() == b"%d" % new.index(True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_may_be_read_by_its_owner_alone_never_was_by_others(tmp_path: Path) -> None:
    file, before = tmp_path / "file", os.umask(0)
    try:
        replace_text(file, "for all")
        assert file.stat().st_mode & 0o777 == 0o666
        with atomic_files.draft_in(tmp_path, 0o600) as (_, draft):
            assert draft.stat().st_mode & 0o777 == 0o600
        replace_text(file, "for one", mode=0o600)
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_write_that_takes_a_part_is_followed_by_the_rest() -> None:
    written = bytearray()

    def write(block: memoryview) -> int:
        written.extend(block[:3])
        return min(3, len(block))

    write_all(memoryview(b"0123456789"), write)
    assert written == b"0123456789"
