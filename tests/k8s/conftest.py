"""Fixtures that several files of these tests share."""

from __future__ import annotations

import copy

import pytest

from tests.k8s.cluster_shapes import Listed, fitting


@pytest.fixture
def cluster() -> Listed:
    return copy.deepcopy(fitting())
