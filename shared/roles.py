"""The users of a secured server: the four services of a node, in the order that starting,
permissions, counts and displays follow, and those of people.
"""

from __future__ import annotations

from typing import Literal, get_args

Role = Literal["generator", "verifier", "sampler", "trainer"]
ROLES: tuple[Role, ...] = get_args(Role)
RoleSet = Literal["all", "generator,verifier", "verifier"]
"""The roles that a node may have. A sampler and a trainer need each other and groups of their own;
a verifier alone scores and shares what a person answers.
"""
ROLE_SETS: tuple[RoleSet, ...] = get_args(RoleSet)
SEVERAL: tuple[Role, ...] = ("generator", "verifier")
"""Roles that may have several processes (replicas) per node; each other role has one."""

OPERATOR = "operator"
"""User of a person: creates streams and reads everything."""
WATCH = "watch"
"""User of `swarm nats watch`: receives JetStream's reports on requests, and may request nothing."""
OBSERVER = "observer"
"""User of `swarm status --token`: reads the swarm's scores and its directory, and may write
nothing. Spectators share its key.
"""
