"""The cluster of these tests. They take minutes and run only when asked for (`make test-cluster`)
or with SWARM_TEST_CLUSTER=1.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api import Proxy
from tests.cluster.cluster import NAMESPACE, Cluster, find_kubectl, kubeconfig_of_a_person
from tests.cluster.control_plane import ControlPlane
from tests.cluster.conversions import not_shown

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 3600.0
_SAID: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("SWARM_TEST_CLUSTER") == "1":
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="needs a cluster's control plane and takes minutes: make test-cluster"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Return what the control plane was, what was changed for it, and what it cannot show."""
    for line in _SAID:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    config, programs, own = kubeconfig_of_a_person(), None, None
    if config is None:
        built = subprocess.run([str(ROOT / "scripts/control-plane")], stdout=subprocess.PIPE, text=True, timeout=BUILD_TIMEOUT_S)
        if built.returncode:
            pytest.fail("no control plane: see above; or name a cluster's configuration in KUBECONFIG")
        programs = Path(built.stdout.split()[-1])
    kubectl = find_kubectl(programs)
    if kubectl is None:
        pytest.fail("kubectl is not on the PATH")
    try:
        if programs is not None:
            own = ControlPlane(programs, folder).start()
            config = str(own.kubeconfig)
        command = [kubectl, f"--kubeconfig={config}"]
        proxy = Proxy(command, folder)
        try:
            api = proxy.api()
            if api.get("Namespace", NAMESPACE) is not None:
                pytest.fail(f"the cluster has a namespace {NAMESPACE!r}, which these tests make and delete: use another cluster")
            cluster = Cluster(api, command, own=own is not None)
            try:
                yield cluster
            finally:
                _say(cluster)
                cluster.close()
        finally:
            proxy.stop()
    finally:
        if own is not None:
            own.stop()


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without machines and without a swarm; both are removed afterwards."""
    yield whole_cluster
    whole_cluster.clear()


def _say(cluster: Cluster) -> None:
    whose = "the tests' own" if cluster.own else "KUBECONFIG's"
    _SAID.append(f"control plane: Kubernetes {cluster.version}, {whose}; machines: fake")
    _SAID.extend(f"  applied differently: {note}" for note in sorted(cluster.notes))
    _SAID.extend(f"  not shown: {each}" for each in not_shown(cluster.minor))
