"""What goes wrong on a cluster, brought about on purpose, and what API server, scheduler and
controllers then say: the words that docs/kubernetes-trouble.md quotes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy

from tests.cluster.api import Object
from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.machines import MOVABLE, STORAGE, Machine
from tests.k8s.manifests import find, render, with_kind

Wrong = Callable[[Cluster], Callable[[], str]]
"""Brings it about; returns what says what was said until now."""

SHOWN: dict[Wrong, tuple[str, ...]] = {}
"""What each is to bring to light."""
GPU_MACHINE = Machine("gpu", cpus=48, memory_gib=512, gpus=4)
DRIVER = "fake.swarm-rl.dev"
PLAIN_MACHINE = Machine("plain", cpus=48, memory_gib=512)


def says(*quotes: str) -> Callable[[Wrong], Wrong]:
    def note(wrong: Wrong) -> Wrong:
        SHOWN[wrong] = quotes
        return wrong

    return note


def trainer(variant: str = "cluster") -> list[Object]:
    """Node alpha's trainer and what it needs to be scheduled."""
    objects = render(variant)
    return [
        *with_kind(objects, "Namespace", "PriorityClass", "ConfigMap", "PersistentVolumeClaim"),
        deepcopy(find(objects, "StatefulSet", "alpha-trainer")),
    ]


def servers() -> list[Object]:
    objects = render("cluster")
    return [*with_kind(objects, "Namespace", "PriorityClass", "ConfigMap"), deepcopy(find(objects, "StatefulSet", "nats"))]


def without(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] not in kinds]


def events(cluster: Cluster) -> Callable[[], str]:
    """Reasons and messages of all events of the namespace, as `kubectl describe` shows them."""
    return lambda: "\n".join(f"{each['reason']}: {each['message']}" for each in cluster.api.listed("Event", NAMESPACE))


def refused(cluster: Cluster, *objects: Object, namespace: bool = True) -> Callable[[], str]:
    """Return what kubectl says of objects that it cannot apply."""
    if namespace:
        cluster.kubectl("create", "namespace", NAMESPACE, check=False)
    said = cluster.kubectl("apply", "--filename=-", given="\n".join(map(json.dumps, objects)), check=False).stderr
    return lambda: said


def claim(name: str, storage_class: str, *, volume: str = "") -> Object:
    spec: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    spec |= {"storageClassName": storage_class, "volumeName": volume}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


@says('pod rejected: RuntimeClass "nvidia" not found')
def a_runtime_class_that_nobody_made(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE)
    cluster.apply(trainer("cluster-gpu-operator"))
    return events(cluster)


@says("no PriorityClass with name swarm-trainer was found")
def no_priority_classes(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE)
    cluster.apply(without(trainer(), "PriorityClass"))
    return events(cluster)


@says("exceeded quota: team, requested: requests.nvidia.com/gpu=1")
def a_quota_without_gpus(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE)
    cluster.apply([*without(trainer(), "StatefulSet"), gpu_quota()])
    quota = f"api/v1/namespaces/{NAMESPACE}/resourcequotas/team"
    cluster.until(lambda: cluster.api.ask("GET", quota).get("status", {}).get("used"), "the quota is counted")
    cluster.apply(trainer())
    return events(cluster)


@says('no matches for kind "ScaledObject" in version "keda.sh/v1alpha1"')
def a_custom_kind_that_nobody_installed(cluster: Cluster) -> Callable[[], str]:
    return refused(cluster, with_kind(render("cluster-keda"), "ScaledObject")[0])


@says('namespaces "swarm" not found')
def a_secret_before_its_namespace(cluster: Cluster) -> Callable[[], str]:
    return refused(cluster, secret("alpha-trainer", "x"), namespace=False)


@says("metadata.annotations: Too long")
def accounts_applied_by_the_client(cluster: Cluster) -> Callable[[], str]:
    return refused(cluster, secret("nats-accounts", "x" * 300_000))


