"""Displayed names of datasets that are somebody's own file: `questions.jsonl (3f2a91c0)`.

Such a dataset is named after a hash of its rows, and messages carry only that. The file's name is
known on this machine alone: from the records of the generators that read it, and from an entry of
the configuration that names the dataset. No other node can give a name to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from shared.plain_files import read_plain_end
from shared.run_records import FILE_NAMES_FILE, FILE_NAMES_MAX_BYTES, older
from shared.text import visible

CHARACTERS = 48
"""A longer file name is cut."""
NODES_READ = 64
_PREFIX, _DIGITS = "file_", 8
_NAMES_A_DATASET = 3


class _Line(msgspec.Struct, frozen=True):
    """One line of `files.jsonl`."""

    dataset: Annotated[str, Meta(pattern=rf"^{_PREFIX}[0-9a-f]{{40}}\Z")]
    file: str


class FileNames:
    """The names of files, by dataset. Nodes may have the same rows under several names."""

    def __init__(self, names: Mapping[str, Collection[str]] | None = None) -> None:
        """names: of each dataset, without folders. They may come from a copied run, so they are cut
        and made visible here.
        """
        self._names = {
            dataset: " or ".join(sorted({visible(name, CHARACTERS) for name in files})[:_NAMES_A_DATASET])
            for dataset, files in (names or {}).items()
        }

    def file(self, dataset: str) -> str:
        """The file's name; empty if the dataset is no file, or one whose name is not known here."""
        return self._names.get(dataset, "")

    def shown(self, dataset: str) -> str:
        """Return the displayed name of a dataset: a file by its name and the first digits of its
        hash, which tell two files of one name apart; any other dataset by its own name.
        """
        return with_digits(self.file(dataset), dataset)

    def meant(self, asked: str) -> frozenset[str]:
        """The datasets that a person may mean by a name: a dataset's own, a file's or what `shown`
        makes of it.
        """
        return frozenset({asked, *(dataset for dataset in self._names if asked in (self.file(dataset), self.shown(dataset)))})


UNNAMED = FileNames()


def with_digits(file: str, dataset: str) -> str:
    """A file's name and the first digits of its rows' hash; the dataset's name if `file` is
    empty.
    """
    return f"{file} ({dataset.removeprefix(_PREFIX)[:_DIGITS]})" if file else dataset


class NamedSource(Protocol):
    """The parts of a task source that name a file (`shared.config.TaskSpec`): what only looks at a
    run does without the whole configuration.
    """

    @property
    def source(self) -> str: ...
    @property
    def dataset(self) -> str: ...
    @property
    def file_name(self) -> str: ...


def file_names(run_folder: Path | None, sources: Iterable[NamedSource] = ()) -> FileNames:
    """The names that the generators of a run on this machine recorded (None: of no run), and those
    of the sources that name their dataset.
    """
    found: dict[str, set[str]] = {}
    for spec in sources:
        if spec.source == "file" and spec.dataset:
            found.setdefault(spec.dataset, set()).add(spec.file_name)
    for folder in _nodes(run_folder):
        for dataset, name in {line.dataset: line.file for line in _lines(folder)}.items():
            found.setdefault(dataset, set()).add(name)
    return FileNames(found)


def _nodes(run_folder: Path | None) -> list[Path]:
    """The nodes' folders; none if the run's cannot be read."""
    try:
        return [] if run_folder is None else sorted(run_folder.iterdir())[:NODES_READ]
    except OSError:
        return []


def _lines(folder: Path) -> Iterator[_Line]:
    """A node's lines, oldest first. What cannot be read names nothing."""
    file = folder / FILE_NAMES_FILE
    for path in (older(file), file):
        try:
            content, _ = read_plain_end(path, FILE_NAMES_MAX_BYTES)
        except OSError:
            continue
        for line in content.splitlines():
            try:
                yield msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
