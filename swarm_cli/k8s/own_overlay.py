"""`swarm k8s overlay`: a cluster's overlay in a folder of its own, outside the tree.

It has the form of `k8s/overlays/cluster`, and takes everything else from the tree by its address or
its path. The folder belongs to its owner: a second run adds nodes, follows another version of the
tree, and copies the images' digests, and leaves all other lines as they are.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from shared.contracts.subjects import node_rollouts_stream
from shared.text import error_text
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.k8s.key_state import split_nodes
from swarm_cli.k8s.secret_objects import checked_namespace
from swarm_cli.replace_file import replace_file

_TREE = Path(__file__).resolve().parents[2]
_CLUSTER = _TREE / "k8s" / "overlays" / "cluster"
_IMAGES = _TREE / "k8s" / "components" / "images"
_TOP = "kustomization.yaml"
_EXAMPLE = "alpha"
_NO_DIGEST = "sha256:" + "0" * 64
_PART = re.compile(r"^( *(?:# )?- )\S*?((?:base|components)/[\w-]+)(\?\S+)?$", re.MULTILINE)
"""A line that names a part of the tree, switched on or off: what is before it, the part, and the
version of an address.
"""
_NODE = re.compile(r"^  - nodes/([\w-]+)$", re.MULTILINE)
_BASE = re.compile(r"^ *- (\S*?)/k8s/base/nats(\?\S+)?$", re.MULTILINE)


def overlay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The overlay's folder; made if it is missing.")],
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", help="Nodes, separated by commas; those that the overlay lacks are added."),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            help="The tree that it takes the rest from: a folder, or an address with a version "
            "(https://example.org/swarm?ref=v0.1.0).  [default: that of the overlay, or this tree]"
        ),
    ] = "",
    namespace: Annotated[str, typer.Option(help="The namespace of a new overlay.")] = "swarm",
) -> None:
    """Write a cluster's overlay into a folder of your own, outside this tree.

    It has the form of k8s/overlays/cluster, with your nodes. Run it again to add a node, to follow
    another version (`--base`), or after `make images PUSH=1`, whose digests it copies. It changes
    no other line of yours, and removes none.
    """
    if not _CLUSTER.is_dir():
        raise CommandError(f"{_CLUSTER} is missing: run the command of a checkout (`make venv`), which has the manifests")
    if folder.resolve().is_relative_to(_TREE / "k8s"):
        raise CommandError(f"{folder} is in the tree's own k8s: give a folder outside it")
    asked, guests = split_nodes(nodes) if nodes is not None else ([], {})
    if guests:
        raise CommandError(f"--nodes gives a key to {next(iter(guests))}, a node outside: name it to `swarm k8s secrets` alone")
    if bad := [name for name in asked if name != name.lower() or not name.replace("-", "").isalnum() or name.endswith("-")]:
        raise CommandError(f"--nodes {bad[0]!r}: objects of Kubernetes need small letters, digits and hyphens: rename the node")
    try:
        _write(folder, asked, base, checked_namespace(namespace))
    except OSError as error:
        raise CommandError(f"{folder} cannot be written ({error_text(error)}): give a folder of this user") from None


def _write(folder: Path, asked: list[str], base: str, namespace: str) -> None:
    top, new = folder / _TOP, not (folder / _TOP).exists()
    if new and not asked:
        raise CommandError(f"{folder} has no overlay yet: name its nodes (--nodes alpha,beta)")
    text = _new_top(namespace) if new else top.read_text()
    there = _NODE.findall(text)
    if not new and not there:
        raise CommandError(f"{top} has no line `  - nodes/NAME`, after which nodes are added: write one, or give another folder")
    before = _BASE.search(text)
    root = base or ("" if new or before is None else f"{before[1]}{before[2] or ''}")
    if not base and root and "://" not in root:  # a path, as it was from the overlay's folder
        root = str((folder / root).resolve())
    root = root or str(_TREE)
    if "://" not in root and not (Path(root) / "k8s" / "base").is_dir():
        raise CommandError(f"--base {root} has no folder k8s/base: give the tree's folder, or an address with ://")
    if "://" in root and "?ref=" not in root:
        raise CommandError(
            f"--base {root} names no version: add ?ref= and a tag or a commit, so that an upgrade is a change of yours"
        )

    missing = [name for name in asked if name not in there]
    if missing:
        last = list(_NODE.finditer(text))[-1:] if there else []
        lines = "".join(f"  - nodes/{name}\n" for name in missing)
        at = last[0].end() + 1 if last else text.index("components:\n")
        text = text[:at] + lines + text[at:]
    (folder / "every-node").mkdir(parents=True, exist_ok=True)
    replace_file(top, text)
    if not (every := folder / "every-node" / _TOP).exists():
        replace_file(every, (_CLUSTER / "every-node" / _TOP).read_text())
    for name in missing:
        _add_node(folder / "nodes" / name, name)
    _copy_images(folder / "images")
    for file in sorted(folder.glob("**/kustomization.yaml")):
        was = file.read_text()
        text = _PART.sub(lambda found, at=file.parent: _reference(found, at, root), was)  # type: ignore[misc]
        if text != was:
            replace_file(file, text)

    note(f"{folder}: nodes {', '.join([*there, *missing])}; everything else from {root}")
    if left := [name for name in there if asked and name not in asked]:
        note(f"still in it, though not among --nodes: {', '.join(left)}: to remove a node, see docs/kubernetes-change.md")
    if lacks := _parts(_CLUSTER / _TOP) - _parts(top) - {"components/images"}:
        note(f"this version's cluster overlay also names {', '.join(sorted(lacks))}: add each to {top}, switched on or off")


def _new_top(namespace: str) -> str:
    """The cluster overlay's own, without its nodes and its first comment."""
    text = (_CLUSTER / _TOP).read_text()
    text = text[text.index("apiVersion:") :]
    text = _NODE.sub("", text).replace("\n\n", "\n")
    text = re.sub(r"\n{2,}", "\n", text)
    text = text.replace("namespace: swarm\n", f"namespace: {namespace}\n").replace("  - ../../components/images\n", "  - images\n")
    head = "# A swarm of our own. `swarm k8s overlay` adds nodes and follows another version; all else is yours.\n"
    return head + text


