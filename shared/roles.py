"""The four services of a node. Starting, permissions, counts and displays follow this order."""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["generator", "verifier", "sampler", "trainer"]
ROLES: tuple[Role, ...] = get_args(Role)
SEVERAL: tuple[Role, ...] = ("generator", "verifier")
"""Roles that may have several processes (replicas) per node; each other role has one."""
