"""Podman as the container tests use it: with runc, and with limits that a machine without
CAP_SYS_RESOURCE can set.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "swarm-test"
"""Prefix of everything the tests make: containers, pods, volumes, the network."""


class PodmanError(AssertionError):
    """A command failed; the message holds what podman said."""


class Podman:
    """Runs podman commands with a configuration of its own, so that the machine's stays as it
    is.
    """

    def __init__(self, folder: Path) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], int(Path("/proc/sys/kernel/pid_max").read_text()))
        config = folder / "containers.conf"
        limits = f'"nofile={files}:{files}", "nproc={processes}:{processes}"'
        config.write_text(f'[containers]\ndefault_ulimits = [{limits}]\n[engine]\nruntime = "runc"\n')
        self.environment = os.environ | {"CONTAINERS_CONF": str(config)}

    def __call__(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """Standard output of `podman ARGUMENTS`.

        Raises:
            PodmanError: it ended with another code than 0.
        """
        answer = self.attempt(*arguments, timeout_s=timeout_s)
        if answer.returncode:
            raise PodmanError(f"podman {' '.join(arguments)}: exit code {answer.returncode}\n{answer.stdout}\n{answer.stderr}")
        return answer.stdout.strip()

    def attempt(self, *arguments: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """The same, whatever the exit code."""
        return subprocess.run(
            ["podman", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=self.environment,
            check=False,
        )

    def inspect(self, name: str) -> dict[str, Any]:
        """Return what podman knows of an image, container or volume."""
        return dict(json.loads(self("inspect", name))[0])

    def run(self, image: str, *command: str, flags: Sequence[str] = (), timeout_s: float = 600.0) -> str:
        """Output of a command in a new container as restricted as a pod: read-only, no capability,
        no network.
        """
        # Podman would ask systemd for a timer for the image's health check; there may be no
        # systemd.
        restricted = ["--rm", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--health-interval=disable"]
        return self("run", *restricted, "--network=none", *flags, image, *command, timeout_s=timeout_s)

    def address(self, container: str) -> str:
        """Where a container can be reached from this machine."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        return str(next(iter(networks.values()))["IPAddress"])

    def logs(self, container: str, lines: int = 40) -> str:
        answer = self.attempt("logs", "--tail", str(lines), container)
        return answer.stdout + answer.stderr


def ask(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Status and text of a page; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def figure(url: str, name: str, label: str = "") -> float:
    """Sum of a metric's samples on a page, those with `label` (`result="ok"`) where one is named; 0
    where there are none or nobody answers.
    """
    samples = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", ask(url)[1], re.MULTILINE)
    return sum(float(value) for labels, value in samples if label in labels)


def wait_for_page(url: str, timeout_s: float, poll_s: float = 0.5) -> float:
    """Seconds until a page answered 200.

    Raises:
        TimeoutError: it did not in time; the message holds its last answer.
    """
    started = time.monotonic()
    while (answer := ask(url))[0] != 200:
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"{url} did not answer 200 within {timeout_s:g} s; the last answer: {answer[0]} {answer[1].strip()}")
        time.sleep(poll_s)
    return time.monotonic() - started
