"""Fixtures that several files of these tests share."""

from __future__ import annotations

import copy

import pytest
import yaml
from typer.testing import CliRunner

from swarm_cli.app import app
from tests.k8s.cluster_shapes import Listed, fitting


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Listed:
    """Return what `swarm k8s secrets` makes, as the cluster has it then."""
    folder = tmp_path_factory.mktemp("check") / "keys"
    arguments = ["k8s", "secrets", "--nodes", "alpha,beta,gamma", "--keys", str(folder)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    made = list(yaml.safe_load_all(result.stdout))
    return {f"{kind.lower()}s": [each for each in made if each["kind"] == kind] for kind in ("Secret", "ConfigMap")}


@pytest.fixture
def cluster(secrets: Listed) -> Listed:
    return copy.deepcopy(fitting() | secrets)
