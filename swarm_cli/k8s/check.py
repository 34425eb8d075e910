"""`swarm k8s check`: finds what in an overlay would stop the swarm, or a running one, and that
nothing else names in time.

A server-side dry run says what the API server refuses. Events of pods and claims name missing
Secrets and ConfigMaps, labels, taints, GPUs that no machine has and volumes that cannot be made,
and `swarm k8s secrets` names what is wrong with keys and certificates. None of that is repeated
here. The only program used is `kubectl`, and only to read.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.config import ConfigError, NodeConfig, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG
from shared.text import error_text
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.config_checks import objective_problem
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError
from swarm_cli.k8s.overlay import MAX_CHARS, NODE_LABEL, File, Object, Overlay, Variable, Workload, probed_ports, quantity
from swarm_cli.task_probe import TaskProbe

TIMEOUT_S = 30.0
"""For one request. The first may have to fetch a token."""
STANDARD = "-"
_SAID_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for the user: what is wrong, what it affects, and the remedy."""

    stops: bool
    """Whether a part of the swarm would not run; if not, it is only worth knowing."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{'stops' if self.stops else 'note '}  {self.what}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, as far as it was read."""

    names: Mapping[str, set[str]]
    """Of the classes, by kind."""
    objects: Mapping[str, Sequence[Object]]
    """By kind: quotas, storage classes, NATS's servers, and the pods that answer DNS."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """For each kind that could not be read, why; rules do not judge it."""


def check(
    overlay: Annotated[
        str, typer.Argument(metavar="OVERLAY", help="The overlay's folder, a file of rendered YAML, or - for standard input.")
    ],
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.  [default: the current one]")] = "",
    cluster: Annotated[bool, typer.Option("--cluster/--no-cluster", help="Also look at the cluster.")] = True,
) -> None:
    """Find what in an overlay, or in your kubeconfig's cluster, would stop the swarm, before you
    run `kubectl apply`.

    Changes nothing, and reads each node's configuration as its pods would. Each finding is one
    line: `stops` or `note`, what is wrong, and the remedy. Exits with 1 if a finding stops the
    swarm or a part of it. What the API server would refuse, `kubectl apply --dry-run=server` says.

    Of a folder kustomize fetches what it names at other addresses, as `kubectl apply -k` would:
    look at `resources:` of a folder from somebody else, or ask for the rendered file.
    """
    objects = Overlay.parsed(_text(overlay), overlay)
    with TaskProbe() as apart:
        found = [*image_findings(objects), *namespace_findings(objects), *configuration_findings(objects, apart)]
    asked = _context(context) if cluster else ""
    if asked:
        found += cluster_findings(objects, read_cluster(objects.namespace, asked, monitored=bool(objects.with_kind(*_SELECTORS))))
    for each in sorted(found, key=lambda finding: not finding.stops):
        say(str(each))
    stopping = sum(each.stops for each in found)
    where = f"{overlay} on {asked}" if asked else overlay
    note(f"{where}: {stopping} of {len(found)} findings would stop it" if stopping else f"{where}: no finding would stop it")
    if stopping:
        raise typer.Exit(1)


def image_findings(overlay: Overlay) -> Iterator[Finding]:
    """Images that are still placeholders. Applied to a swarm that runs, they would stop it."""
    images = {container["image"] for workload in overlay.workloads() for container in workload.containers}
    if named := [image for image in images if image.startswith("registry.invalid/") or image.endswith("sha256:" + "0" * 64)]:
        remedy = "`make images REGISTRY=... PUSH=1` writes the digests of what it pushed into k8s/components/images"
        yield Finding(True, f"no image is named yet ({listed(named, 1)})", remedy)


_WITHOUT_NAMESPACE = {"Namespace", "PriorityClass", "CustomResourceDefinition", "RuntimeClass", "StorageClass", "PersistentVolume"}


def namespace_findings(overlay: Overlay) -> Iterator[Finding]:
    """Objects without a namespace beside pods that have one: a component of an overlay that names
    no namespace itself, although the overlay below it does.
    """
    inside = [each for each in overlay.objects if each["kind"] not in _WITHOUT_NAMESPACE and not each["kind"].startswith("Cluster")]
    lost = [f"{each['kind']} {each['metadata'].get('name')}" for each in inside if not each["metadata"].get("namespace")]
    if lost and len(lost) < len(inside):
        remedy = f"write `namespace: {overlay.namespace}` into the uppermost kustomization.yaml"
        yield Finding(True, f"no namespace, so not beside the swarm's pods: {listed(lost, 3)}", remedy)


@dataclass(frozen=True, slots=True)
class _Reader:
    """A container that reads a node's configuration when it starts."""

    workload: Workload
    container: Object
    variables: Mapping[str, Variable]
    file: File

    @property
    def node(self) -> str:
        return str(self.workload.labels.get(NODE_LABEL, ""))

    def place(self, problem: str) -> tuple[str, str]:
        """Where what a problem names is set, and what to correct."""
        setting, variable = _SETTING.match(problem), _VARIABLE.match(problem)
        name = variable[1] if variable else f"SWARM_{setting[0].replace('.', '__').upper()}" if setting else ""
        if name in self.variables:
            return f"{self.variables[name].source}, {name}", "correct the kustomization that sets it"
        folder = f"nodes/{self.node}" if self.node else "the folder of its node"
        return f"ConfigMap {self.file.config_map}, {self.file.entry}", f"correct {folder}/{self.file.entry}"


