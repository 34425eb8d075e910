"""Files of a data set on the Hugging Face hub, at one commit: `path = "hub:OWNER/NAME/PART"`. They
lie in the hub's cache, and are read like any other file.

The hub's own client fetches them: `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean
what they always do. A commit's files never change, so files that are in the cache are not asked
for again.
"""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from shared.hub_models import HUB, HUB_PATH, commit_hash, hub_data_problem, hub_unreached
from shared.suggestions import did_you_mean
from shared.tasks.file_formats import ABOUT, SUFFIXES, FileSourceError, data_files
from shared.text import listed, visible

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHARD = re.compile(r"(?:(.*?)[-_.])?(\d+)(?:-of-(\d+))?(?:-[0-9a-f]{16})?")
_PARTS_TOLD = 12
_CAUSE_CHARS = 200
_INSTEAD = "download the data set on another machine and give its file (`swarm new --data FILE`, or path in [[tasks]])"


def source_files(path: str, revision: str = "") -> list[Path]:
    """The files of a task source, in order; those of a hub data set are fetched.

    Raises:
        FileSourceError: there are none, or none that can be read as rows; with the cause and the
            remedy.
    """
    if path.startswith(HUB):
        return _HubData(path, revision).files()
    if _HUB_NAME.fullmatch(path) and Path(path).suffix not in SUFFIXES and not Path(path).exists():
        raise FileSourceError(
            f"{path}: no such file or folder (from {Path.cwd()}): correct `path`; a data set of the hub is written "
            f'path = "{HUB}{path}"'
        )
    return data_files(Path(path))


def newest_commit(path: str) -> dict[str, str]:
    """The `path` and `revision` of a hub data set at its newest commit. Its part, unless the path
    names one, is the only one, or the only one that is called `train`.

    Raises:
        FileSourceError: the hub cannot be asked, or several parts may be meant.
    """
    data = _HubData(path, "")
    data.revision = data.asked(lambda hub: str(hub.HfApi().dataset_info(data.name).sha))
    parts = data.parts(data.listing())
    if not data.part and len(parts) > 1 and len(found := _training(parts)) == 1:
        (data.part,) = found
    # Named in full, so that a later start finds the files in the cache without asking.
    return {"path": f"{HUB}{data.name}/{data.meant(parts)[0]}", "revision": data.revision}