@says("updates to statefulset spec for fields other than")
def a_volume_of_another_size(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE)
    cluster.apply(trainer())
    changed = trainer()
    changed[-1]["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = "999Gi"
    said = cluster.apply(changed, check=False).stderr
    return lambda: said


@says("spec is immutable after creation")
def a_claim_of_another_class(cluster: Cluster) -> Callable[[], str]:
    assert not refused(cluster, claim("a", STORAGE))()
    return refused(cluster, claim("a", MOVABLE))


@says("Insufficient nvidia.com/gpu")
def machines_without_gpus(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(PLAIN_MACHINE)
    cluster.apply(trainer())
    return events(cluster)


@says("didn't match Pod's node affinity")
def a_label_that_no_machine_has(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(Machine("arm", cpus=48, memory_gib=512, gpus=4, labels={"kubernetes.io/arch": "arm64"}))
    cluster.apply(trainer())
    return events(cluster)


@says("didn't match pod anti-affinity rules")
def fewer_than_three_machines(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(PLAIN_MACHINE)
    cluster.apply(servers())
    return events(cluster)


@says("that the pod didn't tolerate")
def machines_kept_for_others(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(Machine("theirs", cpus=48, memory_gib=512, taints=("somebody-elses",)))
    cluster.apply(servers())
    return events(cluster)


@says("pod has unbound immediate PersistentVolumeClaims", 'storageclass.storage.k8s.io "fast" not found')
def a_storage_class_that_does_not_exist(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE)
    objects = trainer()
    objects[-1]["spec"]["volumeClaimTemplates"][0]["spec"]["storageClassName"] = "fast"
    cluster.apply(objects)
    return events(cluster)


@says("no storage class is set")
def no_default_class(cluster: Cluster) -> Callable[[], str]:
    return named(cluster, refused(cluster, claim("a", "")))


@says("WaitForFirstConsumer")
def a_claim_whose_pod_waits(cluster: Cluster) -> Callable[[], str]:
    return named(cluster, refused(cluster, claim("a", STORAGE)))


@says("volume node affinity conflict")
def a_volume_on_a_machine_that_is_cordoned(cluster: Cluster) -> Callable[[], str]:
    cluster.machines.add(GPU_MACHINE, Machine("gpu-2", cpus=48, memory_gib=512, gpus=4))
    objects = trainer()
    cluster.apply(objects)
    cluster.until_all_ready(1)
    (pod,) = cluster.pods()
    cluster.kubectl("cordon", pod["spec"]["nodeName"])
    cluster.kubectl("delete", f"--namespace={NAMESPACE}", "pod", pod["metadata"]["name"])
    return events(cluster)


@says("Multi-Attach error for volume")
def a_pod_that_moved_while_its_volume_is_attached_elsewhere(cluster: Cluster) -> Callable[[], str]:
    """A volume of a driver that attaches: the controllers ask for that, and no driver answers but
    this.
    """
    attaching = {"metadata": {"annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}}}
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.api.create(claim("shared", MOVABLE, volume="shared"))
    cluster.api.create(attachable("shared"))
    for machine in ("one", "two"):
        cluster.machines.add(Machine(machine))
        cluster.api.patch("Node", machine, attaching)
    cluster.api.create(mounting("first", "shared", "one"))
    cluster.until(lambda: attachments(cluster), "the controllers ask for the volume to be attached")
    for name in attachments(cluster):
        cluster.api.patch("VolumeAttachment", name, {"status": {"attached": True}}, part="status")
    cluster.until(lambda: "SuccessfulAttachVolume" in events(cluster)(), "it is attached")
    cluster.api.create(mounting("second", "shared", "two"))
    return events(cluster)


def attachable(name: str) -> Object:
    """A volume of a driver that nobody has installed, and that one machine mounts."""
    spec = {
        "storageClassName": MOVABLE,
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "claimRef": {"namespace": NAMESPACE, "name": name},
        "csi": {"driver": DRIVER, "volumeHandle": name},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


def mounting(name: str, volume: str, machine: str) -> Object:
    container = {"name": "c", "image": "none.invalid/none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": volume}}]
    spec = {"nodeName": machine, "containers": [container], "volumes": volumes, "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def attachments(cluster: Cluster) -> list[str]:
    """Names of what the controllers want to be attached by that driver."""
    listed = cluster.api.listed("VolumeAttachment")
    return [str(each["metadata"]["name"]) for each in listed if each["spec"]["attacher"] == DRIVER]


def gpu_quota() -> Object:
    """The namespace may have no GPU at all."""
    metadata = {"name": "team", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {"requests.nvidia.com/gpu": "0"}}}


def named(cluster: Cluster, said: Callable[[], str]) -> Callable[[], str]:
    """The claim was made; what is said of it are events."""
    assert not said(), said()
    return events(cluster)


def secret(name: str, text: str) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "stringData": {"file": text}}
