"""Who finds and who may talk to whom: services, network policies, budgets and autoscalers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.k8s.manifests import (
    ROLES,
    VARIANTS,
    Object,
    containers,
    find,
    name_of,
    node_of,
    pod_labels,
    pod_of,
    render,
    role_of,
    selected,
    with_kind,
    workloads,
)

RESTRICTED = [name for name in VARIANTS if name != "cluster-unrestricted"]

NAMES = {("kube-system", 53), ("openshift-dns", 53), ("openshift-dns", 5353), ("169.254.20.10/32", 53)}
"""Where a cluster's DNS may be: CoreDNS or kube-dns, OpenShift's pods, NodeLocal DNSCache on the
machine itself.
"""


def ports_of(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for container in containers(workload) for port in container.get("ports", [])}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_service_finds_pods_that_have_its_ports(variant: str) -> None:
    objects = render(variant)
    for service in with_kind(objects, "Service"):
        pods = [each for each in workloads(objects) if selected({"matchLabels": service["spec"]["selector"]}, pod_labels(each))]
        assert len(pods) == 1, name_of(service)
        for port in service["spec"]["ports"]:
            assert ports_of(pods[0])[port["targetPort"]] == port["port"], name_of(service)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stateful_set_has_its_headless_service(variant: str) -> None:
    objects = render(variant)
    for each in with_kind(objects, "StatefulSet"):
        service = find(objects, "Service", each["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert selected({"matchLabels": service["spec"]["selector"]}, pod_labels(each))


@pytest.mark.parametrize("variant", VARIANTS)
def test_port_names_and_numbers_are_single_in_a_pod(variant: str) -> None:
    for workload in workloads(render(variant)):
        named = [(port["name"], port["containerPort"]) for container in containers(workload) for port in container.get("ports", [])]
        assert len({name for name, _ in named}) == len({number for _, number in named}) == len(named), name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_probes_name_ports_of_their_own_container(variant: str) -> None:
    for workload in workloads(render(variant)):
        for container in containers(workload):
            names = {port["name"] for port in container.get("ports", [])}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe := container.get(kind):
                    assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in names, name_of(workload)


@pytest.mark.parametrize("variant", VARIANTS)
def test_routes_lead_to_every_server_by_its_headless_name(variant: str) -> None:
    objects = render(variant)
    nats = find(objects, "StatefulSet", "nats")
    volume = next(each for each in pod_of(nats)["volumes"] if each["name"] == "config")
    routes = find(objects, "ConfigMap", volume["configMap"]["name"])["data"]["cluster.conf"]
    expected = nats["spec"]["replicas"] if nats["spec"]["replicas"] > 1 else 0
    listed = [line.strip() for line in routes.splitlines() if line.strip().startswith("nats://")]
    assert listed == [f"nats://nats-{index}.{nats['spec']['serviceName']}:6222" for index in range(expected)]
    assert ("cluster" in ports_of(nats)) == bool(expected)
    budgets = with_kind(objects, "PodDisruptionBudget")
    assert [budget["spec"]["maxUnavailable"] for budget in budgets] == ([1] if expected else [])
    for budget in budgets:
        assert [name_of(each) for each in workloads(objects) if selected(budget["spec"]["selector"], pod_labels(each))] == ["nats"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_scales_exists_and_nobody_else_says_how_many(variant: str) -> None:
    objects = render(variant)
    scalers = with_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in scalers]
    assert len(targets) == len(set(targets))
    for name in targets:
        target = find(objects, "Deployment", name)
        assert role_of(target) == "verifier" and "replicas" not in target["spec"]
    for each in with_kind(objects, "Deployment", "StatefulSet"):
        if name_of(each) not in targets:
            assert each["spec"]["replicas"] >= 1
        if role_of(each) in ("sampler", "trainer"):
            assert each["spec"]["replicas"] == 1
        if role_of(each) == "sampler":
            assert each["spec"]["strategy"] == {"type": "Recreate"}


def is_part_of_several_machines(objects: Iterable[Object], workload: Object) -> bool:
    return any(
        selected(policy["spec"]["podSelector"], pod_labels(workload))
        for policy in with_kind(objects, "NetworkPolicy")
        if name_of(policy).endswith("trainer-machines")
    )


def policies_on(objects: Iterable[Object], labels: dict[str, str], direction: str) -> list[Object]:
    return [
        policy
        for policy in with_kind(objects, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selected(policy["spec"]["podSelector"], labels)
    ]


def reached(objects: Iterable[Object], workload: Object) -> set[tuple[str, int]]:
    """Where a pod may connect to: a role, `dns` or a block of addresses, and a port."""
    found: set[tuple[str, int]] = set()
    for policy in policies_on(objects, pod_labels(workload), "Egress"):
        for rule in policy["spec"].get("egress", []):
            for peer in rule["to"]:
                for port in rule["ports"]:
                    found |= {(whom, port["port"]) for whom in peer_names(objects, peer)}
    return found


def peer_names(objects: Iterable[Object], peer: Object) -> set[str]:
    if "ipBlock" in peer:
        return {peer["ipBlock"]["cidr"]}
    if space := peer.get("namespaceSelector"):
        return {"namespaces"} if not space.get("matchLabels") else {space["matchLabels"]["kubernetes.io/metadata.name"]}
    return {str(role_of(each)) for each in workloads(objects) if selected(peer["podSelector"], pod_labels(each))}


@pytest.mark.parametrize("variant", RESTRICTED)
def test_every_pod_is_under_a_policy_in_both_directions_and_nothing_is_open_to_all(variant: str) -> None:
    objects = render(variant)
    deny = find(objects, "NetworkPolicy", "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for policy in with_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            assert rule["to"] and rule["ports"], name_of(policy)
        for rule in policy["spec"].get("ingress", []):
            assert rule["from"] and rule["ports"], name_of(policy)
    for workload in workloads(objects):
        for direction in ("Ingress", "Egress"):
            names = {name_of(policy) for policy in policies_on(objects, pod_labels(workload), direction)}
            assert "default-deny" in names
        assert reached(objects, workload), f"{name_of(workload)} reaches nothing at all"


@pytest.mark.parametrize("variant", RESTRICTED)
def test_services_reach_nats_and_names_and_nothing_else(variant: str) -> None:
    objects = render(variant)
    for workload in workloads(objects):
        whom = ("nats", 4222)
        if role_of(workload) == "nats":
            whom = ("nats", 6222)
        elif role_of(workload) == "model-download":
            whom = ("0.0.0.0/0", 443)
        further = set[tuple[str, int]]()
        # A node whose swarm is elsewhere: its verifiers go there, or its servers do.
        way_out = {("joined", "verifier"): 4222, ("joined-leaf", "nats"): 7422, ("joined-leaf-cluster", "nats"): 7422}
        if port := way_out.get((variant, str(role_of(workload)))):
            further |= {("0.0.0.0/0", port), ("::/0", port)}
        found = reached(objects, workload)
        if is_part_of_several_machines(objects, workload):
            others = {("trainer", 1024), ("trainer-worker", 1024)}
            assert found >= others
            found -= others
            if role_of(workload) == "trainer-worker":  # it computes, and talks to nobody else
                assert found == NAMES
                continue
        assert found == {whom, *further, *NAMES}, name_of(workload)


@pytest.mark.parametrize("variant", RESTRICTED)
def test_services_are_reached_by_prometheus_alone_and_nats_by_its_clients(variant: str) -> None:
    objects = render(variant)
    for workload in workloads(objects):
        numbers = set(ports_of(workload).values())
        opened: dict[int, set[str]] = {}
        for policy in policies_on(objects, pod_labels(workload), "Ingress"):
            for rule in policy["spec"].get("ingress", []):
                for port in rule["ports"]:
                    who = opened.setdefault(port["port"], set())
                    for peer in rule["from"]:
                        space = peer.get("namespaceSelector", {})
                        who |= set(space.get("matchLabels", {}).values())
                        who |= {value for each in space.get("matchExpressions", []) for value in each["values"]}
                        if "podSelector" in peer:
                            who |= peer_names(objects, peer)
        if is_part_of_several_machines(objects, workload):
            assert opened.pop(1024) == {"trainer", "trainer-worker"}
        if role_of(workload) in (*ROLES, "nats-watch"):
            assert opened == {9400: {"monitoring"}} and numbers == {9400}, name_of(workload)
        elif role_of(workload) == "nats":
            clients = {str(role_of(each)) for each in workloads(objects)} - {"nats", "model-download", "trainer-worker"}
            assert opened[4222] == clients and opened[6222] == {"nats"}
            assert opened[7777] == {"monitoring", "keda"}
            assert opened[8222] == opened[7777]
            assert numbers <= opened.keys()
        else:
            assert not opened, name_of(workload)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "watched" in name or "everything" in name])
def test_pod_monitors_find_pods_that_have_their_port(variant: str) -> None:
    objects = render(variant)
    scraped: set[str | None] = set()
    for monitor in with_kind(objects, "PodMonitor"):
        taken = [each for each in workloads(objects) if selected(monitor["spec"]["selector"], pod_labels(each))]
        assert taken, name_of(monitor)
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in ports_of(each) for each in taken), name_of(monitor)
        scraped |= {role_of(each) for each in taken}
    assert scraped - {"nats-watch"} == {*ROLES, "nats"}
    assert ("nats-watch" in scraped) == any(role_of(each) == "nats-watch" for each in workloads(objects))


def test_the_namespace_enforces_what_the_pods_promise() -> None:
    for variant in ("single-box", "cluster"):
        space = find(render(variant), "Namespace", "swarm")
        assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_an_object_of_a_node_says_so() -> None:
    for each in render("cluster"):
        node = next((name for name in ("alpha", "beta", "gamma") if name_of(each).startswith(f"{name}-")), None)
        assert node_of(each) == node, name_of(each)
