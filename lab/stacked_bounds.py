"""Bounds foreign gradients for N nodes at once; `services.trainer.gradient` does it for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.gradient.bounded_step import InfluenceRules, foreign_scales, out_of_proportion
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import GradientPart, UpdateConfig, UpdateStats

IN_ONE_PASS = 100_000_000
"""Most policy parameters computed in one pass. More would not be faster and would take more
memory.
"""
NORM_PART = 1_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the groups of one node's step, by index."""

    node: int
    groups: Sequence[int]


Accumulate = Callable[[Sequence[Part]], tuple[Tensor, list[GradientPart]]]


def bounded_gradients(
    of: Accumulate,
    groups: Sequence[Sequence[TokenGroup]],
    wanted: Sequence[Sequence[int]],
    influence: Sequence[InfluenceRules],
    configs: Sequence[UpdateConfig],
    at_once: int,
) -> tuple[Tensor, list[UpdateStats], list[int]]:
    """`bounded_gradients` for every node: gradients (N, parameters) of one update, statistics, and
    the number of foreign groups scaled down.

    of: returns gradients (parts, parameters) and statistics for parts of nodes' steps. at_once: how
    many parts are computed in one pass.

    A gradient is linear in the scales, so foreign groups that were measured one by one need not be
    computed again.
    """
    nodes = range(len(groups))
    foreign = [
        [number for number in wanted[node] if not groups[node][number].is_local] if rules.is_on else []
        for node, rules in enumerate(influence)
    ]
    # Without a bound all groups are one part.
    local = [[number for number in wanted[node] if number not in foreign[node]] for node in nodes]
    pulling = [sum(groups[node][number].moves_policy for number in local[node]) for node in nodes]

    gradient, found = of([Part(node, local[node]) for node in nodes])
    local_norms = _norms(gradient)

    def out(node: int, foreign_norm: float) -> bool:
        return out_of_proportion(influence[node], local_norms[node], pulling[node], foreign_norm, len(foreign[node]))

    together = [node for node in nodes if foreign[node] and not out(node, 0.0)]
    suspects = [node for node in nodes if foreign[node] and node not in together]
    together_gradients, sums = of([Part(node, foreign[node]) for node in together])
    for node, norm, part_gradient, part in zip(together, _norms(together_gradients), together_gradients, sums, strict=True):
        if out(node, norm):
            suspects.append(node)
        else:
            gradient[node] += part_gradient
            found[node] += part
    del together_gradients
    scaled = [0] * len(groups)
    for node, measured in _each_alone(of, suspects, foreign, at_once):
        scales = foreign_scales(influence[node], local_norms[node], pulling[node], [norm for norm, _, _ in measured])
        scaled[node] = sum(scale < 1.0 for scale in scales)
        for scale, (_, part_gradient, part) in zip(scales, measured, strict=True):
            if scale:
                gradient[node] += scale * part_gradient
                part.sums.loss.mul_(scale)
                found[node] += part
    stats = [
        found[node].stats(groups[node], config) if wanted[node] else UpdateStats.nothing() for node, config in enumerate(configs)
    ]
    return gradient, stats, scaled


def _each_alone(
    of: Accumulate, suspects: Sequence[int], foreign: Sequence[Sequence[int]], at_once: int
) -> Iterator[tuple[int, list[tuple[float, Tensor, GradientPart]]]]:
    """Norm, gradient and statistics of each suspect foreign group. For small policies all are
    measured in one pass.
    """
    parts = [Part(node, [number]) for node in suspects for number in foreign[node]]
    passes = [suspects] if len(parts) <= at_once else [[node] for node in suspects]
    for nodes in passes:
        alone, sums = of([Part(node, [number]) for node in nodes for number in foreign[node]])
        each = zip(_norms(alone), alone, sums, strict=True)
        for node in nodes:
            yield node, [next(each) for _ in foreign[node]]


def _norms(gradient: Tensor) -> list[float]:
    """The norm of each row, in float64. Large rows are computed part by part, because torch makes a
    float64 copy of its input.
    """
    found: list[float]
    if gradient.numel() <= IN_ONE_PASS:
        found = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).tolist()
        return found
    parts = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in torch.split(gradient, NORM_PART, dim=1)]
    found = torch.linalg.vector_norm(torch.stack(parts), dim=0).tolist()
    return found
