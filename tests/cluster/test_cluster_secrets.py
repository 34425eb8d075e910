"""`swarm k8s secrets` and a real API server: what it prints is taken as it is and read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.k8s.manifests import REPOSITORY

COMMAND_S = 120.0
NODES = ("--nodes", "alpha,beta,gamma")


def swarm(cluster: Cluster, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `swarm k8s`."""
    command = [sys.executable, "-m", "swarm_cli", "k8s", *arguments]
    return subprocess.run(
        command,
        env=cluster.environment(),
        cwd=REPOSITORY,
        input=given,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def test_the_keys_that_were_applied_are_printed_again_from_the_cluster_alone_and_the_check_misses_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    made = swarm(cluster, "secrets", *NODES, "--keys", str(tmp_path / "keys"))
    assert made.returncode == 0, made.stderr
    cluster.kubectl("create", "namespace", NAMESPACE)
    done = cluster.kubectl("apply", "--server-side", "--filename=-", given=made.stdout)
    assert done.stdout.count("serverside-applied") == len(list(yaml.safe_load_all(made.stdout))) == 24
    there = cluster.kubectl(f"--namespace={NAMESPACE}", "get", "secrets,configmaps", "--output=json").stdout
    again = swarm(cluster, "secrets", "--existing", "-", *NODES, given=there)
    assert again.returncode == 0, again.stderr
    assert again.stdout == made.stdout
    checked = swarm(cluster, "check", "k8s/overlays/cluster").stdout
    assert checked and not [line for line in checked.splitlines() if "Secret" in line or "ConfigMap" in line], checked
