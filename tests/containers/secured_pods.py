"""Pods of a rendered overlay that mount Secrets, which `podman kube play` 4.3 cannot: each
container by `podman run` with what its manifest says, its command, environment, mounts, user,
read-only root and limits. Claims, empty folders, ConfigMaps and Secrets are folders of this
machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.containers.podman import NAME, Podman, PodmanError
from tests.k8s.images import Stage, image_name
from tests.k8s.manifests import Object, amount, find, name_of, selected, with_kind
from tests.k8s.pods import Pod, Volumes, apart, environment_of, pod_from

COMMAND_TIMEOUT_S = 120.0
_NO_IMAGE = Stage("")
"""Podman sets what the image's environment has."""


class SecuredPods:
    """Pods that were started, on a network of their own."""

    def __init__(self, podman: Podman, objects: tuple[Object, ...], images: dict[str, str], folder: Path) -> None:
        self._podman = podman
        self._objects = objects
        self._images = images
        self._folder = folder
        self._volumes = Volumes(folder, objects)
        self._network = f"{NAME}-secured"
        self._names: dict[str, str] = {}

    def prepare(self) -> None:
        self._podman("network", "create", self._network)

    def start(self, kind: str, name: str, container: str = "") -> str:
        """Start a workload's first pod, of it one container, after its init containers have done
        their work, which Kubernetes repeats until they have. Returns the container's name.
        """
        pod = pod_from(find(self._objects, kind, name))
        *first, chosen = [each for each in apart(pod) if self._is_wanted(each, pod, container)]
        for each in first:
            self._until_done(each)
        services = with_kind(self._objects, "Service")
        names = [name_of(each) for each in services if selected({"matchLabels": each["spec"]["selector"]}, pod.labels)]
        started = f"{NAME}-{name}"
        aliases = [word for alias in names for word in ("--network-alias", alias)]
        self._podman("run", "--detach", "--name", started, *aliases, *self._words(chosen))
        self._names[name] = started
        return started

    def _is_wanted(self, each: Pod, pod: Pod, container: str) -> bool:
        name, inits = each.container["name"], pod.spec.get("initContainers", [])
        return name in [init["name"] for init in inits] or name == container or not container

    def execute(self, name: str, command: Sequence[str], given: bytes | None = None) -> tuple[int, bytes, str]:
        """As `kubectl exec` does, with `given` on standard input: exit code, standard output, and
        both outputs as text.
        """
        flags = ["--interactive"] if given is not None else []
        done = subprocess.run(
            ["podman", "exec", *flags, self._names[name], *command],
            input=given or b"",
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            env=self._podman.environment,
            check=False,
        )
        return done.returncode, done.stdout, (done.stdout + done.stderr).decode(errors="replace")

    def end(self) -> None:
        """Remove all of it."""
        for each in reversed(self._names.values()):
            self._podman.attempt("rm", "--force", "--time", "0", each)
        self._podman.attempt("network", "rm", "--force", self._network)

    def _until_done(self, pod: Pod) -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while True:
            try:
                self._podman("run", "--rm", *self._words(pod))
                return
            except PodmanError as error:
                assert time.monotonic() < deadline, error
                time.sleep(1)

    def _words(self, pod: Pod) -> list[str]:
        """Flags, image and arguments of `podman run`."""
        user, own = pod.spec["securityContext"], pod.container["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["capabilities"] == {"drop": ["ALL"]} and not own["allowPrivilegeEscalation"]
        words = ["--network", self._network, "--read-only", "--read-only-tmpfs=false", "--cap-drop=all"]
        words += ["--security-opt=no-new-privileges", "--health-interval=disable"]
        words += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
        words += ["--memory", str(int(amount(pod.container["resources"]["limits"]["memory"])))]
        binds, memory = self._volumes.mounts(pod)
        for source, target, read_only in binds:
            words += ["--volume", f"{source}:{target}{':ro' if read_only else ''}"]
        for target, _ in memory:
            # Podman's own would be root's alone where the image has such a folder.
            folder = self._folder / f"{pod.name}{target.replace('/', '-')}"
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777)
            words += ["--volume", f"{folder}:{target}"]
        for name, value in environment_of(pod, self._objects, _NO_IMAGE).items():
            words += ["--env", f"{name}={value}"]
        if command := pod.container.get("command"):
            words += ["--entrypoint", json.dumps(command)]
        image = self._images[image_name(pod.container["image"])]
        return [*words, image, *pod.container.get("args", [])]


def workload_of(said: str) -> str:
    """The workload of a pod as a page names it: `deploy/alpha-operator`, `nats-$i`,
    `NODE-trainer-0`.
    """
    return re.sub(r"^(?:deploy|sts)/|-\$?\w$", "", said).replace("NODE", "alpha")
