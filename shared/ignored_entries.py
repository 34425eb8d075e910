"""Which entries of `shared.registry` a configuration chooses, and which entries of packages are
ignored there because a built-in one has the same name.
"""

from __future__ import annotations

from collections.abc import Iterator

from shared.config import NodeConfig
from shared.registry import (
    ENGINES,
    OBJECTIVES,
    POLICY_STORES,
    STRATEGIES,
    TASK_SOURCES,
    TRACKERS,
    VERIFIERS,
    Registry,
    policy_store_name,
)
from shared.roles import Role


def chosen_entries(config: NodeConfig) -> Iterator[tuple[Role, Registry, str]]:
    """The registry and name of each entry that the configuration names, and the role that uses it
    first. A word that leaves the choice to the service, such as `auto`, is not among them.
    """
    yield "trainer", OBJECTIVES, config.trainer.objective
    yield "sampler", STRATEGIES, config.sampler.strategy
    if config.generator.engine != "auto":
        yield "generator", ENGINES, config.generator.engine
    yield "trainer", POLICY_STORES, policy_store_name(config.policy_store_uri)
    for name in dict.fromkeys(spec.verifier for spec in config.tasks):
        yield "verifier", VERIFIERS, name
    for name in dict.fromkeys(spec.dataset for spec in config.tasks):
        yield "generator", TASK_SOURCES, name
    if isinstance(config.tracking.trackers, list):
        for name in config.tracking.trackers:
            yield "trainer", TRACKERS, name


def ignored_entries(config: NodeConfig, role: Role | None = None) -> list[str]:
    """A sentence for each name that the configuration chooses where a package's entry of that name
    is ignored. role: only names that it uses.
    """
    return [told for user, registry, name in chosen_entries(config) if role in (None, user) and (told := registry.ignored(name))]