_SETTING = re.compile(r"[a-z_]+\.\w+")
_VARIABLE = re.compile(r"environment variable (\w+)(?: \([^)]*\))?: ")
_ENDS = f"would end with code {EXIT_CONFIG}"


def configuration_findings(overlay: Overlay, apart: TaskProbe) -> list[Finding]:
    """Faults of every node's configuration as its pods will read it: the file in the ConfigMap, and
    the variables that win over it. Each fault once, with the workloads that read it. What only the
    pod has (model, keys, files, installed packages) is not looked at.

    `apart`: the process that derives the nodes' tasks.
    """
    found: dict[tuple[str, str, str, str], list[str]] = {}

    @cache
    def task_problems(tasks: str) -> Sequence[str]:
        config = NodeConfig.model_validate_json(tasks)
        places = [number for number, spec in enumerate(config.tasks) if spec.source != "file"]
        held_out = config.eval.tasks if len(places) == len(config.tasks) else 0
        remedy = "make the sizes in the `config` of its [[tasks]] smaller; if this machine was busy, try again"
        return apart.derive([config.tasks[number] for number in places], held_out, remedy, places).problems if places else []

    for reader in _readers(overlay):
        config, problems = _loaded(reader)
        if config is not None:
            problems += [(each, _ENDS) for each in [objective_problem(config)] if each]
            asked = NodeConfig(node=config.node, tasks=config.tasks, eval=config.eval)
            problems += [(" ".join(each.split()), _ENDS) for each in task_problems(asked.model_dump_json())]
            problems += _pod_problems(config, reader)
        for problem, effect in problems:
            found.setdefault((*reader.place(problem), problem, effect), []).append(reader.workload.name)
    return [
        Finding(True, f"{place}: {_VARIABLE.sub('', problem)}; {listed(names)} {effect}", remedy)
        for (place, remedy, problem, effect), names in found.items()
    ]


def _readers(overlay: Overlay) -> Iterator[_Reader]:
    """The services' containers and init containers that are given a file by `SWARM_CONFIG`."""
    for workload in overlay.workloads():
        starting = workload.pod.get("initContainers", [])
        for container in [*starting, *(each for each in workload.pod.get("containers", []) if each["name"] in ROLES)]:
            variables = overlay.variables(workload, container)
            path = variables.get(CONFIG_FILE_VARIABLE)
            file = overlay.mounted_file(workload, container, path.value) if path else None
            if file is not None:
                yield _Reader(workload, container, variables, file)


def _loaded(reader: _Reader) -> tuple[NodeConfig | None, list[tuple[str, str]]]:
    """The configuration, or None, and its faults with what becomes of the container."""
    if reader.file.text is None:
        return None, [(f"there is no entry {reader.file.entry}, which {CONFIG_FILE_VARIABLE} names", _ENDS)]
    try:
        tomllib.loads(reader.file.text)
    except tomllib.TOMLDecodeError as error:
        return None, [(f"it is not valid TOML: {error}", _ENDS)]
    environment = {name: each.value for name, each in reader.variables.items()}
    with tempfile.TemporaryDirectory(prefix="swarm-check-") as folder:
        path = Path(folder) / "node.toml"
        path.write_text(reader.file.text)
        try:
            return load_config(path, environment=environment), []
        except ConfigError as error:
            return None, [(" ".join(fault.split()), _ENDS) for fault in error.faults]