class _HubData:
    """A data set of the hub, and the part of it that is meant."""

    def __init__(self, path: str, revision: str) -> None:
        """Raises FileSourceError: the path names none."""
        if (found := HUB_PATH.fullmatch(path)) is None:
            raise FileSourceError(hub_data_problem(path, revision))
        self.path, self.revision = path, revision
        self.name, self.part = found[1], found[2] or ""

    def files(self) -> list[Path]:
        if problem := hub_data_problem(self.path, self.revision):
            raise FileSourceError(problem)
        _, names = self.meant(self.parts(self.listing()))
        exact = [glob.escape(name) for name in names]
        folder = self.asked(
            lambda hub: hub.snapshot_download(self.name, repo_type="dataset", revision=self.revision, allow_patterns=exact)
        )
        return [Path(folder) / name for name in names]

    def listing(self) -> list[str]:
        """Names of its files at the commit, which the client keeps once it has fetched one."""

        def names(hub: Any) -> list[str]:
            place = {"repo_type": "dataset", "revision": self.revision}
            with suppress(hub.errors.CachedRepoTreeNotFoundError):
                return [file.path for file in hub.get_cached_repo_tree(self.name, **place)]
            if isinstance(hub.try_to_load_from_cache(self.name, self.part or "-", **place), str):
                return [self.part]  # another program fetched this file alone
            return [str(name) for name in hub.HfApi().list_repo_files(self.name, **place)]

        return self.asked(names)  # type: ignore[no-any-return]

    @staticmethod
    def parts(names: Iterable[str]) -> dict[str, list[str]]:
        """The files that hold rows, by part: `main/train` for `main/train-00000-of-00002.parquet`
        and its like. Files with numbers are one part if they count on from 0 or 1.
        """
        numbered: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        parts: dict[str, list[str]] = {}
        for file in sorted(PurePosixPath(name) for name in names):
            if file.suffix not in SUFFIXES or file.name in ABOUT:
                continue
            shard = _SHARD.fullmatch(file.stem)
            if shard is None:
                part = str(file.with_suffix(""))
                parts[str(file) if part in parts else part] = [str(file)]  # the same rows in two formats, perhaps
            else:
                numbered[str(file.parent / shard[1]) if shard[1] else str(file.parent), file.suffix].append(
                    (int(shard[2]), str(file))
                )
        for (part, _), found in numbered.items():
            numbers = sorted(number for number, _ in found)
            counts_on = numbers in (list(range(len(found))), list(range(1, len(found) + 1)))
            if part not in parts and counts_on and (len(found) > 1 or _is_shard(found[0][1])):
                parts[part] = [name for _, name in sorted(found)]
            else:
                parts.update((str(PurePosixPath(name).with_suffix("")), [name]) for _, name in found)
        return parts

    def meant(self, parts: dict[str, list[str]]) -> tuple[str, list[str]]:
        """The part that is meant, in full, and its files. Raises FileSourceError."""
        if not parts:
            raise FileSourceError(
                f"{self.path}: the data set holds no {', '.join(SUFFIXES)} file at commit {self.revision[:12]}: use one with such "
                "files, or load it with `datasets`, save it with save_to_disk, and give the folder"
            )
        alike = [self.part] if self.part in parts else [part for part in parts if self._may_be(part, parts[part])]
        if len(alike) == 1:
            (part,) = alike
            found = [self.part] if self.part in parts[part] else parts[part]
            if found == parts[part] and not _is_whole(found):
                raise FileSourceError(
                    f"{self.path}: only {len(found)} of its files are there: fetch it again with the hub in reach"
                )
            return part, found
        near = did_you_mean(self.part, parts) if self.part else ""
        what = "it has no such part, only" if self.part and not alike else "it holds several parts,"
        told = f"{_told(alike or parts)}{f' ({near})' if near else ''}"
        raise FileSourceError(f"{self.path}: {what} {told}: name one{self._proposed(alike or parts)}")

    def _may_be(self, part: str, names: Sequence[str]) -> bool:
        """Check whether a part may be meant: by one of its files, or some of its words in order."""
        rest = iter(part.split("/"))
        return self.part in names or all(word in rest for word in self.part.split("/") if word)

    def _proposed(self, parts: Iterable[str]) -> str:
        """The path of the part to train on, if its name says so; never another."""
        found = _training(parts)
        return f', path = "{HUB}{self.name}/{found[0]}"' if len(found) == 1 else ""

    def asked(self, ask: Any) -> Any:
        """Ask the hub's client. Raises FileSourceError."""
        try:
            import huggingface_hub as hub
        except ImportError:
            raise FileSourceError(
                f"{self.path}: the hub's client is not installed: pip install huggingface_hub, or download the data set and give "
                "its folder"
            ) from None
        from huggingface_hub import errors

        at = f" at commit {self.revision[:12]}" if self.revision else ""
        try:
            return ask(hub)
        except errors.GatedRepoError:
            why = "its owner lets in whoever accepts the conditions: accept them on its page and set HF_TOKEN (`hf auth login`)"
        except errors.RepositoryNotFoundError:
            why = (
                "the hub has no data set of this name, or it is private: check the spelling; for a private one set HF_TOKEN "
                "(`hf auth login`)"
            )
        except errors.RevisionNotFoundError:
            why = f"it has no such commit{at}: set revision to {commit_hash(self.name, 'dataset')}"
        except Exception as error:  # noqa: BLE001 (the hub's client passes on the errors of all its layers)
            response = getattr(error, "response", None)
            if getattr(response, "status_code", 0) in (401, 403):
                why = "the hub refuses access: set HF_TOKEN to a token that may read it (`hf auth login`)"
            elif not (why := visible(hub_unreached(error, _INSTEAD), 4 * _CAUSE_CHARS)):
                cause = visible((str(error).strip().splitlines() or [type(error).__name__])[0], _CAUSE_CHARS)
                why = f"the hub does not give its files{at} ({cause}): try again, or {_INSTEAD}"
        raise FileSourceError(f"{self.path}: {why}")


def _is_shard(name: str) -> bool:
    """Check whether one file has a part's name with a number: `0000`, `train-00000-of-00001`."""
    shard = _SHARD.fullmatch(PurePosixPath(name).stem)
    return shard is not None and (not shard[1] or shard[3] is not None)


def _is_whole(names: Sequence[str]) -> bool:
    """Check the number of files that their names give, `00000-of-00002`."""
    shards = [_SHARD.fullmatch(PurePosixPath(name).stem) for name in names]
    return all(shard is None or shard[3] is None or int(shard[3]) == len(names) for shard in shards)


def _training(parts: Iterable[str]) -> list[str]:
    return [part for part in parts if "train" in re.split(r"[\W_]+", part.casefold())]


def _told(parts: Iterable[str]) -> str:
    return listed(sorted(parts), _PARTS_TOLD, 60)
