"""The patches of docs/kubernetes-start.md, pasted into the cluster overlay as a reader would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.k8s.manifests import K8S, Object, build, name_of, parsed, pod_of, with_kind, workloads

PAGE = K8S.parent / "docs/kubernetes-start.md"


def patched(words: str, folder: Path) -> list[Object]:
    """The cluster overlay with the page's patch that has these words in it."""
    section = PAGE.read_text().split("### Private registry, storage class, access mode")[1].split("\n### ")[0]
    (block,) = [each for each in re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL) if words in each]
    shutil.copytree(K8S, folder / "k8s")
    overlay = folder / "k8s/overlays/cluster"
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write(block)
    return list(parsed(build(overlay)))


def test_a_login_to_the_registry_reaches_every_pod(tmp_path: Path) -> None:
    objects = patched("imagePullSecrets", tmp_path)
    pods = [pod_of(each) for each in workloads(objects)]
    assert len(pods) >= 16 and all(pod["imagePullSecrets"] == [{"name": "swarm-registry"}] for pod in pods)


def test_a_storage_class_reaches_every_claim(tmp_path: Path) -> None:
    objects = patched("storageClassName", tmp_path)
    claims = with_kind(objects, "PersistentVolumeClaim")
    assert claims and all(each["spec"]["storageClassName"] == "shared-files" for each in claims)
    templates = [template for each in with_kind(objects, "StatefulSet") for template in each["spec"]["volumeClaimTemplates"]]
    assert len(templates) == 4 and all(each["spec"]["storageClassName"] == "local-nvme" for each in templates)


def test_an_access_mode_reaches_the_claims_that_are_named(tmp_path: Path) -> None:
    objects = patched("accessModes", tmp_path)
    modes = {name_of(each): each["spec"]["accessModes"] for each in with_kind(objects, "PersistentVolumeClaim")}
    assert modes.keys() >= {"alpha-model", "beta-model", "gamma-model", "gamma-policies"}
    assert all(mode == ["ReadWriteOnce"] for mode in modes.values())
