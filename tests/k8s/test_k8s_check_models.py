"""What `swarm k8s check` says of the models that nodes download, and of entries that the overlay's
own ConfigMaps lack.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from swarm_cli.k8s.check.overlay import Overlay
from swarm_cli.k8s.check.rules import model_findings as findings
from tests.k8s.manifests import name_of, pod_of, render, with_kind, workloads

Object = dict[str, Any]
COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"


def overlay_of(variant: str) -> list[Object]:
    return copy.deepcopy([each for each in render(variant) if each])


def alphas(objects: list[Object]) -> Object:
    return next(each for each in with_kind(objects, "ConfigMap") if name_of(each).startswith("alpha-node"))


def told(objects: list[Object]) -> list[str]:
    return [str(each) for each in findings(Overlay(objects))]


@pytest.mark.parametrize("variant", ["single-box", "cluster", "cluster-downloading", "cluster-everything", "joined", "joined-leaf"])
def test_nothing_is_said_of_an_overlay_as_it_is(variant: str) -> None:
    assert told(overlay_of(variant)) == []


def test_a_download_without_a_revision_stops_it() -> None:
    objects = overlay_of("cluster-downloading")
    del alphas(objects)["data"]["model-revision"]
    (line,) = told(objects)
    assert (
        line.startswith("stops  ConfigMap alpha-node-") and " has no entry model-revision, which alpha-model-download reads" in line
    )
    assert "stays in CreateContainerConfigError: add model-revision= to it" in line


@pytest.mark.parametrize(
    ("revision", "start", "words"),
    [
        ("", "stops", "model-revision is empty, which is no full commit hash"),
        ("main", "note ", "model-revision is main, which is no full commit hash (40 hexadecimal digits)"),
        (COMMIT[:12], "note ", f"model-revision is {COMMIT[:12]}, which"),
    ],
)
def test_a_revision_that_is_no_full_commit_hash_is_told(revision: str, start: str, words: str) -> None:
    objects = overlay_of("cluster-downloading")
    alphas(objects)["data"]["model-revision"] = revision
    (line,) = told(objects)
    assert line.startswith(f"{start}  ConfigMap alpha-node-") and words in line and "under Files, History" in line
    objects = overlay_of("cluster")  # nothing is downloaded
    alphas(objects)["data"]["model-revision"] = revision
    assert told(objects) == []


def test_an_entry_that_a_variable_picks_and_a_config_map_of_the_overlay_lacks_stops_it() -> None:
    objects = overlay_of("cluster")
    name = name_of(alphas(objects))
    for optional in (True, False):
        picked = {"name": name, "key": "proxy", "optional": optional}
        entry = {"name": "HTTPS_PROXY", "valueFrom": {"configMapKeyRef": picked}}
        for each in workloads(objects):
            if name_of(each) in ("alpha-verifier", "alpha-sampler"):
                pod_of(each)["containers"][0].setdefault("env", []).append(entry)
        lines = told(objects)
        assert len(lines) == (0 if optional else 1), lines
    expected = f"stops  ConfigMap {name} has no entry proxy, which alpha-sampler, alpha-verifier read and so stay in"
    assert lines[0].startswith(expected)
