"""Simulates hostile nodes: what each knows in a round, its names and keys, and the messages that
its attack sends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from lab.arms import PlannedRun
from lab.attacks import ATTACKS, Hostile
from lab.attacks.view import Shortcut
from lab.sim_border import SwarmMessage, node_key, swarm_message
from lab.sim_node import LocalGroup, SimNode
from lab.task_desk import Shared
from services.trainer.gradient.rows import TokenGroup
from services.trainer.selection.likelihood import AbsurdTextRules, least_logprob
from services.verifier.rewards import foreign_rewards
from shared.contracts.codec import unpack_logprobs
from shared.contracts.messages import RolloutGroup, TaskRef
from shared.identity.keys import SigningKey
from shared.model.prompts import render_prompt


def names_of(name: str, role: str, names: int) -> list[str]:
    """A node's names: its own and, if it is hostile, others."""
    return [name] if role == "honest" else [name, *(f"{name}-{number}" for number in range(2, names + 1))]


class HostileNodes:
    """Makes the hostile nodes' messages. `names` are all their names; `honest` is by hostile node
    the honest one whose policy it uses.
    """

    def __init__(self, run: PlannedRun, honest: Mapping[str, SimNode], shared: Shared) -> None:
        self._run, self._shared, self._honest = run, shared, honest
        self._names = {node.name: names_of(node.name, node.role, run.attack.names) for node in run.nodes if node.role != "honest"}
        self._keys: dict[str, SigningKey] = {name: node_key(name, run.seed) for names in self._names.values() for name in names}
        self.names = frozenset(self._keys)
        self._shortcuts: dict[tuple[str, str], Shortcut] = {}

    def groups_a_round(self, node: SimNode) -> int:
        """How many groups a hostile node samples: for each of its names as many as an honest
        node.
        """
        return node.config.sampler.local * len(self._names[node.name])

    def messages(self, node: SimNode, own: Sequence[LocalGroup], number: int) -> list[SwarmMessage]:
        """The messages that the node sends to the swarm."""
        view = self._view(node, own, number)
        return [swarm_message(group, self._keys[group.node], node.config) for group in ATTACKS[node.role](view)]

    def _view(self, node: SimNode, own: Sequence[LocalGroup], number: int) -> Hostile:
        """Everything an attacker may know: the groups it made, everything published in the swarm,
        and likelihoods under an honest policy, which a real attacker would not have.
        """
        honest = self._honest[node.name]
        return Hostile(
            number=number,
            attack=self._run.attack,
            rng=random.Random(f"hostile {node.name} {self._run.seed} {number}"),
            made=[(each.group, each.rewards) for each in own],
            names=self._names[node.name],
            answer=self._shared.answer,
            score=_score_of_honest(honest, node),
            encode=node.encoded,
            likelihood=lambda groups: _likelihood(honest, groups),
            max_tokens=int(self._run.attack.max_length * node.params.max_new_tokens),
            bound=_bound(honest, own),
            sources=node.config.tasks,
            shortcuts=self._shortcuts,
        )


def _score_of_honest(honest: SimNode, node: SimNode) -> Callable[[TaskRef, Sequence[str]], list[float]]:
    """Rewards as honest nodes count them for foreign text, because an attacker who knows their
    settings does not waste groups on answers that earn nothing.
    """

    def score(ref: TaskRef, texts: Sequence[str]) -> list[float]:
        rewards = node.desk.score(ref, texts)
        partial_credit = honest.config.verifier.foreign_partial_credit
        return rewards if partial_credit else foreign_rewards(rewards, node.desk.passed(ref, rewards))

    return score


def _likelihood(honest: SimNode, groups: Sequence[RolloutGroup]) -> list[list[float]]:
    """Mean logprob per token of every completion's text under the honest node's policy."""
    tokens = [
        TokenGroup(
            prompt_ids=render_prompt(honest.desk.tokenizer, group.task.prompt, honest.config.model.system_prompt),
            completions=[honest.encoded(completion.text) for completion in group.completions],
            behaviour_logprobs=[None] * len(group.completions),
            advantages=[1.0] * len(group.completions),
        )
        for group in groups
    ]
    return honest.policy.mean_logprobs(tokens)


def _bound(honest: SimNode, own: Sequence[LocalGroup]) -> float:
    """The bound of the honest node's policy check, as estimated by a node that samples from the
    same policy.
    """
    if not honest.config.trainer.constants.policy_check_fraction:
        return -math.inf
    means = []
    for each in own:
        for completion in each.group.completions:
            logprobs = unpack_logprobs(completion.behaviour_logprobs or b"")
            if logprobs:
                means.append(math.fsum(logprobs) / len(logprobs))
    return least_logprob(means, AbsurdTextRules.of(honest.config.trainer))
