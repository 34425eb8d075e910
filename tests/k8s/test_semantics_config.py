"""Everything that the manifests tell a process is known to it: variables, files, keys, volumes,
streams.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.contracts.streams import node_streams, swarm_streams
from shared.contracts.subjects import VERIFIER_CONSUMER, node_rollouts_stream
from shared.tasks import check_specs
from swarm_cli.k8s.secret_objects import expected
from swarm_cli.nats.server_config import node_account
from tests.k8s.manifests import (
    K8S,
    ROLES,
    VARIANTS,
    Object,
    amount,
    containers,
    environment,
    every_container,
    find,
    name_of,
    nats_files,
    node_of,
    pod_of,
    render,
    role_of,
    services,
    with_kind,
    workloads,
)

NOT_OURS = {"HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN", "HOME", "MODEL", "REVISION", "POD_NAME", "NATS_MAX_FILE_STORE", "GOMEMLIMIT"}
"""Variables of other people's programs, and of NATS's configuration file."""
HUB_TOKEN = {"token"}
"""Secret <node>-hub, which is a person's own; `swarm k8s secrets` makes the others."""
OUTSIDE_SECRETS = {"nats-hub-keys": set[str](), "delta-swarm": {"url", "swarm.nk", "ca.crt"}}
OUTSIDE_CONFIG_MAPS = {"nats-hub": {"ca.crt"}}
"""Of a site whose swarm is elsewhere; the seeds are named after its nodes."""


def made_by_command(kind: str, nodes: Iterable[str]) -> dict[str, set[str]]:
    """Secrets or ConfigMaps of `swarm k8s secrets`, with the entries in them."""
    return {each.name: set(each.files) for each in expected(sorted(nodes)) if each.kind == kind}


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)


