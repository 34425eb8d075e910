"""N learners of one architecture in one forward and backward pass. Each does step for step what
`services.trainer.learner.Learner` does.

Intake, advantages, weights, losses and the check by the node's policy are the services' own
functions; this file holds only the passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.stacked_logprobs import group_logprobs, stack_groups
from lab.stacked_model import StackedDecoder
from lab.stacked_params import Architecture, leaves
from services.trainer.gradient.bounded_step import InfluenceRules, foreign_scales, out_of_proportion
from services.trainer.gradient.rows import TokenGroup
from services.trainer.gradient.update import (
    BatchLogprobs,
    GradientPart,
    UpdateConfig,
    UpdateStats,
    scored_loss,
    step_normaliser,
    with_masks,
)
from services.trainer.learner import configured_rate
from services.trainer.objectives.token_loss import LossSums
from services.trainer.selection.intake import Intake
from services.trainer.selection.likelihood import AbsurdTextRules, groups_to_check, without_absurd
from shared.config import NodeConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """One node's constants, as in `torch.optim.AdamW`, with weight decay on matrices only.
    grad_clip: largest gradient norm; inf: off.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float


class StackedAdamW:
    """Moments `(nodes, parameters)` and a step count per node. The arithmetic is that of
    `torch.optim.AdamW`.
    """

    def __init__(self, architecture: Architecture, flat: Tensor, settings: Sequence[AdamWSettings]) -> None:
        self._settings = list(settings)
        self._mean = torch.zeros_like(flat)
        self._square = torch.zeros_like(flat)
        self._steps = [0] * len(settings)
        self._is_matrix: Tensor | None = None
        if any(each.weight_decay for each in settings):
            parts = [torch.full((math.prod(shape),), len(shape) >= 2) for shape in architecture.shapes().values()]
            self._is_matrix = torch.cat(parts).to(flat.device)

    @torch.no_grad()
    def step(self, flat: Tensor, gradient: Tensor, rates: Sequence[float | None]) -> list[tuple[float, bool]]:
        """Move each node's parameters in place. A node whose rate is None or whose gradient is not
        finite is skipped.

        Returns each node's gradient norm before clipping (0 if it was skipped) and whether it
        moved.
        """
        outcome = []
        norms = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).tolist()
        for node, (rate, norm) in enumerate(zip(rates, norms, strict=True)):
            moves = rate is not None and math.isfinite(norm)
            outcome.append((norm if rate is not None else 0.0, moves))
            if moves:
                assert rate is not None
                self._move(flat[node], gradient[node], node, rate, norm)
        return outcome

    def _move(self, values: Tensor, gradient: Tensor, node: int, rate: float, norm: float) -> None:
        settings = self._settings[node]
        if math.isfinite(settings.grad_clip):
            gradient.mul_(min(1.0, settings.grad_clip / (norm + 1e-6)))
        self._steps[node] += 1
        step, (first, second) = self._steps[node], settings.betas
        if settings.weight_decay and self._is_matrix is not None:
            values.sub_(values * self._is_matrix, alpha=rate * settings.weight_decay)
        mean, square = self._mean[node], self._square[node]
        mean.lerp_(gradient, 1.0 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        denominator = square.sqrt().div_(math.sqrt(1.0 - second**step)).add_(settings.eps)
        values.addcdiv_(mean, denominator, value=-rate / (1.0 - first**step))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One node's step: what was trained on, one entry of statistics per update, and the answers
    that this node's policy found absurd.

    bounded: foreign groups whose loss was scaled down, over the updates.
    """

    intake: Intake
    stats: list[UpdateStats]
    grad_norms: list[float]
    moved: bool
    absurd_of: Counter[str]
    """Number of absurd answers, by sender."""
    bounded: int = 0

    @property
    def absurd(self) -> int:
        """Number of absurd answers."""
        return self.absurd_of.total()


class StackedLearner:
    """Policies and optimizers of N nodes. `flat` is (N, parameters); the nodes' configurations may
    differ in everything except the model.
    """

    def __init__(self, configs: Sequence[NodeConfig], architecture: Architecture, flat: Tensor) -> None:
        self.model = StackedDecoder(architecture, flat.device)
        self.flat = flat.clone()
        self._at_once = max(1, IN_ONE_PASS // self.flat.shape[1])
        self._trainers = [config.trainer for config in configs]
        self._update_configs = [UpdateConfig.of(config) for config in configs]
        self._influence = [InfluenceRules.of(config.trainer) for config in configs]
        self._own_policy = [AbsurdTextRules.of(trainer) for trainer in self._trainers]
        self._optimizer = StackedAdamW(architecture, self.flat, [_adamw_settings(config) for config in configs])
        self._base = flat.clone() if any(each.objective.needs_reference for each in self._update_configs) else None

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Sequence[TokenGroup]]) -> list[BatchLogprobs]:
        """`batch_logprobs` of every node for its local groups, under its current policy."""
        wanted = [list(range(len(node_groups))) for node_groups in groups]
        return self._logprobs(groups, wanted, base=False)

    @torch.no_grad()
    def logprobs_of(self, node: int, groups: Sequence[TokenGroup]) -> BatchLogprobs:
        """`[group][completion]` -> (tokens,) under one node's current policy."""
        numbers = list(range(len(groups)))
        stacked = stack_groups([groups], [numbers], self.flat.device)
        policy = leaves(self.model.architecture, self.flat[node : node + 1])
        (scored,) = group_logprobs(self.model, policy, stacked, [self._update_configs[node].temperature])
        found: BatchLogprobs = [[torch.empty(0)] * len(group.completions) for group in groups]
        for row, (group, completion) in enumerate(stacked.rows[0].sequences):
            found[group][completion] = scored.logprobs[row, : len(groups[group].completions[completion])].cpu()
        return found

    def step(self, intakes: Sequence[Intake | None], steps: Sequence[int], batch_seeds: Sequence[int]) -> list[StepOutcome | None]:
        """Train each node on its intake (None: no batch). `steps`: the batches' numbers."""
        checked = self._drop_absurd(intakes, batch_seeds)
        groups: list[list[TokenGroup]] = [list(intake.groups) if intake else [] for intake, _ in checked]
        wanted = [
            [number for number, group in enumerate(node_groups) if config.takes_part(group)]
            for node_groups, config in zip(groups, self._update_configs, strict=True)
        ]
        active = [intake is not None and bool(numbers) for (intake, _), numbers in zip(checked, wanted, strict=True)]
        scored = [
            [number for number, group in enumerate(node_groups) if config.is_scored(group)]
            for node_groups, config in zip(groups, self._update_configs, strict=True)
        ]
        proximal = self._proximal(groups, scored)
        masking = [config.objective.objective.keeps is not None for config in self._update_configs]
        reference = self._reference(groups, wanted)
        stats: list[list[UpdateStats]] = [[] for _ in groups]
        norms: list[list[float]] = [[] for _ in groups]
        moved = [False] * len(groups)
        bounded = [0] * len(groups)
        for update in range(max(trainer.updates_per_batch for trainer in self._trainers)):
            takes = [on and update < trainer.updates_per_batch for on, trainer in zip(active, self._trainers, strict=True)]
            if not any(takes):
                break
            if any(masking):  # what an objective masks changes with the policy
                current = self._where(masking, groups, wanted, base=False) if update else proximal
                groups = [
                    with_masks(node_groups, config, logprobs)
                    for node_groups, config, logprobs in zip(groups, self._update_configs, current, strict=True)
                ]
            part = [numbers if on else [] for numbers, on in zip(wanted, takes, strict=True)]
            gradient, node_stats, scaled = self._bounded(groups, part, proximal, reference)
            rates = [configured_rate(self._trainers[node], steps[node]) if on else None for node, on in enumerate(takes)]
            outcome = self._optimizer.step(self.flat, gradient, rates)
            for node, on in enumerate(takes):
                if on:
                    stats[node].append(node_stats[node])
                    norms[node].append(outcome[node][0])
                    moved[node] = moved[node] or outcome[node][1]
                    active[node] = outcome[node][1]
                    bounded[node] += scaled[node]
        return [
            None if intake is None else StepOutcome(intake, stats[node], norms[node], moved[node], absurd, bounded[node])
            for node, (intake, absurd) in enumerate(checked)
        ]

    def _bounded(
        self,
        groups: Sequence[Sequence[TokenGroup]],
        wanted: Sequence[Sequence[int]],
        proximal: Sequence[BatchLogprobs | None],
        reference: Sequence[BatchLogprobs | None],
    ) -> tuple[Tensor, list[UpdateStats], list[int]]:
        def of(parts: Sequence[Part]) -> tuple[Tensor, list[GradientPart]]:
            return self._accumulate(groups, parts, proximal, reference)

        return bounded_gradients(of, groups, wanted, self._influence, self._update_configs, self._at_once)

    def _accumulate(
        self,
        groups: Sequence[Sequence[TokenGroup]],
        parts: Sequence[Part],
        proximal: Sequence[BatchLogprobs | None],
        reference: Sequence[BatchLogprobs | None],
    ) -> tuple[Tensor, list[GradientPart]]:
        """The gradients (parts, parameters) of parts of nodes' steps, and their statistics."""
        gradients = self.flat.new_zeros(len(parts), self.flat.shape[1])
        found = [GradientPart(LossSums.zero(self.flat.device)) for _ in parts]
        for rows in self._together([row for row, part in enumerate(parts) if part.groups]):
            self._accumulate_together(groups, parts, rows, proximal, reference, gradients, found)
        return gradients, found

    def _accumulate_together(
        self,
        groups: Sequence[Sequence[TokenGroup]],
        parts: Sequence[Part],
        rows: Sequence[int],
        proximal: Sequence[BatchLogprobs | None],
        reference: Sequence[BatchLogprobs | None],
        gradients: Tensor,
        found: list[GradientPart],
    ) -> None:
        """`rows` of `_accumulate`'s results, computed in one pass."""
        nodes = [parts[row].node for row in rows]
        flat = self.flat if nodes == list(range(len(self.flat))) else self.flat[nodes]
        trained = {name: view.detach().requires_grad_() for name, view in leaves(self.model.architecture, flat).items()}
        stacked = stack_groups([groups[node] for node in nodes], [parts[row].groups for row in rows], self.flat.device)
        scored = group_logprobs(self.model, trained, stacked, [self._update_configs[node].temperature for node in nodes])
        total = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for place, (row, node) in enumerate(zip(rows, nodes, strict=True)):
            config = self._update_configs[node]
            normaliser = step_normaliser(groups[node], config, proximal[node])
            loss, sums, _ = scored_loss(
                groups[node], stacked.rows[place], scored[place], config, normaliser, proximal[node], reference[node]
            )
            total = total + loss
            found[row] = GradientPart(sums, 1, stacked.padded_tokens // len(rows))
        leaf_gradients = torch.autograd.grad(total, list(trained.values()))
        gradients[list(rows)] = torch.cat([gradient.flatten(1) for gradient in leaf_gradients], dim=1)

    def _together(self, items: Sequence[int]) -> list[Sequence[int]]:
        """Split items into parts that are computed in one pass each: all of them for small
        policies, one for a large policy.
        """
        return [items[begin : begin + self._at_once] for begin in range(0, len(items), self._at_once)]

    def _logprobs(
        self, groups: Sequence[Sequence[TokenGroup]], wanted: Sequence[Sequence[int]], *, base: bool
    ) -> list[BatchLogprobs]:
        """Like `batch_logprobs`, `[node][group][completion]`, under the policies or (`base`) those
        that they started from. Groups that are not `wanted` have empty tensors, so that positions
        match `groups`.
        """
        found: list[BatchLogprobs] = [
            [[torch.empty(0)] * len(group.completions) for group in node_groups] for node_groups in groups
        ]
        if not any(wanted):
            return found
        flat = self._base if base and self._base is not None else self.flat
        for nodes in self._together(range(len(groups))):
            if not any(wanted[node] for node in nodes):
                continue
            stacked = stack_groups([groups[node] for node in nodes], [wanted[node] for node in nodes], self.flat.device)
            policies = leaves(self.model.architecture, flat[nodes[0] : nodes[-1] + 1])
            scored = group_logprobs(self.model, policies, stacked, [self._update_configs[node].temperature for node in nodes])
            for node, rows, node_scored in zip(nodes, stacked.rows, scored, strict=True):
                row_logprobs = node_scored.logprobs.cpu()
                for row, (group, completion) in enumerate(rows.sequences):
                    found[node][group][completion] = row_logprobs[row, : len(groups[node][group].completions[completion])]
        return found

    def _proximal(self, groups: Sequence[Sequence[TokenGroup]], wanted: Sequence[Sequence[int]]) -> list[BatchLogprobs | None]:
        needed = [
            trainer.updates_per_batch > 1 or config.needs_proximal
            for trainer, config in zip(self._trainers, self._update_configs, strict=True)
        ]
        return self._where(needed, groups, wanted, base=False)

    def _reference(self, groups: Sequence[Sequence[TokenGroup]], wanted: Sequence[Sequence[int]]) -> list[BatchLogprobs | None]:
        needed = [config.objective.needs_reference for config in self._update_configs]
        return self._where(needed, groups, wanted, base=True)

    @torch.no_grad()
    def _where(
        self, needed: Sequence[bool], groups: Sequence[Sequence[TokenGroup]], wanted: Sequence[Sequence[int]], *, base: bool
    ) -> list[BatchLogprobs | None]:
        """`_logprobs` for the nodes that need them, None for the others."""
        found = self._logprobs(groups, [numbers if need else [] for need, numbers in zip(needed, wanted, strict=True)], base=base)
        return [logprobs if need else None for need, logprobs in zip(needed, found, strict=True)]

    @torch.no_grad()
    def _drop_absurd(
        self, intakes: Sequence[Intake | None], batch_seeds: Sequence[int]
    ) -> list[tuple[Intake | None, Counter[str]]]:
        """What `drop_absurd` does for one learner, with the logprobs of all nodes in one pass; each
        intake comes with the number of dropped answers by sender.
        """
        checks = [
            groups_to_check(intake, config, rules, seed) if intake is not None and rules.fraction else []
            for intake, config, rules, seed in zip(intakes, self._update_configs, self._own_policy, batch_seeds, strict=True)
        ]
        if not any(checks):
            return [(intake, Counter()) for intake in intakes]
        found = self._logprobs([intake.groups if intake else [] for intake in intakes], checks, base=False)
        left: list[tuple[Intake | None, Counter[str]]] = []
        for intake, numbers, logprobs, rules in zip(intakes, checks, found, self._own_policy, strict=True):
            if intake is None or not numbers:
                left.append((intake, Counter()))
                continue
            rest, dropped = without_absurd(intake, numbers, [logprobs[number] for number in numbers], rules)
            left.append((rest, Counter(dropped)))
        return left


def _adamw_settings(config: NodeConfig) -> AdamWSettings:
    trainer = config.trainer
    return AdamWSettings(
        betas=trainer.constants.betas,
        eps=trainer.constants.adam_eps,
        weight_decay=trainer.constants.weight_decay,
        grad_clip=trainer.grad_clip or math.inf,
    )
