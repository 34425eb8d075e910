"""What people edit from one `kubectl apply` to the next never touches a field that Kubernetes
refuses to change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_cli.k8s.secret_objects import as_objects, expected
from tests.k8s.manifests import (
    K8S,
    VARIANTS,
    Object,
    build,
    containers,
    find,
    kubernetes_pages,
    label,
    name_of,
    parsed,
    pod_of,
    render,
    role_of,
    switched,
    with_kind,
)

MUTABLE = {
    "StatefulSet": {
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    },
    "Job": {"suspend", "parallelism", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "backoffLimit"},
    "PersistentVolumeClaim": {"resources"},
}
"""Fields of a spec that an API server lets change, for kinds of which it does not let all change
(Kubernetes' validation: apps, batch, core); a Deployment and a DaemonSet keep their selector.
"""


def refused(before: list[Object], after: list[Object]) -> Iterator[str]:
    """Return what `kubectl apply` of `after` over `before` refuses, as object and field."""
    was = {(each["kind"], name_of(each)): each for each in before}
    for each in after:
        old = was.get((each["kind"], name_of(each)))
        if old is None:
            continue
        fields = set(old.get("spec", {})) | set(each.get("spec", {}))
        fixed = fields - MUTABLE[each["kind"]] if each["kind"] in MUTABLE else fields & {"selector"}
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            fixed = set()
        yield from (
            f"{each['kind']} {name_of(each)}: {field}"
            for field in sorted(fixed)
            if old.get("spec", {}).get(field) != each.get("spec", {}).get(field)
        )


def settings(overlay: Path) -> None:
    for file in overlay.glob("nodes/*/node.toml"):
        file.write_text(re.sub(r"^learning_rate = .*$", "learning_rate = 5e-5", file.read_text(), flags=re.MULTILINE))


def revision(overlay: Path) -> None:
    for file in overlay.glob("nodes/*/kustomization.yaml"):
        file.write_text(re.sub(r"model-revision=\w+", f"model-revision={'e' * 40}", file.read_text()))


def digests(overlay: Path) -> None:
    images = overlay.parents[1] / "components/images/kustomization.yaml"
    images.write_text(re.sub(r"sha256:0+", f"sha256:{'d' * 64}", images.read_text()))


def server(overlay: Path) -> None:
    config = overlay.parents[1] / "base/nats/nats.conf"
    config.write_text(config.read_text().replace("max_payload: 8MB", "max_payload: 4MB"))


EDITS = [settings, revision, digests, server]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: str(edit.__name__))
@pytest.mark.parametrize("variant", ["cluster", "cluster-downloading"])
def test_no_edit_that_people_make_is_refused_by_the_next_apply(variant: str, edit: Callable[[Path], None], tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = switched(VARIANTS[variant], tmp_path / "k8s")
    edit(overlay)
    before, after = list(render(variant)), list(parsed(build(overlay)))
    if not (edit is revision and variant == "cluster"):  # nobody reads it there but the download
        assert before != after, "an edit that changes nothing proves nothing"
    assert list(refused(before, after)) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_config_map_has_the_label_by_which_old_ones_are_removed(variant: str) -> None:
    """docs/kubernetes-change.md, "Old ConfigMaps"; those that `swarm k8s secrets` makes do not, and
    stay."""
    for each in with_kind(render(variant), "ConfigMap"):
        assert label(each, "app.kubernetes.io/part-of") == "swarm", name_of(each)
    made = as_objects(expected(["alpha"]), {file: "x" for one in expected(["alpha"]) for file in one.files.values()}, "swarm")
    assert len(with_kind(made, "ConfigMap")) == 2
    assert not [each for each in made if "app.kubernetes.io/part-of" in each["metadata"]["labels"]]
    page = kubernetes_pages()
    assert "--prune -l app.kubernetes.io/part-of=swarm --prune-allowlist=core/v1/ConfigMap" in page


def test_a_job_whose_template_changes_would_be_found() -> None:
    job = {"kind": "Job", "metadata": {"name": "streams"}, "spec": {"backoffLimit": 1, "template": {"spec": {"image": "a"}}}}
    changed = {**job, "spec": {"backoffLimit": 2, "template": {"spec": {"image": "b"}}}}
    assert list(refused([job], [changed])) == ["Job streams: template"]


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if VARIANTS[name].overlay == "cluster" and "without-tls" not in name]
)
def test_streams_are_made_by_a_pod_that_keeps_its_logs_and_has_as_many_copies_as_the_services(variant: str) -> None:
    """A Job would be removed with its logs when it has failed often enough, or been done long
    enough; `kubectl wait` for it then fails."""
    objects = render(variant)
    makers = [each for each in with_kind(objects, "Deployment") if role_of(each) == "operator"]
    assert {name_of(each) for each in makers} == {"alpha-operator", "beta-operator", "gamma-operator", "swarm-operator"}
    copies = str(find(objects, "StatefulSet", "nats")["spec"]["replicas"])
    for maker in makers:
        plane = "swarm" if name_of(maker) == "swarm-operator" else "node"
        assert [each["command"][3:7] for each in pod_of(maker)["initContainers"]] == [["nats", "init", "--plane", plane]]
        told = {entry["name"]: entry["value"] for each in containers(maker) for entry in each["env"] if "REPLICAS" in entry["name"]}
        asked = {"SWARM_NATS__REPLICAS": copies} if copies != "1" else {}
        assert told == asked
