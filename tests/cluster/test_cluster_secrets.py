"""`swarm k8s secrets` and a real API server: what it prints is taken as it is and read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.k8s.manifests import REPOSITORY
from tests.k8s.test_k8s_secrets import read_back

COMMAND_S = 120.0
NODES = ("--nodes", "alpha,beta,gamma")


def swarm(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `swarm k8s`."""
    command = [sys.executable, "-m", "swarm_cli", "k8s", *arguments]
    return subprocess.run(
        command,
        env=cluster.environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def test_the_keys_that_were_applied_are_read_back_by_the_documented_commands_and_the_check_misses_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    made = swarm(cluster, "secrets", *NODES, "--keys", str(tmp_path / "made"))
    assert made.returncode == 0, made.stderr
    cluster.kubectl("create", "namespace", NAMESPACE)
    done = cluster.kubectl("apply", "--server-side", "--filename=-", given=made.stdout)
    assert done.stdout.count("serverside-applied") == len(list(yaml.safe_load_all(made.stdout))) == 24
    subprocess.run(["bash", "-euc", read_back()], cwd=tmp_path, env=cluster.environment(), check=True, timeout=COMMAND_S)
    again = swarm(cluster, "secrets", *NODES, "--keys", str(tmp_path / "keys"))
    assert again.returncode == 0, again.stderr
    assert again.stdout == made.stdout
    checked = swarm(cluster, "check", "k8s/overlays/cluster").stdout
    assert checked and not [line for line in checked.splitlines() if "Secret" in line or "ConfigMap" in line], checked
