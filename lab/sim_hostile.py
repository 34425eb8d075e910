"""Simulates hostile nodes: what each knows in a round, its names and keys, and the messages that
its attack sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from lab.arms import PlannedRun
from lab.attacks import ATTACKS, Hostile
from lab.attacks.view import Shortcut
from lab.cohort import Cohort
from lab.sim_border import SwarmMessage, node_key, swarm_message
from lab.sim_node import LocalGroup, SimNode
from lab.task_desk import Shared
from services.trainer.selection.likelihood import AbsurdTextRules, least_logprob
from services.verifier.rewards import foreign_rewards
from shared.contracts.codec import unpack_logprobs
from shared.contracts.messages import RolloutGroup, TaskRef
from shared.identity.keys import SigningKey
from shared.seeds import generator_from

_NAMED_ROLES = frozenset({"many_names", "informed", "opposed", "shortcut", "starve"})


def names_of(name: str, role: str, names: int) -> list[str]:
    """A node's names: its own and any others that its role uses."""
    return [name, *(f"{name}-{number}" for number in range(2, names + 1))] if role in _NAMED_ROLES else [name]


class HostileNodes:
    """Makes the hostile nodes' messages. `names` are all their names.

    `hear` records what honest nodes sent; the hostile nodes use it one round later.
    """

    def __init__(self, run: PlannedRun, cohorts: Sequence[Cohort], shared: Shared) -> None:
        self._run, self._shared = run, shared
        self._cohort_of = {node.name: cohort for cohort in cohorts for node in cohort.untrained}
        self._names = {node.name: names_of(node.name, node.role, run.attack.names) for node in run.nodes if node.role != "honest"}
        self._keys: dict[str, SigningKey] = {name: node_key(name, run.seed) for names in self._names.values() for name in names}
        self.names = frozenset(self._keys)
        self._first_sent: dict[str, RolloutGroup] = {}
        self._overheard: list[RolloutGroup] = []
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

    def hear(self, own: Mapping[str, Sequence[LocalGroup]]) -> None:
        """Record the honest nodes' groups of this round."""
        heard = [each.group for name, groups in own.items() if name not in self._names for each in groups if each.informative]
        self._overheard = heard or self._overheard

    def _view(self, node: SimNode, own: Sequence[LocalGroup], number: int) -> Hostile:
        """Everything an attacker may know: the groups it made, everything published in the swarm,
        and likelihoods under an honest policy, which a real attacker would not have. `duplicate`
        keeps sending the first group that it sent, so that group is remembered here.
        """
        if own and node.role == "duplicate":
            self._first_sent.setdefault(node.name, next((each.group for each in own if each.informative), own[0].group))
        cohort = self._cohort_of[node.name]
        return Hostile(
            number=number,
            attack=self._run.attack,
            rng=generator_from(f"hostile {node.name} {self._run.seed} {number}"),
            made=[(each.group, each.rewards) for each in own],
            overheard=self._overheard,
            first=self._first_sent.get(node.name),
            names=self._names[node.name],
            answer=self._shared.answer,
            score=_score_of_honest(cohort, node),
            encode=node.encoded,
            held_out=[task.prompt_ids for task in node.desk.held_out_prompts],
            likelihood=cohort.likelihood,
            max_tokens=int(self._run.attack.max_length * node.params.max_new_tokens),
            bound=_bound(cohort, own),
            sources=node.config.tasks,
            shortcuts=self._shortcuts,
        )


def _score_of_honest(cohort: Cohort, node: SimNode) -> Callable[[TaskRef, Sequence[str]], list[float]]:
    """Rewards as honest nodes count them for foreign text, because an attacker who knows their
    settings does not waste groups on answers that earn nothing.
    """
    partial_credit = bool(cohort.nodes) and cohort.nodes[0].config.verifier.foreign_partial_credit

    def score(ref: TaskRef, texts: Sequence[str]) -> list[float]:
        rewards = node.desk.score(ref, texts)
        return rewards if partial_credit else foreign_rewards(rewards, node.desk.passed(ref, rewards))

    return score


def _bound(cohort: Cohort, own: Sequence[LocalGroup]) -> float:
    """The bound of the first honest node's policy check, as estimated by a node that samples from
    the same policy.
    """
    if not cohort.nodes or not cohort.nodes[0].config.trainer.constants.policy_check_fraction:
        return -math.inf
    rules = AbsurdTextRules.of(cohort.nodes[0].config.trainer)
    means = []
    for each in own:
        for completion in each.group.completions:
            logprobs = unpack_logprobs(completion.behaviour_logprobs or b"")
            if logprobs:
                means.append(math.fsum(logprobs) / len(logprobs))
    return least_logprob(means, rules)
