"""What the monitoring components put into a cluster, rendered as a platform team would."""

from __future__ import annotations

import json

import yaml

from monitoring.rules import RULES
from tests.k8s.manifests import ROLES, label, name_of, node_of, pod_labels, pod_of, render, role_of, with_kind, workloads
from tests.monitoring.dashboards import dashboards

LAST_APPLIED_LIMIT_BYTES = 262_144
DASHBOARDS = dashboards()
META_LABEL = "__meta_kubernetes_pod_label_"


def _targets(monitor: dict) -> list[dict]:
    """Pod templates that a PodMonitor selects."""
    selector = monitor["spec"]["selector"]
    return [
        workload
        for workload in workloads(render("cluster-watched"))
        if all(pod_labels(workload).get(key) == value for key, value in selector["matchLabels"].items())
        and all(pod_labels(workload).get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []))
    ]


def _labels_after(relabelings: list[dict], pod: dict[str, str]) -> dict[str, str]:
    """Labels that a target of this pod gets, by the relabelling rules `replace` only."""
    meta = {META_LABEL + key.replace(".", "_").replace("/", "_").replace("-", "_"): value for key, value in pod.items()}
    meta["__meta_kubernetes_pod_name"] = "the-pod-0"
    return {each["targetLabel"]: each.get("replacement") or meta[each["sourceLabels"][0]] for each in relabelings}


def test_every_dashboard_comes_as_a_labelled_configmap_that_apply_can_hold() -> None:
    for variant in ("cluster-watched", "cluster-plainly-seen"):
        found = {name_of(each): each for each in with_kind(render(variant), "ConfigMap") if label(each, "grafana_dashboard") == "1"}
        assert set(found) == {f"swarm-dashboard-{name}" for name in DASHBOARDS}, "fixed names, so that an update replaces"
        for name, dashboard in DASHBOARDS.items():
            (text,) = found[f"swarm-dashboard-{name}"]["data"].values()
            assert json.loads(text)["uid"] == dashboard.uid
            assert len(json.dumps(found[f"swarm-dashboard-{name}"])) < LAST_APPLIED_LIMIT_BYTES


def test_every_process_is_scraped_once_with_the_labels_that_rules_go_by() -> None:
    monitors = {name_of(each): each for each in with_kind(render("cluster-watched"), "PodMonitor")}
    assert set(monitors) == {"swarm", "swarm-nats"}
    services, servers = _targets(monitors["swarm"]), _targets(monitors["swarm-nats"])
    assert {role_of(each) for each in services} == set(ROLES)
    assert len({node_of(each) for each in services}) * len(ROLES) == len(services)
    for workload in services:
        labels = _labels_after(monitors["swarm"]["spec"]["podMetricsEndpoints"][0]["relabelings"], pod_labels(workload))
        assert labels == {"job": "swarm", "node": node_of(workload), "role": role_of(workload), "instance": "the-pod-0"}
    for workload in servers:
        labels = _labels_after(monitors["swarm-nats"]["spec"]["podMetricsEndpoints"][0]["relabelings"], pod_labels(workload))
        assert labels == {"job": name_of(workload), "instance": "the-pod-0"}
    assert sorted(name_of(each) for each in servers) == ["nats", "nats-watch"]
    for workload in (*services, *servers):
        ports = [port["name"] for container in pod_of(workload)["containers"] for port in container.get("ports", [])]
        assert ports.count("metrics") == 1, name_of(workload)


def test_the_server_s_exporter_is_told_to_say_what_rules_read() -> None:
    (server,) = [each for each in workloads(render("cluster-watched")) if name_of(each) == "nats"]
    (exporter,) = [each for each in pod_of(server)["containers"] if each["name"] == "exporter"]
    assert {"-varz", "-jsz=all", "-healthz", "-prefix=nats", "-use_internal_server_name"} <= set(exporter["args"])


def test_a_cluster_without_the_operator_gets_the_same_rules_and_no_object_that_it_does_not_know() -> None:
    objects = render("cluster-plainly-seen")
    assert not [each for each in objects if each["apiVersion"].startswith("monitoring.coreos.com")]
    by_name = {name_of(each): each for each in with_kind(objects, "ConfigMap")}
    assert by_name["swarm-prometheus-rules"]["data"] == {"swarm.yaml": RULES.read_text()}
    scrape = yaml.safe_load(by_name["swarm-prometheus-scrape"]["data"]["swarm.yaml"])
    assert [job["job_name"] for job in scrape["scrape_configs"]] == ["swarm", "nats"]
    operators = {name_of(each): each for each in with_kind(render("cluster-watched"), "PodMonitor")}
    for job, monitor in zip(scrape["scrape_configs"], (operators["swarm"], operators["swarm-nats"]), strict=True):
        plain = {each["target_label"]: each["source_labels"] for each in job["relabel_configs"] if "target_label" in each}
        relabelings = monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
        assert plain == {each["targetLabel"]: each["sourceLabels"] for each in relabelings if "sourceLabels" in each}


def test_rules_of_the_operator_s_object_are_those_that_are_tested() -> None:
    (rule,) = with_kind(render("cluster-watched"), "PrometheusRule")
    tested = yaml.safe_load(RULES.read_text())
    assert rule["spec"]["groups"] == tested["groups"]
