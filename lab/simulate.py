"""The driver `simulate`: a whole swarm in one process, round by round, without a broker.

In a round every node samples as many groups as admission allows under the policy of the previous
round, scores and shares them, checks what others shared, makes a batch, trains on it, and evaluates
when due. All nodes advance together, and everything except time is the services' own code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from lab.arms import PlannedRun
from lab.cohort import Cohort, Made
from lab.records import RecordWriter
from lab.sim_border import SimBorder, SwarmMessage, node_key, swarm_message
from lab.sim_hostile import HostileNodes, names_of
from lab.sim_node import LocalGroup, SimNode, call_seed, groups_to_make, local_part
from lab.stacked_params import Architecture
from lab.step_record import step_record
from lab.task_desk import Shared, TaskDesk
from services.generator.engines.base import SamplingParams
from services.sampler.share_controller import Evaluation
from services.verifier.sharing import is_shared
from shared.contracts.messages import Batch
from shared.model.loading import resolve_device
from shared.seeds import generator_from
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
        self.nodes: list[SimNode] = []
        by_architecture: dict[tuple[Architecture, int], list[SimNode]] = {}
        for planned in run.nodes:
            desk = TaskDesk(planned.config, self._shared)
            architecture = Architecture.from_folder(Path(planned.config.model.path))
            end_token = int(desk.tokenizer.eos_token_id)
            border = SimBorder(planned.config, desk, names, START_S)
            node = SimNode(planned, desk, keys[planned.name], border, end_token, architecture.vocabulary)
            self.nodes.append(node)
            by_architecture.setdefault((architecture, end_token), []).append(node)
        self.cohorts = [
            Cohort(
                [node for node in nodes if node.role == "honest"],
                [node for node in nodes if node.role != "honest"],
                end_token,
                resolve_device(nodes[0].config.model.device),
            )
            for (_, end_token), nodes in by_architecture.items()
        ]
        self.honest = [node for node in self.nodes if node.role == "honest"]
        for node in self.nodes:
            if node.role == "low_quality":
                node.params = SamplingParams(temperature=run.attack.temperature, max_new_tokens=node.params.max_new_tokens)
        self._hostile = HostileNodes(run, self.cohorts, self._shared)
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
        made = self._make(number, now_s)
        seconds["generate"] = time.perf_counter() - started
        own = {node.name: made.get(node.name, []) for node in self.nodes}
        messages = self._arriving([m for node in self.nodes for m in self._shared_by(node, own[node.name], number)], number)
        self._hostile.hear(own)
        refused: dict[str, Counter[str]] = {}
        batches: dict[str, Batch | None] = {}
        started = time.perf_counter()
        for node in self.honest:
            rng = generator_from(f"local {node.name} {self.run_plan.seed} {number}")
            flags = [group.informative for group in own[node.name]]
            for group in local_part(node.local, own[node.name], flags, node.shares.local, rng):
                node.take_own(group, now_s)
            refused[node.name] = Counter()
            if node.shares.external:
                accepted, refused[node.name] = node.border.admit(messages, now_s + 1.0, self.run_plan.round_s)
                node.take_foreign(accepted)
            batches[node.name] = node.batch(number, now_s + 1.0)
            node.remember(number, own[node.name])
        self.batches = batches
        seconds["choose"] = time.perf_counter() - started
        started = time.perf_counter()
        for cohort in self.cohorts:
            outcomes = cohort.train([batches[node.name] for node in cohort.nodes]) if cohort.nodes else []
            for node, outcome in zip(cohort.nodes, outcomes, strict=True):
                batch = batches[node.name]
                node.version += batch is not None
                if batch is not None and outcome is not None:
                    trained_of = outcome.intake.foreign_answers_of
                    node.border.note_findings(batch.number, outcome.absurd_of, trained_of, now_s + 1.0)
                records.write(
                    "step",
                    **step_record(
                        number,
                        node,
                        own[node.name],
                        batch,
                        outcome,
                        refused[node.name],
                        now_s + 1.0,
                        self.run_plan.round_s,
                        self._hostile.names,
                    ),
                )
        seconds["train"] = time.perf_counter() - started
        started = time.perf_counter()
        every = self.honest[0].config.eval.every_versions
        if number % every == 0 or number == self.run_plan.rounds:
            self._evaluate(number, records)
        seconds["evaluate"] = time.perf_counter() - started
        records.write("round", round=number, seconds=seconds)

    def _make(self, number: int, now_s: float) -> dict[str, list[LocalGroup]]:
        """Every node's new groups in this round, each scored by its node."""
        own: dict[str, list[LocalGroup]] = {node.name: [] for node in self.nodes}
        for turn in range(1000):
            wanted = [(node, self._still_wanted(node, own[node.name], turn)) for node in self.nodes]
            if not any(count for _, count in wanted):
                break
            seed = call_seed(f"generate-{turn}", self.run_plan.seed, number)
            for cohort in self.cohorts:
                for made in cohort.make([(n, count) for n, count in wanted if n in cohort.nodes or n in cohort.untrained], seed):
                    own[made.node.name].append(self._scored(made, now_s))
        return own

    def _still_wanted(self, node: SimNode, own: Sequence[LocalGroup], turn: int) -> int:
        if node.role != "honest" or node.local.filter == "none":
            if turn:
                return 0
            return node.draws_allowed() if node.role == "honest" else self._hostile.groups_a_round(node)
        return groups_to_make(node.local, node.shares.local, [group.informative for group in own])

    def _scored(self, made: Made, now_s: float) -> LocalGroup:
        group = made.node.group(made.draw, made.task, made.samples, now_s)
        return LocalGroup(group, made.node.desk.score(group.task.ref, [completion.text for completion in group.completions]))

    def _shared_by(self, node: SimNode, own: Sequence[LocalGroup], number: int) -> list[SwarmMessage]:
        """The messages in which a node shares the groups that it made this round."""
        if not any(each.shares.external for each in self.honest):
            return []
        if node.role != "honest":
            return self._hostile.messages(node, own, number)
        groups = [each.group for each in own if is_shared(node.config.verifier.share, each.rewards)]
        return [swarm_message(group, node.key, node.config) for group in groups]

    def _arriving(self, sent: Sequence[SwarmMessage], number: int) -> list[SwarmMessage]:
        """The messages that arrive this round, from this and earlier rounds."""
        least, most = self.run_plan.delay_rounds
        rng = generator_from(f"delay {self.run_plan.seed} {number}")
        for message in sent:
            self._under_way.setdefault(number + rng.randint(least, most), []).append(message)
        return self._under_way.pop(number, [])

    def _evaluate(self, number: int, records: RecordWriter) -> None:
        started = time.perf_counter()
        for cohort in self.cohorts:
            if not any(node.desk.held_out_prompts for node in cohort.nodes):
                continue
            answers = cohort.answers(call_seed("evaluate", self.run_plan.seed, number))
            for node, texts in zip(cohort.nodes, answers, strict=True):
                asked = node.desk.held_out_prompts
                if not asked:  # eval.tasks = 0
                    continue
                rewards = [node.desk.score(each.task.ref, [text])[0] for each, text in zip(asked, texts, strict=True)]
                passes = [node.desk.passed(each.task.ref, [reward])[0] for each, reward in zip(asked, rewards, strict=True)]
                results = [
                    (each.task.ref.dataset, reward, passed) for each, reward, passed in zip(asked, rewards, passes, strict=True)
                ]
                report = summarise(
                    results,
                    node=node.name,
                    policy_version=node.version,
                    created_at=START_S + number * self.run_plan.round_s,
                    seconds=0.0,
                )
                node.evaluation = Evaluation.of(report)
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
