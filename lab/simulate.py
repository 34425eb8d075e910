"""Simulates a whole swarm in one process, round by round, without a broker.

In a round every node samples as many groups as admission allows under the policy of the previous
round, scores and shares them, checks what others shared, makes a batch, trains on it, and evaluates
when due. All nodes advance together, and everything except time is the services' own code.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter

from lab.arms import PlannedRun
from lab.policy import Policy
from lab.records import RecordWriter
from lab.sim_border import SimBorder, SwarmMessage, node_key, swarm_message
from lab.sim_hostile import HostileNodes, names_of
from lab.sim_node import LocalGroup, SimNode, call_seed
from lab.step_record import simulated_part, trained_part
from lab.task_desk import Shared, TaskDesk
from services.generator.engines.base import SamplingParams
from services.sampler.composition import HeldOutResult
from services.verifier.sharing import is_shared
from shared.contracts.messages import Batch
from shared.tasks.evaluation import summarise

START_S = 1_700_000_000.0
"""Unix time at which every simulation begins."""

Progress = Callable[[int], None]


class Simulation:
    """One run. `shared` may be reused for the next run in the same process, to save derivation and
    scoring.

    The constructor raises ValueError if the nodes' models cannot be simulated; the message says
    why.
    """

    def __init__(self, run: PlannedRun, shared: Shared | None = None) -> None:
        self.run_plan = run
        self._shared = shared or Shared()
        keys = {node.name: node_key(node.name, run.seed) for node in run.nodes}
        every_name = [name for node in run.nodes for name in names_of(node.name, node.role, run.attack.names)]
        names = {name: node_key(name, run.seed).public_key for name in every_name}
        first_of: dict[str, SimNode] = {}
        made: dict[str, SimNode] = {}
        for planned in sorted(run.nodes, key=lambda node: node.role != "honest"):
            config = planned.config
            desk = TaskDesk(config, self._shared)
            border = SimBorder(config, desk, names, START_S)
            policy = Policy(config, desk.tokenizer) if planned.role == "honest" else first_of[config.model.path].policy
            made[planned.name] = SimNode(planned, desk, keys[planned.name], border, policy)
            first_of.setdefault(config.model.path, made[planned.name])
        self.nodes = [made[node.name] for node in run.nodes]
        self.honest = [node for node in self.nodes if node.role == "honest"]
        honest_of = {node.name: first_of[node.config.model.path] for node in self.nodes if node.role != "honest"}
        self._hostile = HostileNodes(run, honest_of, self._shared)
        self._under_way: dict[int, list[SwarmMessage]] = {}
        self.batches: dict[str, Batch | None] = {}
        """Every honest node's batch in the latest round, for tests."""

    def run(self, records: RecordWriter, progress: Progress | None = None) -> None:
        """Run all rounds."""
        self._evaluate(0, records)
        for number in range(1, self.run_plan.rounds + 1):
            self.round(number, records)
            if progress is not None:
                progress(number)

    def round(self, number: int, records: RecordWriter) -> None:
        """Run one round and write its records."""
        now_s = START_S + number * self.run_plan.round_s
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        own = {node.name: self._make(node, number, now_s) for node in self.nodes}
        seconds["generate"] = time.perf_counter() - started
        messages = self._arriving([m for node in self.nodes for m in self._shared_by(node, own[node.name], number)], number)
        refused: dict[str, Counter[str]] = {}
        started = time.perf_counter()
        for node in self.honest:
            for group in own[node.name]:
                node.take_own(group, now_s)
            refused[node.name] = Counter()
            if node.composition.external:
                read = node.read(messages, call_seed(f"read {node.name}", self.run_plan.seed, number), now_s + 1.0)
                accepted, refused[node.name] = node.border.admit(read, now_s + 1.0, self.run_plan.round_s)
                node.take_foreign(accepted)
            self.batches[node.name] = self.batch_of(node, now_s + 1.0)
        seconds["choose"] = time.perf_counter() - started
        started = time.perf_counter()
        for node in self.honest:
            batch = self.batches[node.name]
            trained = None
            if batch is not None:
                trained = node.policy.learner.step(batch)
                node.version += 1
                node.border.note_findings(batch.number, trained.absurd_of, trained.foreign_answers_of, now_s + 1.0)
            simulated = simulated_part(node, own[node.name], batch, refused[node.name], self.run_plan.round_s, self._hostile.names)
            records.write(
                "step", round=number, node=node.name, **simulated, **({} if trained is None else trained_part(asdict(trained)))
            )
        seconds["train"] = time.perf_counter() - started
        started = time.perf_counter()
        every = self.honest[0].config.eval.every_versions
        if number % every == 0 or number == self.run_plan.rounds:
            self._evaluate(number, records)
        seconds["evaluate"] = time.perf_counter() - started
        records.write("round", round=number, seconds=seconds)

    def batch_of(self, node: SimNode, now_s: float) -> Batch | None:
        """What a node trains on next; a study may change it."""
        return node.batch(now_s)

    def _make(self, node: SimNode, number: int, now_s: float) -> list[LocalGroup]:
        """A node's new groups in this round, each scored by it."""
        honest = node.role == "honest"
        count = node.draws_allowed() if honest else self._hostile.groups_a_round(node)
        seed = call_seed(f"generate {node.name}", self.run_plan.seed, number)
        return node.make(count, seed, node.version, now_s) if count else []

    def _shared_by(self, node: SimNode, own: Sequence[LocalGroup], number: int) -> list[SwarmMessage]:
        """The messages in which a node shares the groups that it made this round."""
        if not any(each.composition.external for each in self.honest):
            return []
        if node.role != "honest":
            return self._hostile.messages(node, own, number)
        groups = [each.group for each in own if is_shared(node.config.verifier.share, node.rewards_elsewhere(each))]
        return [swarm_message(group, node.key, node.config) for group in groups]

    def _arriving(self, sent: Sequence[SwarmMessage], number: int) -> list[SwarmMessage]:
        """The messages that arrive this round, from this and earlier rounds."""
        least, most = self.run_plan.delay_rounds
        rng = random.Random(f"delay {self.run_plan.seed} {number}")
        for message in sent:
            self._under_way.setdefault(number + rng.randint(least, most), []).append(message)
        return self._under_way.pop(number, [])

    def _evaluate(self, number: int, records: RecordWriter) -> None:
        """Ask every honest node its held-out questions. Nodes of the base policy with the same
        questions answer once.
        """
        started = time.perf_counter()
        known: dict[tuple[object, ...], list[str]] = {}
        for node in self.honest:
            asked = node.desk.held_out_prompts
            if not asked:  # eval.tasks = 0
                continue
            params = SamplingParams(temperature=0.0, max_new_tokens=node.params.max_new_tokens)
            alike = (id(node.desk.held_out), node.config.model.path, params, *([] if node.version == 0 else [node.name]))
            if alike not in known:
                seed = call_seed(f"evaluate {node.name}", self.run_plan.seed, number)
                answers = node.policy.sample([task.prompt_ids for task in asked], 1, params, seed=seed, version=node.version)
                known[alike] = [answer.text for (answer,) in answers]
            rewards = [node.desk.score(each.task.ref, [text])[0] for each, text in zip(asked, known[alike], strict=True)]
            passes = [node.desk.passed(each.task.ref, [reward])[0] for each, reward in zip(asked, rewards, strict=True)]
            datasets = [each.task.ref.dataset for each in asked]
            results = list(zip(datasets, rewards, passes, strict=True))
            report = summarise(
                results,
                node=node.name,
                policy_version=node.version,
                created_at=START_S + number * self.run_plan.round_s,
                seconds=0.0,
            )
            node.evaluation = HeldOutResult.of(report)
            records.write(
                "eval",
                round=number,
                node=node.name,
                n=report.n,
                pass_rate=report.pass_rate,
                mean_reward=report.mean_reward,
                tasks={name: [score.n, score.pass_rate, score.mean_reward] for name, score in report.per_task.items()},
                # One digit per question, in the order of `tasks`: 1 if it was passed.
                passed="".join(str(int(passed)) for _, _, passed in sorted(results, key=itemgetter(0))),
            )
        if number == 0:
            records.write("round", round=0, seconds={"evaluate": time.perf_counter() - started})
