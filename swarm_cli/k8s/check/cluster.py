"""The objects of a cluster, as far as `kubectl` can read them, and the objects of an overlay, as it
renders them. Changes nothing. Rendering a folder fetches what it names at other addresses, as
`kubectl apply -k` does."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Any

from shared.text import error_text, visible
from swarm_cli.errors import CommandError
from swarm_cli.k8s.check.overlay import MAX_CHARS, Overlay, documents, not_text

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Objects by kind, as `kubectl get -o json` lists them."""

    listed: Mapping[str, Sequence[Object]]
    unread: Mapping[str, str] = field(default_factory=dict)
    """For each kind that could not be read, why; rules do not judge it."""

    def knows(self, kind: str) -> bool:
        """Return whether objects of this kind were read."""
        return kind in self.listed

    def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind."""
        return {each["metadata"]["name"] for each in self.listed.get(kind, ())}

    def find(self, kind: str, name: str) -> Object | None:
        """One object; None if it does not exist or its kind was not read."""
        return next((each for each in self.listed.get(kind, ()) if each["metadata"]["name"] == name), None)


TIMEOUT_S = 30.0
"""For one request. The first may have to fetch a token."""
STANDARD = "-"
SAID_CHARACTERS = 300
_DNS_LABELS = ("k8s-app in (kube-dns,coredns,node-local-dns)", "dns.operator.openshift.io/daemonset-dns")
_WHOLE_CLUSTER = ("nodes", "runtimeclasses", "storageclasses", "priorityclasses")
_NAMESPACED = ("secrets", "configmaps", "persistentvolumeclaims", "resourcequotas")


def rendered(source: str) -> Overlay:
    """The objects of a folder (rendered here), of a YAML file, or of standard input (`-`).

    Raises:
        CommandError: it cannot be rendered or read.
    """
    try:
        objects = documents(_text(source))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} cannot be read ({error_text(error)}): give an overlay's folder, a YAML file, or -") from None
    except ValueError as error:
        raise CommandError(f"{source} is not usable YAML ({error}): give what `kubectl kustomize` prints") from None
    whole = [each for each in objects if isinstance(each, dict) and {"apiVersion", "kind", "metadata"} <= each.keys()]
    if not whole or len(whole) < len(objects):
        raise CommandError(f"{source} does not hold only Kubernetes objects: give what `kubectl kustomize` prints")
    overlay = Overlay(whole)
    if wrong := list(islice(not_text(overlay), 4)):
        more = " and more" if len(wrong) > 3 else ""
        what = f"{visible(', '.join(wrong[:3]), 300)}{more}"
        raise CommandError(f"{source}: not text, which Kubernetes asks for: {what}: put each value in quotes")
    return overlay


def _text(source: str) -> str:
    """At most one character more than `MAX_CHARS`."""
    if source == STANDARD:
        return sys.stdin.read(MAX_CHARS + 1)
    if Path(source).is_dir():
        return _kustomize(Path(source))
    with Path(source).open() as file:
        return file.read(MAX_CHARS + 1)


def current_context(context: str) -> str:
    """The context that kubectl would use; empty if there is none (`why_no_cluster`)."""
    if shutil.which("kubectl") is None:
        return ""
    if context:
        return context
    done = _kubectl("config", "current-context")
    return done.stdout.strip() if done.returncode == 0 else ""


def why_no_cluster() -> tuple[str, str]:
    """Describe what is missing if `current_context` is empty, with the remedy."""
    if shutil.which("kubectl") is None:
        return "kubectl is not on the PATH", "install it"
    return "kubectl has no current context", "set KUBECONFIG to the cluster's kubeconfig, or run `kubectl config use-context NAME`"


def read_cluster(namespace: str, context: str) -> Cluster:
    """The cluster's objects; the kinds that this user may not read are in `unread`.

    Raises:
        CommandError: the cluster does not answer.
    """
    where = ("--context", context)
    version = _kubectl("version", "--output", "json", *where)
    if version.returncode != 0 or "serverVersion" not in version.stdout:
        raise CommandError(f"the cluster {context} does not answer: {_said(version)}: check `kubectl --context {context} version`")
    questions: dict[str, Sequence[str]] = {kind: ("get", kind) for kind in _WHOLE_CLUSTER}
    questions |= {kind: ("get", kind, "--namespace", namespace) for kind in _NAMESPACED}
    questions |= {f"dns {label}": ("get", "pods", "--all-namespaces", "--selector", label) for label in _DNS_LABELS}
    with ThreadPoolExecutor(4) as pool:
        answers = dict(zip(questions, pool.map(lambda question: _listed(*question, *where), questions.values()), strict=True))
    listed: dict[str, Sequence[Mapping[str, Any]]] = {}
    unread: dict[str, str] = {}
    for question, answer in answers.items():
        kind = question.split(" ")[0]
        if isinstance(answer, str):
            unread[kind] = answer
        else:
            listed[kind] = [*listed.get(kind, ()), *answer]
    return Cluster(listed, {kind: why for kind, why in unread.items() if kind not in listed})


def _kustomize(folder: Path) -> str:
    """Read within a limit, because what a folder names may unfold or never end."""
    command = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(command[0]) is None:
        raise CommandError(
            "rendering a folder needs kubectl or kustomize, and neither is installed: install one, or give its output"
        )
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=told, text=True) as run,
    ):
        late = Timer(TIMEOUT_S * 2, run.kill)
        late.start()
        try:
            assert run.stdout is not None
            text = run.stdout.read(MAX_CHARS + 1)
            if len(text) > MAX_CHARS:
                return text
            code = run.wait()
        finally:
            late.cancel()
            run.kill()
        told.seek(0)
        done = subprocess.CompletedProcess(command, code, text, told.read(2**16))
    if code == -signal.SIGKILL:
        raise CommandError(f"`{' '.join(command)} {folder}` took longer than {TIMEOUT_S * 2:.0f} s: run it by hand")
    if code != 0:
        raise CommandError(f"{folder} cannot be rendered: {_end(_last_line(done))}: correct its kustomization.yaml")
    return text


def _listed(*arguments: str) -> list[Mapping[str, Any]] | str:
    """The items of a list, or why there are none."""
    done = _kubectl(*arguments, "--output", "json")
    if done.returncode != 0:
        return _said(done)
    try:
        items = json.loads(done.stdout)["items"]
    except (ValueError, KeyError, TypeError):
        items = None
    if isinstance(items, list) and all(isinstance(each, dict) and "metadata" in each for each in items):
        return items
    return "kubectl did not print a list of objects"


def _kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", *arguments]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {TIMEOUT_S:.0f} s")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return _last_line(done)[:SAID_CHARACTERS]


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with {done.returncode}"


def _end(line: str) -> str:
    """kustomize names every folder on its way first, and the reason last."""
    return line if len(line) <= SAID_CHARACTERS else "… " + line[-SAID_CHARACTERS:]
