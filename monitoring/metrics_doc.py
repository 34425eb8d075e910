"""`python -m monitoring.metrics_doc` writes the tables of `docs/metrics.md` from the registries
that the services export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.generator.figures import Figures as GeneratorFigures
from services.sampler.reports import Figures as SamplerFigures
from services.trainer.figures import TrainerGauges
from services.verifier.border import Refusal
from services.verifier.figures import Figures as VerifierFigures
from shared.roles import Role
from shared.runtime.metrics import PlaneMetrics, service_registry
from shared.runtime.status import ClockSkew, StatusBoard
from shared.runtime.watch_figures import Figures as WatchFigures
from shared.runtime.writes import SyncMetrics, Writes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
COMMAND = "python -m monitoring.metrics_doc"
DATASET = "leg_counting"
"""A placeholder for the datasets of a node's tasks."""

_OPEN_LABELS = {"task": "a dataset of the node's tasks", "sender": "node ids", "version": "the software's", "run": "the run's name"}
_BEGIN = f"<!-- begin: written by {COMMAND} -->"


def role_registry(role: Role) -> CollectorRegistry:
    """The registry of a service of `role` at its start."""
    registry = service_registry(lambda: True, "demo")
    ClockSkew(registry)
    SyncMetrics(registry)
    planes = PlaneMetrics(registry)
    planes.watch("node", lambda: None)
    ROLES[role](registry, planes)
    Writes(role, registry)
    return registry


def role_families(role: Role) -> list[Metric]:
    """The `swarm_*` families that a service of `role` exports, in registration order."""
    return [family for family in role_registry(role).collect() if family.name.startswith("swarm_")]


def watch_families() -> list[Metric]:
    """The families that only `swarm nats watch` exports."""
    registry = CollectorRegistry()
    WatchFigures(registry)
    return list(registry.collect())


def full_name(family: Metric) -> str:
    """The family's name in a query; for a histogram without `_bucket`, `_sum` and `_count`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(family: Metric) -> dict[str, list[str]]:
    """Label names with the values that are exported from the start, without a histogram's `le`."""
    found: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name != "le":
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def render() -> str:
    """The page: what is written by hand, then the tables."""
    by_role = {role: role_families(role) for role in ROLES}
    common = set.intersection(*({family.name for family in families} for families in by_role.values()))
    sections = [
        f"{PAGE.read_text(encoding='utf-8').partition(_BEGIN)[0]}{_BEGIN}\n",
        _section("Every service", (each for each in by_role["verifier"] if each.name in common)),
        *(_section(role, (each for each in families if each.name not in common)) for role, families in by_role.items()),
    ]
    sections.append(_section("`swarm nats watch`", watch_families()))
    return "\n".join(sections)


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


def _generator(registry: CollectorRegistry, planes: PlaneMetrics) -> None:
    GeneratorFigures(registry, StatusBoard("alpha", "generator", "0"), [DATASET])


def _verifier(registry: CollectorRegistry, planes: PlaneMetrics) -> None:
    planes.watch("swarm", lambda: None)
    VerifierFigures(registry, StatusBoard("alpha", "verifier", "0"), [DATASET])


def _sampler(registry: CollectorRegistry, planes: PlaneMetrics) -> None:
    SamplerFigures(registry, StatusBoard("alpha", "sampler", "0"))


def _trainer(registry: CollectorRegistry, planes: PlaneMetrics) -> None:
    gauges = TrainerGauges(registry)
    for origin in ("local", "external"):
        gauges.reward.labels(origin)  # absent at first, but the page lists it


ROLES: dict[Role, Callable[[CollectorRegistry, PlaneMetrics], None]] = {
    "generator": _generator,
    "verifier": _verifier,
    "sampler": _sampler,
    "trainer": _trainer,
}


def _section(title: str, families: Iterable[Metric]) -> str:
    rows = [
        f"| `{full_name(family)}` | {_type(family)} | {'; '.join(_labels(family))} | {family.documentation} |"
        for family in families
    ]
    return "\n".join(
        [f"## {title[0].upper()}{title[1:]}", "", "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _type(family: Metric) -> str:
    bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
    finite = [bound for bound in bounds if bound != float("inf")]
    return f"{family.type}, {_number(min(finite))} to {_number(max(finite))}" if finite else str(family.type)


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if bound >= 1000 else f"{bound:g}"


def _labels(family: Metric) -> Iterator[str]:
    for name, values in labels_of(family).items():
        if values == [each.value for each in Refusal]:
            yield f"`{name}`: of [the border's checks](security.md#what-a-foreign-group-must-pass)"
            continue
        stated = [value for value in values if value != DATASET] if name in _OPEN_LABELS else values
        shown = [f"`{value}`" for value in stated if name not in ("version", "run")]
        yield f"`{name}`: " + ", ".join([*([_OPEN_LABELS[name]] if name in _OPEN_LABELS else []), *shown])


if __name__ == "__main__":
    main()