def _pod_problems(config: NodeConfig, reader: _Reader) -> Iterator[tuple[str, str]]:
    """Settings that do not fit the pod: the node's name, and where its probes ask."""
    if config.node.id != reader.node != "" and any(name.endswith("_KEY_FILE") for name in reader.variables):
        what = f"node.id is {config.node.id}, but the pods, volumes and keys are those of node {reader.node} (label {NODE_LABEL})"
        yield what, f"would be denied by the servers and end with code {EXIT_CONFIG}"
    role = reader.container["name"]
    asked = list(probed_ports(reader.container)) if role in ROLES else []
    unheard = "never becomes ready and is restarted again and again"
    port = config.http_port(role) if asked else None
    if wrong := [f"{probe} asks {number}" for probe, number in asked if number != port]:
        setting = "http.port" if config.http.port is not None else "http.base_port"
        yield f"{setting} makes the {role} listen on {port or 'any free port'}, but its {wrong[0]}", unheard
    if asked and config.http.host in LOOPBACK:
        yield f"http.host is {config.http.host}, where no probe reaches the {role}: it must be 0.0.0.0", unheard


def cluster_findings(overlay: Overlay, cluster: Cluster) -> list[Finding]:
    """The findings of all rules about an overlay and a cluster."""
    return [
        *_missing_classes(overlay, cluster),
        *_refused_by_quotas(overlay, cluster),
        *_network_storage(overlay, cluster),
        *_unseen_by_prometheus(overlay, cluster),
        *_unreachable_dns(overlay, cluster),
        *_steps_between(overlay, cluster),
        *(
            Finding(False, f"{kind} could not be read ({why}), so they were not checked", "ask for the right to list them")
            for kind, why in sorted(cluster.unread.items())
        ),
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """A change that needs more than an apply: the version that brings it, what it is, and what to
    do. docs/kubernetes-change.md has the same rows.
    """

    version: str
    what: str
    remedy: str


STEPS = (
    Step(
        "0.1.0",
        "groups are sent in message version 3, which older accounts refuse and older nodes do not read",
        "run `swarm k8s secrets` before you apply, and upgrade all nodes of the swarm",
    ),
)
_SERVERS = "statefulsets"


def _release(objects: Iterable[Object]) -> tuple[int, ...] | None:
    """The version in the label of NATS's StatefulSet; of one without the label (0,), as it is older
    than the label. None if there is none, or a version that is no release's.
    """
    for each in objects:
        if each["metadata"].get("name") == "nats":
            text = (each["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "0")
            return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+){0,3}", text) else None
    return None


def _steps_between(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Changes that need a step, between the version that runs and the one that would be applied."""
    running = _release(cluster.objects.get(_SERVERS, ()))
    applied = _release(overlay.with_kind("StatefulSet"))
    if running is None or applied is None:
        return
    for step in STEPS:
        if running < tuple(map(int, step.version.split("."))) <= applied:
            yield Finding(False, f"since {step.version} {step.what}", step.remedy)


_SELECTORS = {"PrometheusRule": "ruleSelector", "PodMonitor": "podMonitorSelector"}


def _unseen_by_prometheus(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Rules and monitors that every Prometheus of the operator selects by a label that they lack:
    no alert would ever fire, and nothing says so.
    """
    servers = cluster.objects.get("prometheuses", ())
    for kind, field_name in _SELECTORS.items():
        selectors = [each.get("spec", {}).get(field_name) for each in servers]
        wanted = [found.get("matchLabels", {}) for found in selectors if found is not None]
        unseen = [
            str(each["metadata"]["name"])
            for each in overlay.with_kind(kind)
            if not any((each["metadata"].get("labels") or {}).items() >= labels.items() for labels in wanted)
        ]
        if servers and unseen:
            labels = next(({**each} for each in wanted if each), {})
            pairs = ", ".join(f"{name}: {value}" for name, value in labels.items())
            remedy = f"add `labels: [{{pairs: {{{pairs}}}}}]` to the overlay" if pairs else f"set {field_name} of a Prometheus"
            yield Finding(False, f"no Prometheus here selects {kind} {listed(unseen, 3)}", remedy)


_CLASSES = (
    (
        "RuntimeClass",
        "runtimeClassName",
        "put a # before gpu-nvidia-operator in the node's kustomization, or install NVIDIA's GPU operator, which makes it",
    ),
    ("PriorityClass", "priorityClassName", "add `priorities` to the overlay, or ask for the class"),
)


def _missing_classes(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """RuntimeClasses and PriorityClasses. A pod that names a missing one is never created, so that
    no pod shows it.
    """
    for kind, key, remedy in _CLASSES:
        there = cluster.names.get(f"{kind.lower()}es")
        if there is None:
            continue
        there = there | {each["metadata"]["name"] for each in overlay.with_kind(kind)}
        asked: dict[str, list[str]] = {}
        for workload in overlay.workloads():
            name = workload.pod.get(key)
            if name and name not in there and not name.startswith("system-"):
                asked.setdefault(name, []).append(workload.name)
        for name, workloads in sorted(asked.items()):
            yield Finding(True, f"{kind} {name} does not exist, and no pod of {listed(workloads)} is ever created", remedy)


def _refused_by_quotas(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Requests of all pods that the namespace's quotas do not allow: some are never created."""
    asked: Counter[str] = Counter()
    for workload in overlay.workloads():
        asked.update({name: amount * workload.replicas for name, amount in workload.requests().items()})
    for quota in cluster.objects.get("resourcequotas", ()):
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue  # it applies only to some pods
        for resource, hard in (quota["spec"].get("hard") or {}).items():
            wants = asked[resource.removeprefix("requests.")]
            if wants > quantity(hard):
                what = f"ResourceQuota {quota['metadata']['name']} allows {hard} {resource} and the overlay asks for {wants:,.10g}"
                yield Finding(True, what, "have it raised, or remove nodes from the overlay")


_NETWORK_FILES = {
    "efs.csi.aws.com",
    "file.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "fsx.csi.aws.com",
    "nfs.csi.k8s.io",
    "smb.csi.k8s.io",
    "cluster.local/nfs-subdir-external-provisioner",
}


def _network_storage(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """A network file system for NATS, which is slow and unsafe on one and does not say so."""
    if (listed_classes := cluster.objects.get("storageclasses")) is None:
        return
    provisioners = {each["metadata"]["name"]: each["provisioner"] for each in listed_classes}
    is_default = "storageclass.kubernetes.io/is-default-class"
    default = ""
    for each in listed_classes:
        if (each["metadata"].get("annotations") or {}).get(is_default) == "true":
            default = each["metadata"]["name"]
    for claim, named in overlay.storage_classes().items():
        name = named or default
        if claim.endswith("-nats") and (provisioner := provisioners.get(name)) in _NETWORK_FILES:
            what = f"{claim} would be on {name} ({provisioner}), a network file system"
            yield Finding(False, what, "give NATS fast local or block storage")


_NAMESPACE = "kubernetes.io/metadata.name"
_ALLOW = "allow it in NetworkPolicy `names` by a patch; else pods resolve no names and report `cannot connect` to nats"


def _unreachable_dns(overlay: Overlay, cluster: Cluster) -> Iterator[Finding]:
    """Find where names are resolved but the network policy lets no pod reach; nothing if no policy
    limits what pods may reach. Pods only say that they cannot connect.
    """
    rules = [
        rule
        for each in overlay.with_kind("NetworkPolicy")
        if "Egress" in each["spec"].get("policyTypes", [])
        for rule in each["spec"].get("egress", [])
        if any(port.get("port") in (53, "dns") for port in rule.get("ports", []))
    ]
    if not rules or _DNS in cluster.unread:
        return
    peers = [peer for rule in rules for peer in rule.get("to", [])]
    namespaces = {peer.get("namespaceSelector", {}).get("matchLabels", {}).get(_NAMESPACE) for peer in peers}
    networks = [ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in peers if "ipBlock" in peer]
    servers = cluster.objects[_DNS]
    if not servers:
        what = "no pod answers DNS here, so something outside the pods does (GKE's Cloud DNS: 169.254.169.254)"
        yield Finding(False, what, f"if pods resolve no names, take the address from a pod's /etc/resolv.conf and {_ALLOW}")
    on_machines = [each for each in servers if each["spec"].get("hostNetwork")]
    if closed := {each["metadata"]["namespace"] for each in servers if each not in on_machines} - namespaces:
        yield Finding(True, f"DNS is in the namespace {listed(closed)}, which the network policy does not let pods reach", _ALLOW)
    # NodeLocal DNSCache listens on such an address besides the Service's.
    words = [
        word for each in on_machines for of in each["spec"]["containers"] for word in [*of.get("command", []), *of.get("args", [])]
    ]
    for address in sorted(set(re.findall(r"169\.254\.\d+\.\d+", " ".join(map(str, words))))):
        if not any(ipaddress.ip_address(address) in network for network in networks):
            what = f"DNS answers at {address} on each machine, which the network policy does not let pods reach"
            yield Finding(True, what, _ALLOW)


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for a sentence: at most `most`, and how many more there are."""
    each = sorted(set(names))
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")


_DNS = "DNS pods"
_DNS_LABELS = ("k8s-app in (kube-dns,coredns,node-local-dns)", "dns.operator.openshift.io/daemonset-dns")


def read_cluster(namespace: str, context: str, *, monitored: bool = False) -> Cluster:
    """Read what the rules need; the kinds that this user may not read are in `unread`.

    Raises:
        CommandError: the cluster does not answer.
    """
    where = ("--context", context)
    version = _kubectl("version", "--output", "json", *where)
    if version.returncode != 0 or "serverVersion" not in version.stdout:
        raise CommandError(f"the cluster {context} does not answer: {_said(version)}: check `kubectl --context {context} version`")
    names: dict[str, set[str]] = {}
    objects: dict[str, list[Object]] = {}
    unread: dict[str, str] = {}
    for kind in ("runtimeclasses", "priorityclasses"):
        done = _kubectl("get", kind, "--output", "name", *where)
        if done.returncode == 0:
            names[kind] = {line.rpartition("/")[2] for line in done.stdout.split()}
        else:
            unread[kind] = _said(done)
    for kind, *question in (
        ("resourcequotas", "resourcequotas", "--namespace", namespace),
        ("storageclasses", "storageclasses"),
        (_SERVERS, _SERVERS, "--namespace", namespace, "--selector", "app.kubernetes.io/component=nats"),
        *((("prometheuses", "prometheuses.monitoring.coreos.com", "--all-namespaces"),) if monitored else ()),
        *((_DNS, "pods", "--all-namespaces", "--selector", label) for label in _DNS_LABELS),
    ):
        done = _kubectl("get", *question, "--output", "json", *where)
        if done.returncode == 0 and (items := _items(done.stdout)) is not None:
            objects.setdefault(kind, []).extend(items)
        else:
            unread[kind] = _said(done) if done.returncode else "kubectl did not print a list of objects"
    return Cluster(names, objects, unread)


def _items(text: str) -> list[Any] | None:
    try:
        items = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError):
        return None
    is_list = isinstance(items, list) and all(isinstance(each, dict) and "metadata" in each for each in items)
    return items if is_list else None


def _context(context: str) -> str:
    """The context that kubectl would use; empty, with a note of why, if there is none."""
    if shutil.which("kubectl") is None:
        note("kubectl is not on the PATH, so no cluster was checked: install it, or give --no-cluster")
        return ""
    done = _kubectl("config", "current-context")
    if not context and done.returncode != 0:
        remedy = "set KUBECONFIG to the cluster's kubeconfig, or run `kubectl config use-context NAME`, or give --no-cluster"
        note(f"kubectl has no current context, so no cluster was checked: {remedy}")
        return ""
    return context or done.stdout.strip()


def _text(source: str) -> str:
    """Rendered YAML: of a folder (rendered here), a file, or standard input; at most one character
    more than `MAX_CHARS`.
    """
    if Path(source).is_dir():
        return _kustomize(Path(source))
    try:
        if source == STANDARD:
            return sys.stdin.read(MAX_CHARS + 1)
        with Path(source).open() as file:
            return file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} cannot be read ({error_text(error)}): give an overlay's folder, a YAML file, or -") from None


def _kustomize(folder: Path) -> str:
    command = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(command[0]) is None:
        raise CommandError(
            "rendering a folder needs kubectl or kustomize, and neither is installed: install one, or give its output"
        )
    with tempfile.TemporaryFile("w+") as printed:
        done = _run([*command, str(folder)], TIMEOUT_S * 2, stdout=printed)
        if done.returncode != 0:
            raise CommandError(f"{folder} cannot be rendered: {_said(done)}: correct its kustomization.yaml")
        printed.seek(0)
        return printed.read(MAX_CHARS + 1)


def _kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(["kubectl", *arguments], TIMEOUT_S, stdout=subprocess.PIPE)


def _run(command: list[str], timeout_s: float, *, stdout: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {timeout_s:.0f} s")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """The end of its last line: kustomize names every folder on its way first, and the reason
    last.
    """
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    line = lines[-1] if lines else f"it ended with {done.returncode}"
    return line if len(line) <= _SAID_CHARACTERS else "… " + line[-_SAID_CHARACTERS:]