def _add_node(folder: Path, name: str) -> None:
    """The example's folder under another name; one that is there stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (_TOP, "node.toml"):
        if not (folder / file).exists():
            text = (_CLUSTER / "nodes" / _EXAMPLE / file).read_text()
            stream = node_rollouts_stream(name)
            text = text.replace(node_rollouts_stream(_EXAMPLE), stream).replace(
                f"NODE_{_EXAMPLE.upper()}", stream.removesuffix("_ROLLOUTS")
            )
            text = text.replace(f"Node {_EXAMPLE}.", f"Node {name}.")
            text = re.sub(rf"\b{_EXAMPLE}\b", name, text)
            replace_file(folder / file, text)


def _copy_images(folder: Path) -> None:
    """The images of this tree, unless none were pushed from it and the overlay has some."""
    placeholders = _NO_DIGEST in (_IMAGES / _TOP).read_text()
    if placeholders and (folder / _TOP).exists():
        return
    folder.mkdir(exist_ok=True)
    for file in sorted(_IMAGES.iterdir()):
        shutil.copyfile(file, folder / file.name)


def _reference(found: re.Match[str], at: Path, root: str) -> str:
    """The line of a part of the tree, as the file in the folder `at` has to name it."""
    address, _, version = root.partition("?")
    if "://" in address:
        return f"{found[1]}{address.rstrip('/')}//k8s/{found[2]}?{version}"
    return f"{found[1]}{os.path.relpath(Path(address).resolve() / 'k8s' / found[2], at.resolve())}"


def _parts(file: Path) -> set[str]:
    return {found[2] for found in _PART.finditer(file.read_text())}
