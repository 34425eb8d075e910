"""What every pod of every variant has to be: restricted, bounded, probed as the code answers,
started as the code is.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from shared.version import VERSION
from tests.k8s.manifests import (
    K8S,
    ROLES,
    VARIANTS,
    amount,
    containers,
    environment,
    every_container,
    find,
    name_of,
    nats_files,
    node_of,
    pod_labels,
    pod_of,
    render,
    role_of,
    selected,
    services,
    with_kind,
    workloads,
)
from tests.k8s.test_semantics_config import loaded

USER = 10001
OURS = {"swarm", "swarm-cuda", "swarm-verifier", "swarm-nats"}
NATS_CLOSE_S = 20
"""For a server to close its stores after lame-duck mode, as the official chart has it."""
PULL_S = 1200
"""For an image with CUDA on a machine that has none of its layers."""
STOP_S = {"generator": 15, "verifier": 15, "sampler": 10, "trainer": 60}
"""Longest measured ends, with room."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_passes_the_restricted_standard_and_writes_to_volumes_only(variant: str) -> None:
    for workload in workloads(render(variant)):
        pod, name = pod_of(workload), name_of(workload)
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == USER == security["fsGroup"], name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert all(not {"hostPath"} & volume.keys() for volume in pod["volumes"]), name
        for container in containers(workload):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]} and "privileged" not in own, name
            assert not any("hostPort" in port for port in container.get("ports", [])), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_pod_has_a_token_or_is_told_of_services_by_variables(variant: str) -> None:
    for workload in workloads(render(variant)):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False and "serviceAccountName" not in pod, name_of(workload)
        assert pod["enableServiceLinks"] is False, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_asks_for_and_is_held_to_processor_and_memory(variant: str) -> None:
    for workload, container in every_container(render(variant)):
        for kind in ("requests", "limits"):
            assert container["resources"][kind].keys() >= {"cpu", "memory"}, (name_of(workload), container["name"])
        assert amount(container["resources"]["requests"]["memory"]) <= amount(container["resources"]["limits"]["memory"])
        assert amount(container["resources"]["requests"]["cpu"]) <= amount(container["resources"]["limits"]["cpu"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_nats_gets_what_it_asks_for_and_its_runtime_knows_how_much_that_is(variant: str) -> None:
    nats = find(render(variant), "StatefulSet", "nats")
    container = pod_of(nats)["containers"][0]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    told = amount(str(environment(render(variant), container)["GOMEMLIMIT"]).removesuffix("B"))
    assert 0.75 <= told / amount(container["resources"]["limits"]["memory"]) <= 0.85


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mount_has_its_volume_and_every_volume_is_mounted(variant: str) -> None:
    for workload in workloads(render(variant)):
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod_of(workload)["volumes"]} | claims
        mounted = {mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", [])}
        assert mounted == volumes, name_of(workload)
        for container in containers(workload):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths)), name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_ask_what_the_code_answers_at_the_port_it_listens_on(variant: str) -> None:
    objects = render(variant)
    seen = 0
    for workload, container in services(objects):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        told = environment(objects, container)
        assert ports == {"metrics": int(str(told["SWARM_HTTP__PORT"]))} and told["SWARM_HTTP__HOST"] == "0.0.0.0"
        asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
        assert {kind: get["path"] for kind, get in asked.items()} == {
            "startup": "/readyz",
            "readiness": "/readyz",
            "liveness": "/livez",
        }, name_of(workload)
        assert {get["port"] for get in asked.values()} == {"metrics"}
        seen += 1
    assert seen >= len(ROLES)


