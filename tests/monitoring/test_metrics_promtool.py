"""The exposition as Prometheus' own linter judges it."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client import Gauge, generate_latest

from monitoring.metrics_doc import ROLES, role_registry

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")


def lint(exposition: bytes) -> str:
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, timeout=180, check=False)
    complaints = (done.stdout + done.stderr).decode().strip()
    return complaints or (f"exit code {done.returncode}" if done.returncode else "")


@pytest.mark.parametrize("role", ROLES)
def test_promtool_finds_nothing_to_complain_of(role: str):
    assert lint(generate_latest(role_registry(role))) == ""


def test_promtool_would_say_what_is_wrong():
    registry = role_registry("sampler")
    Gauge("swarm_wait_milliseconds", "Wait.", registry=registry).set(1)
    assert "swarm_wait_milliseconds" in lint(generate_latest(registry))
