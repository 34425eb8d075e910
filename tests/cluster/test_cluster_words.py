"""What docs/kubernetes-trouble.md quotes of Kubernetes is what this one says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.conversions import for_server
from tests.cluster.wrongs import PLAIN_MACHINE, SHOWN, Wrong, attachments, gpu_quota
from tests.k8s.kubernetes_words import row_of
from tests.k8s.manifests import EVERY, K8S, REPOSITORY, Variant, build, switched

CHECK_S = 120.0
FAST = """
patches:
  - target: {kind: StatefulSet, name: alpha-trainer}
    patch: |-
      - {op: add, path: /spec/volumeClaimTemplates/0/spec/storageClassName, value: fast}
"""


@pytest.mark.parametrize("wrong", SHOWN, ids=lambda wrong: wrong.__name__)
def test_it_says_what_the_page_quotes(cluster: Cluster, wrong: Wrong) -> None:
    said = wrong(cluster)
    try:
        for quote in SHOWN[wrong]:
            # A person's cluster may be newer than the tests' own, and say it in the row's other
            # words.
            accepted = [quote] if cluster.own else row_of(quote)
            try:
                cluster.until(lambda accepted=accepted: any(words in said() for words in accepted), quote)  # type: ignore[misc]
            except AssertionError as error:
                raise AssertionError(f"{error}\n\nit said:\n{said()}") from None
    finally:
        for name in attachments(cluster):
            cluster.api.delete("VolumeAttachment", name)


def test_the_check_names_before_apply_what_the_cluster_would_say_afterwards(cluster: Cluster, tmp_path: Path) -> None:
    variant = Variant(
        "cluster", on=((EVERY, "keda"), ("nodes/alpha/kustomization.yaml", "gpu-nvidia-operator")), off=((EVERY, "hpa"),)
    )
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = switched(variant, tmp_path / "k8s")
    with (overlay / "kustomization.yaml").open("a") as top:
        top.write(FAST)
    cluster.machines.add(PLAIN_MACHINE)
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "--filename=-", given=json.dumps(gpu_quota()))
    command = [sys.executable, "-m", "swarm_cli", "k8s", "check", str(overlay)]
    done = subprocess.run(
        command, env=cluster.environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=CHECK_S, check=False
    )
    stops = [line for line in done.stdout.splitlines() if line.startswith("stops")]
    assert done.returncode == 1, done.stderr
    for words in (
        "RuntimeClass nvidia does not exist",
        "storage class fast of var-alpha-trainer",
        "offers nvidia.com/gpu",
        "Secrets alpha-generator, ",
        "ResourceQuota team allows",
        "no image is named yet",
    ):
        assert any(words in line for line in stops), f"{words}\n{done.stdout}{done.stderr}"
    # Of fields that an older server has not, kubectl would complain first.
    taken, _ = for_server([each for each in yaml.safe_load_all(build(overlay)) if each], cluster.api.versions(), cluster.minor)
    dry_run = cluster.kubectl("apply", "--dry-run=server", "--filename=-", given=yaml.safe_dump_all(taken), check=False)
    assert dry_run.returncode != 0 and 'no matches for kind "ScaledObject"' in dry_run.stderr, "which the check leaves to it"
