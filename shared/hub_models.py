"""Requires that a model comes from a local folder, or from the hub at one commit; and a data set of
the hub too. Code that comes with a model is never run.

The files behind a hub name are whatever its owner, or somebody who took over the account, uploaded
last. A commit's hash identifies the files themselves. With it all processes of a node, also after a
restart, load the weights, tokenizer and chat template that somebody reviewed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

COMMIT = r"[0-9a-f]{40}"
HUB = "hub:"
"""How the path of a data set on the hub begins."""
HUB_PATH = re.compile(r"hub:([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(.+))?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class UnpinnedModelError(ValueError):
    """A hub name without a commit; the message says how to find the commit's hash."""


def hub_arguments(path: str, revision: str) -> dict[str, Any]:
    """Arguments for `from_pretrained` in addition to `path`: the commit for a hub name, none for a
    folder.

    Raises:
        UnpinnedModelError: `path` is a hub name and `revision` is not a full commit hash.
    """
    problem = pin_problem(path, revision)
    if problem:
        raise UnpinnedModelError(problem)
    return {"trust_remote_code": False, **({} if Path(path).is_dir() else {"revision": revision})}


def pin_problem(path: str, revision: str) -> str | None:
    """Why the model at `path` is not pinned to a commit, with the remedy; None if it is pinned or a
    folder.
    """
    if Path(path).is_dir() or re.fullmatch(COMMIT, revision):
        return None
    said = f"model.revision {revision[:60]!r} is not a commit" if revision else "model.revision is not set"
    return (
        f"model.path {path[:200]!r} is a name on the hub and {said}: a name's files can change at any time, so "
        f"{how_to_pin(path)}, or give a local folder"
    )


def hub_data_problem(path: str, revision: str) -> str:
    """Why a source's path and revision do not name files of the hub; empty if they do, or the path
    is not of the hub.
    """
    if not path.startswith(HUB):
        return 'revision applies only to a data set of the hub, path = "hub:OWNER/NAME": remove it' if revision else ""
    if (found := HUB_PATH.fullmatch(path)) is None:
        return f"path {path[:100]!r} names no data set of the hub: write hub:OWNER/NAME or hub:OWNER/NAME/PART"
    if re.fullmatch(COMMIT, revision):
        return ""
    said = f"revision {revision[:60]!r} is not a commit" if revision else "revision is not set"
    return (
        f"path {path[:100]!r} is on the hub and {said}: a name's files can change at any time, so set revision to "
        f"{commit_hash(found[1], 'dataset')}; `swarm new --data {found[1]}` writes it"
    )


def may_only_be_folder(path: str) -> bool:
    """Check whether a model's path is a folder or could not be a name on the hub, which is `name`
    or `owner/name`. `models/base` is the toy policy's folder.
    """
    return Path(path).is_dir() or path.startswith((".", "/", "~", "models/")) or path.count("/") > 1


def how_to_pin(path: str) -> str:
    """The remedy for a missing commit hash of the hub model `path`."""
    return f"set model.revision to {commit_hash(path)}"


def commit_hash(path: str, kind: Literal["model", "dataset"] = "model") -> str:
    """Say what the commit hash of the hub model or data set `path` is, or where to find it."""
    name = path if _HUB_NAME.fullmatch(path) else "OWNER/NAME"
    return (
        f"the full hash of the commit that you looked at (40 digits; the {kind}'s page shows it under Files, "
        f"History; so does `python -c \"from huggingface_hub import {kind}_info; print({kind}_info('{name}').sha)\"`)"
    )


_UNREACHED = frozenset({"TransportError", "ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"})
"""Kinds of the hub's client, and of what it asks with, by name: importing them takes seconds."""


def hub_unreached(error: BaseException, instead: str) -> str:
    """Say that the hub was not reached and what to do; empty if `error` has another cause.
    instead: how to do without it.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if not _UNREACHED.intersection(kind.__name__ for each in causes for kind in type(each).__mro__):
        return ""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"not all of it is in the cache, and HF_HUB_OFFLINE forbids to ask the hub: unset that, or {instead}"
    said = next((lines[0].strip()[:200] for each in reversed(causes) if (lines := str(each).strip().splitlines())), "no answer")
    return (
        f"not all of it is in the cache, and the hub {constants.ENDPOINT} cannot be reached ({said}): check the connection, set "
        f"HF_ENDPOINT to a mirror, or {instead}"
    )


MODEL_INSTEAD = "download the model on another machine and give its folder"