def test_the_paths_of_the_probes_are_those_of_the_health_server() -> None:
    answers = (K8S.parent / "shared" / "runtime" / "health.py").read_text()
    for path in ("/livez", "/readyz", "/metrics"):
        assert f'path == "{path}"' in answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_start_may_take_as_long_as_the_wait_for_nats_and_a_model(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(variant)
    for workload, container in services(objects):
        probe = container["startupProbe"]
        allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
        waits_s = float(str(environment(objects, container)["SWARM_NATS__CONNECT_TIMEOUT_S"]))
        assert allowed_s >= waits_s + 120, name_of(workload)
        if role_of(workload) in ("generator", "trainer"):
            model_s = loaded(objects, workload, container, tmp_path, monkeypatch).generator.start_timeout_s
            assert allowed_s >= waits_s + model_s + 60, name_of(workload)
        if role_of(workload) == "generator":
            assert workload["spec"]["progressDeadlineSeconds"] >= allowed_s + PULL_S, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_liveness_forgives_more_than_the_longest_stall_that_the_code_forgives(variant: str) -> None:
    for workload, container in services(render(variant)):
        probe = container["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_time_to_end_as_measured(variant: str) -> None:
    for workload, _ in services(render(variant)):
        role = role_of(workload)
        assert role is not None
        assert pod_of(workload)["terminationGracePeriodSeconds"] >= STOP_S[role], name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nats_server_has_time_for_lame_duck_mode_and_its_signal_finds_it(variant: str) -> None:
    objects = render(variant)
    nats = find(objects, "StatefulSet", "nats")
    config = nats_files(objects)["nats.conf"]
    grace_s, duration_s = (int(re.search(rf"{key}: (\d+)s", config)[1]) for key in ("lame_duck_grace_period", "lame_duck_duration"))  # type: ignore[index]
    assert pod_of(nats)["terminationGracePeriodSeconds"] >= grace_s + duration_s + NATS_CLOSE_S
    container = pod_of(nats)["containers"][0]
    pid_file = re.search(r"pid_file: (\S+)", config)[1]  # type: ignore[index]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["nats-server", "--signal", f"ldm={pid_file}"]
    assert any(pid_file.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_but_the_server_itself_takes_it_out_of_its_service(variant: str) -> None:
    for container in pod_of(find(render(variant), "StatefulSet", "nats"))["containers"]:
        assert ("readinessProbe" in container) == (container["name"] == "nats"), container["name"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_commands_name_modules_that_exist_and_the_image_of_their_role(variant: str) -> None:
    for workload, container in services(render(variant)):
        role, command = role_of(workload), container["command"]
        assert command[-2:] == ["-m", f"services.{role}"], name_of(workload)
        assert importlib.util.find_spec(command[-1]) is not None
        image = re.split(r"[:@]", container["image"].rpartition("/")[2])[0]
        with_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert image == {"verifier": "swarm-verifier"}.get(str(role), "swarm-cuda" if with_gpu else "swarm"), name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_images_are_pinned(variant: str) -> None:
    for workload, container in every_container(render(variant)):
        image = container["image"]
        assert not image.endswith(":latest") and re.search(r":[^/]+$|@sha256:[0-9a-f]{64}$", image), image
        assert container["imagePullPolicy"] == "IfNotPresent", name_of(workload)
        if image.rpartition("/")[2].split(":")[0].split("@")[0] in OURS:
            pinned = f":{project_version()}" if VARIANTS[variant].overlay == "single-box" else "@sha256:"
            assert pinned in image, f"{name_of(workload)}: {image}"


def project_version() -> str:
    found = re.search(r'^version = "(.+)"$', (K8S.parent / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None and VERSION in (found[1], "0+source")
    return found[1]


def test_digests_are_those_of_a_push_or_of_nothing_and_say_who_sets_them() -> None:
    """The project publishes no images: until they are pushed, a cluster must say that they are
    missing and run nothing else.
    """
    text = (K8S / "components" / "images" / "kustomization.yaml").read_text()
    assert "make images" in text
    entries = re.findall(r"- name: (\S+)\n\s+newName: (\S+)\n\s+digest: sha256:([0-9a-f]{64})\n", text)
    assert {name for name, _, _ in entries} == OURS
    for name, repository, digest in entries:
        unset = repository == f"registry.invalid/set-by-make-images/{name}"
        assert unset == (set(digest) == {"0"}) == repository.startswith("registry.invalid/"), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_gpus_are_asked_for_only_where_the_component_is(variant: str) -> None:
    with_component = VARIANTS[variant].overlay in ("cluster", "joined") or "gpu" in variant
    for workload in workloads(render(variant)):
        pod, role = pod_of(workload), role_of(workload)
        wants = [container for container in pod["containers"] if "nvidia.com/gpu" in container["resources"]["limits"]]
        assert bool(wants) == (with_component and role in ("generator", "trainer", "trainer-worker")), name_of(workload)
        assert bool(wants) == ("tolerations" in pod), name_of(workload)
        # What only NVIDIA's operator brings is asked for only where it is said to be: a pod of a
        # missing RuntimeClass is never created, and nothing in `kubectl get pods` tells why.
        operator = bool(wants) and "operator" in variant
        assert operator == ("runtimeClassName" in pod), name_of(workload)
        assert operator == ("nvidia.com/gpu.present" in pod.get("nodeSelector", {})), name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_with_gpus_go_together_so_that_a_machine_stays_free_for_a_trainer_of_several(variant: str) -> None:
    for workload in workloads(render(variant)):
        pod = pod_of(workload)
        if role_of(workload) in ("generator", "trainer") and "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]:
            assert "topologySpreadConstraints" not in pod, name_of(workload)
            (preferred,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert selected(preferred["podAffinityTerm"]["labelSelector"], pod_labels(workload)), name_of(workload)
            assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"


def test_generators_give_way_to_trainers_those_with_one_gpu_to_those_with_several_and_nobody_displaces_nats() -> None:
    objects = render("cluster")
    values = {name_of(each): each["value"] for each in with_kind(objects, "PriorityClass")}
    ranks: dict[str, set[int]] = {}
    for workload, _ in every_container(objects):
        if role_of(workload) in (*ROLES, "nats"):
            ranks.setdefault(str(role_of(workload)), set()).add(values[pod_of(workload)["priorityClassName"]])
    assert all(len(each) == 1 for role, each in ranks.items() if role != "trainer")
    one, several = (find(objects, "StatefulSet", f"{node}-trainer") for node in ("alpha", "gamma"))
    assert [values[pod_of(each)["priorityClassName"]] for each in (one, several)] == sorted(ranks["trainer"])
    assert len(ranks["trainer"]) == 2, "a trainer with one GPU would hold the only machine with four"
    order = sorted(ranks, key=lambda role: min(ranks[role]))
    assert order[0] == "generator" and order[-2:] == ["trainer", "nats"]
    assert all(value > 0 for value in values.values()), "pods of others, at 0, would come first"
    without = render("cluster-without-priorities")
    assert not with_kind(without, "PriorityClass")
    assert all("priorityClassName" not in pod_of(each) for each in workloads(without))


@pytest.mark.parametrize("variant", VARIANTS)
def test_servers_of_a_nats_cluster_are_refused_a_machine_that_has_one(variant: str) -> None:
    nats = find(render(variant), "StatefulSet", "nats")
    required = pod_of(nats).get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    apart = [
        term
        for term in required
        if term["topologyKey"] == "kubernetes.io/hostname" and selected(term["labelSelector"], pod_labels(nats))
    ]
    assert bool(apart) == (nats["spec"]["replicas"] > 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trainer_that_ended_for_its_configuration_is_replaced_by_a_mended_one(variant: str) -> None:
    """OrderedReady, the default, waits for the pod to be ready first (kubernetes issue 67250)."""
    for each in with_kind(render(variant), "StatefulSet"):
        assert each["spec"]["podManagementPolicy"] == "Parallel", name_of(each)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if VARIANTS[name].overlay == "cluster"])
def test_pushed_images_run_on_machines_that_they_were_built_for(variant: str) -> None:
    for workload in workloads(render(variant)):
        assert pod_of(workload)["nodeSelector"]["kubernetes.io/arch"] == "amd64", name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_generator_has_as_many_gpus_as_it_spreads_the_model_over(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(variant)
    sizes = set()
    for workload, container in services(objects):
        if role_of(workload) == "generator" and (gpus := container["resources"]["limits"].get("nvidia.com/gpu")):
            assert loaded(objects, workload, container, tmp_path, monkeypatch).generator.tensor_parallel == int(gpus)
            sizes.add(gpus)
    assert sizes == ({"1", "2"} if variant == "cluster-generator-gpus" else {"1"} if sizes else set())


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_pod_can_fill_its_machines_disk_or_memory(variant: str) -> None:
    for workload in workloads(render(variant)):
        for volume in pod_of(workload)["volumes"]:
            if "emptyDir" in volume:
                assert amount(volume["emptyDir"]["sizeLimit"]) > 0, (name_of(workload), volume["name"])
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                limits = [amount(each["resources"]["limits"]["memory"]) for each in pod_of(workload)["containers"]]
                assert amount(volume["emptyDir"]["sizeLimit"]) < sum(limits), name_of(workload)


def test_a_trainer_on_several_gpus_has_a_process_for_each() -> None:
    container = pod_of(find(render("cluster"), "StatefulSet", "gamma-trainer"))["containers"][0]
    command = container["command"]
    assert command[0] == "torchrun"
    assert command[command.index("--nproc-per-node") + 1] == container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    # Its own patience with the processes, which is 30 s if nobody says more, must fit what the pod
    # has.
    grace_s = pod_of(find(render("cluster"), "StatefulSet", "gamma-trainer"))["terminationGracePeriodSeconds"]
    assert 60 <= int(command[command.index("--shutdown-timeout") + 1]) < grace_s


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_carry_the_labels_that_metrics_and_policies_go_by(variant: str) -> None:
    objects = render(variant)
    nodes = {node_of(workload) for workload, _ in services(objects)}
    for workload in workloads(objects):
        labels = pod_labels(workload)
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/part-of"] == "swarm", name_of(workload)
        assert labels["app.kubernetes.io/component"] == role_of(workload)
        of_the_swarm = role_of(workload) in ("nats", "nats-watch") or name_of(workload) == "swarm-operator"
        assert (labels.get("swarm-rl.dev/node") in nodes) == (not of_the_swarm), name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_selector_takes_the_pods_of_its_own_workload_and_no_others(variant: str) -> None:
    objects = render(variant)
    for owner in with_kind(objects, "Deployment", "StatefulSet"):
        taken = [name_of(each) for each in workloads(objects) if selected(owner["spec"]["selector"], pod_labels(each))]
        assert taken == [name_of(owner)]
        for constraint in pod_of(owner).get("topologySpreadConstraints", []):
            taken = [name_of(each) for each in workloads(objects) if selected(constraint["labelSelector"], pod_labels(each))]
            assert taken == [name_of(owner)]
