"""Samples, trains and evaluates all nodes of one architecture together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.attacks import INFORMED_ROLES
from lab.sampling import Sampled, sample
from lab.sim_node import SimNode
from lab.stacked_learner import StackedLearner, StepOutcome
from lab.stacked_params import leaves, load_stack
from services.generator.engines.base import Sample, SamplingParams
from services.generator.tasks import PromptedTask
from services.trainer.gradient.rows import TokenGroup
from services.trainer.selection.intake import Intake, after_batch, take_in
from services.trainer.selection.likelihood import candidates_of, prefer_by
from shared.contracts.messages import Batch, RolloutGroup
from shared.model.prompts import answer_text, render_prompt

_EVALUATED_AT_ONCE = 96


@dataclass(frozen=True, slots=True)
class Made:
    """A task draw of a node and the completions sampled for it."""

    node: SimNode
    draw: int
    task: PromptedTask
    samples: list[Sample]


class Cohort:
    """The policies of `nodes`, which all train, and the base policy for nodes that do not train."""

    def __init__(self, nodes: Sequence[SimNode], untrained: Sequence[SimNode], end_token: int, device: torch.device) -> None:
        self.nodes, self.untrained = list(nodes), list(untrained)
        folders = [Path(node.config.model.path) for node in (*nodes, *untrained)]
        architecture, flat = load_stack(folders, device)
        self.learner = StackedLearner([node.config for node in nodes], architecture, flat[: len(nodes)])
        self._base = flat[len(nodes) :]
        self._end_token = end_token
        self._device = device

    def make(self, wanted: Sequence[tuple[SimNode, int]], seed: int) -> list[Made]:
        """Sample `count` new groups for each node, in the given order of nodes."""
        generator = torch.Generator(self._device).manual_seed(seed)
        made: list[Made] = []
        for everyone, flat in self._who_samples_from_what():
            chosen = [(everyone.index(node), node, count) for node, count in wanted if count and node in everyone]
            for (params, completions), part in _alike(chosen).items():
                rows = [row for row, _, _ in part]
                draws = [[node.next_task() for _ in range(count)] for _, node, count in part]
                found = self._sample(
                    flat if rows == list(range(len(everyone))) else flat[rows],
                    [[task.prompt_ids for _, task in node_draws] for node_draws in draws],
                    completions,
                    params,
                    generator,
                )
                for (_, node, _), node_draws, sampled in zip(part, draws, found, strict=True):
                    made += [
                        Made(node, draw, task, [_as_sample(node, each) for each in answers])
                        for (draw, task), answers in zip(node_draws, sampled, strict=True)
                    ]
        return made

    def _who_samples_from_what(self) -> list[tuple[list[SimNode], torch.Tensor]]:
        """Nodes and their policies, one row each: nodes that train, nodes that use the first of
        those policies, and nodes on the base policy.
        """
        informed = [node for node in self.untrained if self.nodes and node.role in INFORMED_ROLES]
        rows = [row for row, node in enumerate(self.untrained) if node not in informed]
        others = [self.untrained[row] for row in rows]
        parts = [(self.nodes, self.learner.flat), (informed, self.learner.flat[:1].expand(len(informed), -1))]
        return [*parts, (others, self._base if len(rows) == len(self.untrained) else self._base[rows])]

    def likelihood(self, groups: Sequence[RolloutGroup]) -> list[list[float]]:
        """Mean logprob per token of every completion's text under the first trained node's policy;
        0 if no node trains.
        """
        if not self.nodes or not groups:
            return [[0.0] * len(group.completions) for group in groups]
        node = self.nodes[0]
        tokens = [
            TokenGroup(
                prompt_ids=render_prompt(node.desk.tokenizer, group.task.question, node.config.model.system_prompt),
                completions=[node.encoded(completion.text) for completion in group.completions],
                behaviour_logprobs=[None] * len(group.completions),
                advantages=[1.0] * len(group.completions),
            )
            for group in groups
        ]
        return [
            [float(token_logprobs.mean()) for token_logprobs in group_logprobs]
            for group_logprobs in self.learner.logprobs_of(0, tokens)
        ]

    def answers(self, seed: int) -> list[list[str]]:
        """Each trained node's answers to its held-out questions. Policies with equal weights answer
        once.
        """
        generator = torch.Generator(self._device).manual_seed(seed)
        texts: list[list[str]] = [[] for _ in self.nodes]
        groups: dict[tuple[float, int], list[int]] = {}
        for row, node in enumerate(self.nodes):
            groups.setdefault((node.config.eval.temperature, node.params.max_new_tokens), []).append(row)
        for (temperature, longest), rows in groups.items():
            first = self._one_for_all(rows) if temperature == 0.0 else None
            asked = rows if first is None else [first]
            flat = self.learner.flat if asked == list(range(len(self.nodes))) else self.learner.flat[asked]
            params = SamplingParams(temperature=temperature, max_new_tokens=longest)
            found = self._answers_of([self.nodes[row] for row in asked], flat, params, generator)
            for place, row in enumerate(rows):
                texts[row] = found[place] if first is None else found[0]
        return texts

    def _answers_of(
        self, nodes: Sequence[SimNode], flat: torch.Tensor, params: SamplingParams, generator: torch.Generator
    ) -> list[list[str]]:
        """Each node's answers to its own questions, in their order. Prompts of similar length are
        answered together.
        """
        asked = [node.desk.held_out_prompts for node in nodes]
        orders = [sorted(range(len(tasks)), key=[len(task.prompt_ids) for task in tasks].__getitem__) for tasks in asked]
        answers = [[""] * len(tasks) for tasks in asked]
        for begin in range(0, max(map(len, asked)), _EVALUATED_AT_ONCE):
            parts = [order[begin : begin + _EVALUATED_AT_ONCE] for order in orders]
            prompts = [[tasks[number].prompt_ids for number in part] for tasks, part in zip(asked, parts, strict=True)]
            sampled = self._sample(flat, prompts, 1, params, generator)
            for node, node_answers, part, found in zip(nodes, answers, parts, sampled, strict=True):
                for number, (answer,) in zip(part, found, strict=True):
                    node_answers[number] = _text(node, answer.token_ids)
        return answers

    def train(self, batches: Sequence[Batch | None]) -> list[StepOutcome | None]:
        """One step of every node that has a batch."""
        chosen = self._preferred(batches)
        intakes: list[Intake | None] = [
            take_in(batch, node.intake_rules, node.earlier_groups) if batch is not None else None
            for node, batch in zip(self.nodes, chosen, strict=True)
        ]
        for node, batch in zip(self.nodes, batches, strict=True):
            if batch is not None:
                node.earlier_groups = after_batch(node.earlier_groups, batch, node.intake_rules.capability)
        return self.learner.step(
            intakes,
            [batch.number if batch is not None else 0 for batch in batches],
            [batch.seed if batch is not None else 0 for batch in batches],
        )

    def _preferred(self, batches: Sequence[Batch | None]) -> list[Batch | None]:
        """The batches reduced to the foreign groups that the nodes prefer, for strategies that
        leave the choice to the policy.
        """
        asked = [
            candidates_of(batch, node.intake_rules) if batch is not None else None
            for node, batch in zip(self.nodes, batches, strict=True)
        ]
        if not any(asked):
            return list(batches)
        logprobs = self.learner.logprobs([taken.groups if taken is not None else [] for taken in asked])
        return [
            batch if batch is None or taken is None else prefer_by(batch, taken, node_logprobs).batch
            for batch, taken, node_logprobs in zip(batches, asked, logprobs, strict=True)
        ]

    def _one_for_all(self, rows: Sequence[int]) -> int | None:
        """A row that stands for all of them, because weights and questions are the same; else
        None.
        """
        first, *others = rows
        same = all(
            self.nodes[row].desk.held_out is self.nodes[first].desk.held_out
            and self.nodes[row].config.model.path == self.nodes[first].config.model.path
            and torch.equal(self.learner.flat[row], self.learner.flat[first])
            for row in others
        )
        return first if same else None

    @torch.no_grad()
    def _sample(
        self,
        flat: torch.Tensor,
        prompts: Sequence[Sequence[Sequence[int]]],
        count: int,
        params: SamplingParams,
        generator: torch.Generator,
    ) -> list[list[list[Sampled]]]:
        """Sample `[node][prompt][completion]` under the policies `flat` (nodes, parameters), one
        row for each node in `prompts`, which need not be all nodes of the cohort.
        """
        return sample(
            self.learner.model,
            leaves(self.learner.model.architecture, flat),
            prompts,
            count,
            params,
            end_token=self._end_token,
            generator=generator,
        )


def _alike(
    chosen: Sequence[tuple[int, SimNode, int]],
) -> dict[tuple[SamplingParams, int], list[tuple[int, SimNode, int]]]:
    """Nodes grouped by their sampling settings."""
    parts: dict[tuple[SamplingParams, int], list[tuple[int, SimNode, int]]] = {}
    for row, node, count in chosen:
        parts.setdefault((node.params, node.config.generator.completions), []).append((row, node, count))
    return parts


def _as_sample(node: SimNode, sampled: Sampled) -> Sample:
    return Sample(
        token_ids=tuple(sampled.token_ids),
        text=_text(node, sampled.token_ids),
        finish_reason="stop" if sampled.ended else "length",
        logprobs=tuple(sampled.logprobs),
        policy_version=node.version,
    )


def _text(node: SimNode, token_ids: Sequence[int]) -> str:
    return answer_text(node.desk.tokenizer, token_ids)
