"""An overlay in a copy that a test may change, applied to machines that run its pods as
processes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.pod_processes import Processes
from tests.k8s.kubelet import Running
from tests.k8s.manifests import K8S, Object, build
from tests.k8s.test_run_overlay import why_not

READY_S, STEP_S = 600.0, 300.0
"""On a machine that does much else."""


class Swarm:
    """What is applied, and what becomes of it."""

    def __init__(self, cluster: Cluster, processes: Processes, folder: Path, overlay: str) -> None:
        self.cluster = cluster
        self.processes = processes
        shutil.copytree(K8S, folder / "k8s")
        self.overlay = folder / "k8s" / "overlays" / overlay

    def apply(self) -> list[Object]:
        objects = [each for each in yaml.safe_load_all(build(self.overlay)) if each]
        self.cluster.apply(objects)
        return objects

    def container(self, pod: str) -> Running:
        return self.processes.container(pod)

    def pod(self, node: str, role: str) -> Object:
        (found,) = self.cluster.pods(node=node, component=role)
        return found

    def metric(self, pod: str, name: str) -> float:
        """Sum over the labels; 0 while the page does not answer."""
        try:
            _, page = self.container(pod).get("/metrics", "metrics")
        except (OSError, StopIteration):
            return 0.0
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))

    def steps(self, node: str) -> float:
        """Of this life of the node's trainer."""
        return self.metric(f"{node}-trainer-0", "swarm_trainer_steps_total")

    def until(self, holds: Callable[[], object], what: str, timeout_s: float) -> None:
        try:
            self.cluster.until(holds, what, timeout_s)
        except AssertionError as error:
            words = [f"--- {each.pod.name}\n{each.words()[-1500:]}" for each in self.processes.all() if not each.ready]
            raise AssertionError("\n".join([str(error), *words])) from None


@contextmanager
def run_swarm(cluster: Cluster, folder: Path, overlay: str = "single-box") -> Iterator[Swarm]:
    """A swarm on machines that the caller adds; afterwards the cluster is empty again."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    machines = cluster.machines
    processes = Processes(cluster.api, NAMESPACE, folder / "pods", f"sc{os.getpid()}")
    machines.run, machines.gone = processes.run, processes.gone
    try:
        yield Swarm(cluster, processes, folder, overlay)
        cluster.clear()
    finally:
        machines.run, machines.gone = machines.by_word, lambda uids: None
        processes.close()
