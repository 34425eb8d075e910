"""Every combination of components renders, and is valid for the three newest Kubernetes minors and
for the CRDs it uses.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jsonschema
import kubernetes_validate.utils
import pytest
from kubernetes_validate.utils import SchemaNotFoundError, all_versions, validate

from tests.k8s.manifests import (
    K8S,
    ROLES,
    VARIANTS,
    Object,
    Variant,
    build,
    name_of,
    node_of,
    parsed,
    render,
    role_of,
    switched,
    with_kind,
    workloads,
)

SCHEMAS = Path(__file__).parent / "schemas"
# Each version is listed twice, for its folder of strict schemas too.
MINORS = sorted(set(all_versions()), key=lambda version: [int(part) for part in version.split(".")])
CHECKED_MINORS = [next(each for each in MINORS if each.startswith("1.27.")), *MINORS[-3:]]
"""The oldest that docs/kubernetes-start.md names, and the three newest."""
CUSTOM = {
    ("cert-manager.io/v1", "Certificate"),
    ("cert-manager.io/v1", "Issuer"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
}
PARTS = ("leaderTemplate", "workerTemplate")
# It reads the same large files for every object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def custom_schema(each: Object) -> Object:
    schema: Object = json.loads((SCHEMAS / f"{each['kind'].lower()}.json").read_text())
    return schema


def as_pod_template(template: Object) -> Object:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}


@functools.cache
def problem_with(text: str, version: str) -> str | None:
    """Return what is wrong with an object, given as JSON; asked once for objects that many variants
    share.
    """
    each = json.loads(text)
    if (each["apiVersion"], each["kind"]) in CUSTOM:
        errors = list(jsonschema.Draft202012Validator(custom_schema(each)).iter_errors(each))
        told = each["spec"].get("leaderWorkerTemplate", {})
        pods = [problem_with(json.dumps(as_pod_template(told[part])), version) for part in PARTS if part in told]
        return "; ".join([*(f"{error.json_path}: {error.message}" for error in errors), *filter(None, pods)]) or None
    try:
        validate(each, version, strict=True)
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    except SchemaNotFoundError as error:
        return error.message
    return None


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_valid_for_the_three_newest_kubernetes_minors_with_no_unknown_field(variant: str) -> None:
    objects = render(variant)
    problems = [
        f"{version}: {each['kind']} {name_of(each)}: {problem}"
        for each in objects
        for version in CHECKED_MINORS
        if (problem := problem_with(json.dumps(each, sort_keys=True), version))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("kind", "where", "field"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0), "livenesProbe"),
        ("ScaledObject", ("spec",), "scaleTargetReference"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate"), "groupSize"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0), "commands"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0), "scrape_interval"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "expression"),
        ("Certificate", ("spec",), "dnsName"),
        ("Issuer", ("spec", "selfSigned"), "secretName"),
    ],
)
def test_a_misspelt_field_is_found(kind: str, where: tuple[str | int, ...], field: str) -> None:
    objects = render("cluster-everything") + render("cluster-cert-manager") + render("cluster-trainer-machines")
    (each,) = [json.loads(json.dumps(each)) for each in with_kind(objects, kind)][-1:]
    assert problem_with(json.dumps(each, sort_keys=True), CHECKED_MINORS[-1]) is None
    place = each
    for step in where:
        place = place[step]
    place[field] = "x"
    assert field in str(problem_with(json.dumps(each, sort_keys=True), CHECKED_MINORS[-1]))


@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if not {"watched", "keda", "everything", "cert", "machines"} & set(name.split("-"))]
)
def test_without_the_components_that_want_operators_there_is_no_custom_resource(variant: str) -> None:
    for each in render(variant):
        group = each["apiVersion"].partition("/")[0]
        kubernetes_own = {"v1", "apps", "batch", "policy", "autoscaling", "networking.k8s.io", "scheduling.k8s.io"}
        assert group in kubernetes_own, (each["apiVersion"], each["kind"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_two_objects_have_the_same_name(variant: str) -> None:
    names = [
        (each["apiVersion"].partition("/")[0], each["kind"], each["metadata"].get("namespace"), name_of(each))
        for each in render(variant)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_in_the_one_namespace(variant: str) -> None:
    for each in render(variant):
        if each["kind"] not in {"Namespace", "PriorityClass"}:  # which belong to the whole cluster
            assert each["metadata"]["namespace"] == "swarm", name_of(each)


def test_a_node_is_added_by_a_copied_folder_and_one_line(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "cluster"
    shutil.copytree(overlay / "nodes" / "alpha", overlay / "nodes" / "delta")
    for file in (overlay / "nodes" / "delta").iterdir():
        file.write_text(file.read_text().replace("alpha", "delta").replace("ALPHA", "DELTA"))
    top = overlay / "kustomization.yaml"
    top.write_text(top.read_text().replace("  - nodes/gamma\n", "  - nodes/gamma\n  - nodes/delta\n"))
    before = {(each["kind"], name_of(each)) for each in render("cluster")}
    after = {(each["kind"], name_of(each)) for each in parsed(build(overlay))}
    assert before < after
    first_words = {name.removeprefix("delta-").partition("-")[0] for _, name in after - before}
    assert first_words >= {*ROLES, "node", "settings", "model", "operator"}
    assert all(name.startswith("delta-") for _, name in after - before)


def test_every_component_is_in_some_variant() -> None:
    """A component that no variant switches on and no overlay lists would be rendered by nobody."""
    listed = "\n".join(file.read_text() for file in K8S.glob("overlays/**/kustomization.yaml"))
    for folder in sorted((K8S / "components").iterdir()):
        assert f"components/{folder.name}\n" in listed, f"{folder.name} is in no overlay, not even behind a #"


def test_a_node_without_a_trainer_has_generator_and_verifier_and_its_services_know_it(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    on = (("nodes/beta/kustomization.yaml", "without-trainer"),)
    objects = parsed(build(switched(Variant("single-box", on=on), tmp_path / "k8s")))
    pods = {node: {role_of(each) for each in workloads(objects) if node_of(each) == node} for node in ("alpha", "beta")}
    assert pods["alpha"] - pods["beta"] == {"sampler", "trainer"} and {"generator", "verifier"} <= pods["beta"]
    assert not [name_of(each) for each in objects if node_of(each) == "beta" and role_of(each) in ("sampler", "trainer")]
    roles = {node_of(each): each["data"].get("SWARM_NODE__ROLES") for each in objects if "-settings-" in name_of(each)}
    assert roles == {"alpha": None, "beta": "generator,verifier"}