def loaded(
    objects: tuple[Object, ...], workload: Object, container: Object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> NodeConfig:
    """The configuration as the container's process loads it: its environment, and its ConfigMap's
    file.
    """
    clear_environment(monkeypatch)
    told = environment(objects, container)
    node_toml = folder / "node.toml"
    mounted = next(mount for mount in container["volumeMounts"] if mount["name"] == "config")
    assert told[CONFIG_FILE_VARIABLE] == f"{mounted['mountPath']}/node.toml"
    volume = next(each for each in pod_of(workload)["volumes"] if each["name"] == "config")
    node_toml.write_text(find(objects, "ConfigMap", volume["configMap"]["name"])["data"]["node.toml"])
    for name, value in told.items():
        if name.startswith("SWARM_"):
            monkeypatch.setenv(name, value if value is not None else name_of(workload) + "-7d9c5b6f4-abcde")
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(node_toml))
    return load_config()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variable_is_known_and_the_configuration_loads_as_the_pod_has_it(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(variant)
    for workload, container in services(objects):
        for name in environment(objects, container):
            assert name in NOT_OURS or name == CONFIG_FILE_VARIABLE or known(name), f"{name_of(workload)}: {name}"
        config = loaded(objects, workload, container, tmp_path, monkeypatch)
        assert config.node.id == node_of(workload)
        assert config.node.replica.startswith(name_of(workload))
        assert config.http_port(str(role_of(workload))) == 9400 and config.http.host == "0.0.0.0"


def known(variable: str) -> bool:
    section, _, field = variable.removeprefix("SWARM_").lower().partition("__")
    model = NodeConfig.model_fields[section].annotation if section in NodeConfig.model_fields else None
    return bool(field) and field in getattr(model, "model_fields", {})


@pytest.mark.parametrize(
    "file", sorted(K8S.glob("overlays/*/nodes/*/node.toml")), ids=lambda path: f"{path.parts[-4]}-{path.parts[-2]}"
)
def test_a_nodes_tasks_exist_and_its_name_is_that_of_its_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    config = load_config(file)
    check_specs(config.tasks)
    assert config.node.id == file.parent.name and config.sampler.external > 0


@pytest.mark.parametrize("overlay", ["cluster", "joined"])
def test_outsiders_cannot_predict_the_tasks_of_a_swarms_nodes(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    files = sorted((K8S / "overlays" / overlay).glob("nodes/*/node.toml"))
    assert files and {file.parent.name: load_config(file).node.seed for file in files if load_config(file).node.seed} == {}


def test_an_unknown_variable_would_be_found() -> None:
    assert known("SWARM_NATS__NODE_URL") and not known("SWARM_NATS__NODE_URI") and not known("SWARM_NODE")


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_that_are_not_services_are_told_known_variables_only(variant: str) -> None:
    objects = render(variant)
    for workload, container in every_container(objects):
        for name in environment(objects, container):
            assert name in NOT_OURS or name == CONFIG_FILE_VARIABLE or known(name), f"{name_of(workload)}: {name}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_services_of_a_node_agree_on_servers_copies_and_the_way_of_policies(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, server = render(variant), find(render(variant), "Service", "nats")
    replicas = find(objects, "StatefulSet", "nats")["spec"]["replicas"]
    secured = "nats-accounts" in nats_files(objects)["clients.conf"].partition("include ")[2]
    for workload, container in services(objects):
        config = loaded(objects, workload, container, tmp_path, monkeypatch)
        scheme = "tls" if secured else "nats"
        swarm_url = config.nats.swarm_url
        if any(entry["name"] == "SWARM_NATS__SWARM_URL" for entry in container["env"]):
            assert variant == "joined" and role_of(workload) == "verifier"
            swarm_url = config.nats.node_url  # it is elsewhere, as a Secret says
        assert config.nats.node_url == swarm_url == f"{scheme}://{name_of(server)}:{server['spec']['ports'][0]['port']}"
        assert config.nats.replicas == replicas
        assert config.nats.create_streams is not secured
        assert bool(config.nats.node_key_file) == bool(config.nats.node_ca_file) == secured
        by_volume = any(mount["mountPath"] == "/policies" for mount in container["volumeMounts"])
        node_by_volume = any(
            name_of(claim) == f"{config.node.id}-policies" for claim in with_kind(objects, "PersistentVolumeClaim")
        )
        assert by_volume == (node_by_volume and role_of(workload) in ("generator", "trainer"))
        assert config.policy_store.uri == ("file:///policies" if node_by_volume else "nats://")


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_process_is_told_to_read_or_write_is_mounted(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(variant)
    for workload, container in services(objects):
        config = loaded(objects, workload, container, tmp_path, monkeypatch)
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounts[str(config.node.var_dir)] is False and mounts["/tmp"] is False
        files = [config.nats.node_key_file, config.nats.node_ca_file, config.nats.swarm_ca_file]
        if role_of(workload) == "verifier":
            files += [config.nats.swarm_key_file, config.verifier.signing_key_file]
            files += [str(config.verifier.roster_file)] if config.verifier.trust == "roster" else []
        for file in filter(None, files):
            assert mounts[str(Path(file).parent)] is True, f"{name_of(workload)}: {file}"
        if role_of(workload) in ("generator", "trainer") and config.model.path.startswith("/"):
            assert mounts[config.model.path] is True, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_config_map_and_secret_and_key_that_is_used_exists_or_is_one_that_people_make(variant: str) -> None:
    objects = render(variant)
    nodes = {str(node_of(workload)) for workload, _ in services(objects)}
    shared, secrets = made_by_command("Secret", []), made_by_command("Secret", nodes)
    secrets |= {f"{node}-hub": HUB_TOKEN for node in nodes}
    maps = made_by_command("ConfigMap", []) | {name_of(each): set(each["data"]) for each in with_kind(objects, "ConfigMap")}
    assert not with_kind(objects, "Secret"), "secrets are named, never stored"
    secrets, maps = secrets | OUTSIDE_SECRETS, maps | OUTSIDE_CONFIG_MAPS
    for workload in workloads(objects):
        for kind, name, keys in references(workload):
            held = (secrets if kind == "Secret" else maps).get(name)
            assert held is not None and keys <= held, f"{name_of(workload)}: {kind} {name} {sorted(keys)}"
            if kind == "Secret" and (node := node_of(workload)) and name not in shared:
                assert name.startswith(f"{node}-"), f"{name_of(workload)} reads {name}"


KINDS = {"configMapRef": "ConfigMap", "secretRef": "Secret"}


def references(workload: Object) -> list[tuple[str, str, set[str]]]:
    """Return what a pod refers to: kind, name and the keys it picks."""
    found: list[tuple[str, str, set[str]]] = []
    for volume in pod_of(workload)["volumes"]:
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            if "configMap" in source:
                found.append(("ConfigMap", source["configMap"]["name"], picked(source["configMap"])))
            if "secret" in source:
                name = source["secret"].get("secretName") or source["secret"]["name"]
                found.append(("Secret", name, picked(source["secret"])))
    for container in containers(workload):
        for source in container.get("envFrom", []):
            found += [(KINDS[field], each["name"], set()) for field, each in source.items()]
        for entry in container.get("env", []):
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if chosen := entry.get("valueFrom", {}).get(field):
                    found.append((kind, chosen["name"], {chosen["key"]}))
    return found


def picked(source: Object) -> set[str]:
    return {item["key"] for item in source.get("items", [])}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if VARIANTS[name].overlay == "cluster"])
def test_each_role_has_its_own_key_and_the_verifier_alone_those_of_the_swarm(variant: str) -> None:
    for workload in workloads(render(variant)):
        role, node = role_of(workload), node_of(workload)
        # The authority's certificate may come out of the servers' Secret; the rest is theirs.
        trust = ("Secret", "nats-server-tls", {"ca.crt"})
        read = {name for kind, name, keys in references(workload) if kind == "Secret" and (kind, name, keys) != trust}
        allowed = {
            "verifier": {f"{node}-verifier", f"{node}-signing"},
            "operator": {f"{node}-operator"} if node else {"swarm-operator"},
            "nats": {"nats-server-tls", "nats-accounts"},
            "nats-watch": {"nats-watch"},
            "model-download": {f"{node}-hub"},
            "trainer-worker": {f"{node}-trainer"},
        }.get(str(role), {f"{node}-{role}"})
        assert read <= allowed, f"{name_of(workload)} reads {sorted(read - allowed)}"
        if role == "verifier":
            assert f"{node}-signing" in read


def test_the_swarms_streams_are_made_with_the_operators_key_in_one_pod_and_in_as_many_copies_as_there_are_servers() -> None:
    objects = render("cluster")
    holders = [each for each in workloads(objects) if ("Secret", "swarm-operator", {"swarm.nk"}) in references(each)]
    assert [name_of(each) for each in holders] == ["swarm-operator"]
    (init,) = pod_of(holders[0])["initContainers"]
    assert init["command"][3:] == ["nats", "init", "--plane", "swarm", "--key", "/etc/swarm-operator/swarm.nk"]
    assert environment(objects, init)["SWARM_NATS__REPLICAS"] == "3"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_verifier_keeps_its_identity(variant: str) -> None:
    """Either the key is given, or the folder in which it makes one outlives the pod, which then has
    to be the only one.
    """
    objects = render(variant)
    for workload, container in services(objects):
        if role_of(workload) == "verifier" and "SWARM_VERIFIER__SIGNING_KEY_FILE" not in environment(objects, container):
            var = next(volume for volume in pod_of(workload)["volumes"] if volume["name"] == "var")
            assert "persistentVolumeClaim" in var and workload["spec"]["replicas"] == 1, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_claim_exists_and_is_used(variant: str) -> None:
    objects = render(variant)
    claims = {name_of(each) for each in with_kind(objects, "PersistentVolumeClaim")}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for workload in workloads(objects)
        for volume in pod_of(workload)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims
    for workload in with_kind(objects, "StatefulSet"):
        assert workload["spec"]["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_streams_reserve_fits_what_a_server_may_store_and_its_volume(variant: str) -> None:
    objects = render(variant)
    nats = find(objects, "StatefulSet", "nats")
    told = environment(objects, pod_of(nats)["containers"][0])
    allowed = amount(str(told["NATS_MAX_FILE_STORE"]).removesuffix("B").replace("G", "Gi"))
    volume = amount(nats["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"])
    nodes = {str(node_of(workload)) for workload, _ in services(objects)}
    streams = [spec for node in nodes for spec in node_streams(node)] + list(swarm_streams())
    # Each has a companion for its large payloads, with the same limit.
    reserved = sum(2 * spec.max_bytes for spec in streams if spec.max_bytes)
    assert reserved < allowed < volume, (reserved / 2**30, allowed / 2**30, volume / 2**30)


@pytest.mark.parametrize("variant", ["cluster-keda", "cluster-everything"])
def test_keda_watches_the_queue_of_its_own_node_in_the_account_of_its_node(variant: str) -> None:
    objects = render(variant)
    scaled = with_kind(objects, "ScaledObject")
    assert {node_of(each) for each in scaled} == {node_of(workload) for workload, _ in services(objects)}
    for each in scaled:
        node = str(node_of(each))
        (trigger,) = each["spec"]["triggers"]
        told = trigger["metadata"]
        assert (told["stream"], told["consumer"]) == (node_rollouts_stream(node), VERIFIER_CONSUMER)
        assert told["account"] == node_account(node, {}).name
        service, port = re.fullmatch(r"([a-z-]+)\.swarm\.svc:(\d+)", told["natsServerMonitoringEndpoint"]).groups()  # type: ignore[union-attr]
        assert int(port) in [entry["port"] for entry in find(objects, "Service", service)["spec"]["ports"]]


def test_a_cluster_node_is_a_folder_and_one_line() -> None:
    overlay = (K8S / "overlays" / "cluster" / "kustomization.yaml").read_text()
    folders = {folder.name for folder in (K8S / "overlays" / "cluster" / "nodes").iterdir()}
    assert set(re.findall(r"^  - nodes/(\S+)$", overlay, re.MULTILINE)) == folders == {"alpha", "beta", "gamma"}
    for name in folders:
        assert overlay.count(f"/{name}\n") == 1


def test_nodes_differ_in_model_tasks_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render("cluster")
    models, tasks, sizes = set(), set(), set()
    for workload, container in services(objects):
        if role_of(workload) == "generator":
            config = loaded(objects, workload, container, tmp_path, monkeypatch)
            models.add(config.model.name)
            tasks.add(tuple(spec.dataset for spec in config.tasks))
            sizes.add(workload["spec"]["replicas"])
            data = find(objects, "ConfigMap", container_config(workload))["data"]
            assert data["model"] == config.model.name, "what is downloaded is what is trained"
            assert re.fullmatch(r"[0-9a-f]{40}", data["model-revision"]), "at one commit"
    assert len(models) == len(tasks) == len(sizes) == 3


def container_config(workload: Object) -> str:
    volume = next(each for each in pod_of(workload)["volumes"] if each["name"] == "config")
    name: str = volume["configMap"]["name"]
    return name


def test_every_node_has_the_four_roles() -> None:
    for variant in ("single-box", "cluster"):
        objects = render(variant)
        by_node: dict[str | None, set[str | None]] = {}
        for workload, _ in services(objects):
            by_node.setdefault(node_of(workload), set()).add(role_of(workload))
        assert len(by_node) >= 2 and all(roles == set(ROLES) for roles in by_node.values())
