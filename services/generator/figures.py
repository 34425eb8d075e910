"""The generator's Prometheus metrics and status figures, in one place so that they always agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.contracts.control import EvalReport
from shared.contracts.messages import RolloutGroup
from shared.contracts.status_figures import StatusFigure
from shared.runtime.metrics import DURATION_BUCKETS_S, LateGauge, PublishMetrics, buckets_from
from shared.runtime.status import StatusBoard

_TOKENS = buckets_from(1.0, 2.0**17, whole=True)


class Figures:
    """Counts events as they happen. `datasets` are those of the node's tasks."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard, datasets: Iterable[str]) -> None:
        self._status = status
        datasets = list(datasets)
        self._groups = Counter("swarm_rollouts_generated_total", "Groups generated, by dataset.", ["task"], registry=registry)
        for dataset in datasets:
            self._groups.labels(dataset)
        self._left_out = Counter(
            "swarm_groups_left_out_total",
            "Groups not made because the server of engine openai refused the prompt or gave a completion that cannot be used; "
            "their draws are not repeated.",
            registry=registry,
        )
        self._rows_left_out = Gauge(
            "swarm_task_rows_left_out",
            "Rows of a task file (of another source: draws) left out as their own reference answer earns nothing, or as the "
            "model's chat template cannot write them, of those looked at so far; the log names them.",
            ["task"],
            registry=registry,
        )
        self._rows_looked_at = Gauge(
            "swarm_task_rows_looked_at",
            "Rows of a task file (of another source: draws) whose own reference answer was looked at so far; 0 for a verifier of "
            "your own, which decides that itself.",
            ["task"],
            registry=registry,
        )
        for dataset in datasets:
            self._rows_left_out.labels(dataset)
            self._rows_looked_at.labels(dataset)
        self._tokens = Histogram(
            "swarm_completion_tokens",
            "Tokens per completion; the sum is the number of tokens generated.",
            buckets=_TOKENS,
            registry=registry,
        )
        self._cut = Counter(
            "swarm_completions_cut_total",
            "Completions cut off at generator.max_new_tokens; swarm_completion_tokens_count counts all. If many are cut off, "
            "answers need a higher limit.",
            registry=registry,
        )
        self._call = Histogram(
            "swarm_generate_call_duration_seconds",
            "Duration of one engine call, which samples generator.groups_per_call groups.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        results = "ok, held_back (the queue is full; will be retried), error (will be retried)"
        self.publish = PublishMetrics(registry, "node", ("ok", "held_back", "error"), results)
        self._version = Gauge("swarm_policy_version", "Policy version being sampled from; 0 is the base policy.", registry=registry)
        self._load = Histogram(
            "swarm_policy_load_duration_seconds",
            "Time from the start of fetching a new policy until the engine has loaded it.",
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._load_failures = Counter(
            "swarm_policy_load_failures_total", "Failed attempts to load a new policy; the old one stays in use.", registry=registry
        )
        self._allowed = LateGauge(
            "swarm_draws_allowed",
            "Task draws that may still be started; 0 while the trainer has to catch up. Absent on a node that does not train.",
            registry=registry,
        )
        self._held_out_tasks = Gauge("swarm_held_out_tasks", "Tasks in the held-out set.", registry=registry)
        same = "The same in every replica."
        self._pass_ratio = LateGauge(
            "swarm_held_out_pass_ratio",
            f"Share of held-out tasks solved by the newest evaluated policy. {same} Absent also where no pass is defined.",
            registry=registry,
        )
        self._evaluated_version = LateGauge(
            "swarm_held_out_policy_version", f"Policy version of the newest evaluation. {same}", registry=registry
        )
        self._base_pass_ratio = LateGauge(
            "swarm_held_out_base_pass_ratio",
            "Share of held-out tasks solved by the base policy. Absent where it was evaluated on other questions or with "
            "another reward than the newest policy, or by another replica.",
            registry=registry,
        )

    def generated(self, groups: Sequence[RolloutGroup], seconds: float) -> None:
        """Record that one engine call has finished."""
        for group in groups:
            self._groups.labels(group.task.ref.dataset).inc()
            for completion in group.completions:
                self._tokens.observe(completion.token_count)
                self._cut.inc(completion.finish_reason == "length")
        self._call.observe(seconds)
        self._status.worked()
        self._status.add(StatusFigure.GROUPS_GENERATED, len(groups))

    def left_out(self, groups: int) -> None:
        """Count groups that the engine's server gave no completions for."""
        self._left_out.inc(groups)

    def rows_left_out(self, dataset: str, rows: int, looked_at: int) -> None:
        """Set how many rows of a source are not used, and of how many the references were looked
        at.
        """
        self._rows_left_out.labels(dataset).set(rows)
        self._rows_looked_at.labels(dataset).set(looked_at)

    def draws_allowed(self, draws: int) -> None:
        """Set how many more draws admission would hand out."""
        self._allowed.set(draws)

    def policy(self, version: int) -> None:
        """Set the version that the engine samples from."""
        self._version.set(version)
        self._status.set(StatusFigure.POLICY_VERSION, version)

    def policy_loaded(self, version: int, seconds: float) -> None:
        """Record that a new policy was loaded."""
        self.policy(version)
        self._load.observe(seconds)

    def policy_load_failed(self) -> None:
        """Count a failed swap; the old policy stays in use."""
        self._load_failures.inc()

    def held_out_tasks(self, count: int) -> None:
        """Set the size of the held-out set."""
        self._held_out_tasks.set(count)

    def base_pass_ratio(self, ratio: float | None) -> None:
        """Set the base policy's pass rate; None: unknown to this replica."""
        self._base_pass_ratio.set(ratio)

    def unknown_rewards(self, answers: int) -> None:
        """Set how many answers of an evaluation have no reward."""
        self._status.set(StatusFigure.EVAL_UNKNOWN, answers or None)

    def evaluated(self, report: EvalReport) -> None:
        """Set the node's newest held-out result."""
        self._pass_ratio.set(report.pass_rate)
        self._evaluated_version.set(report.policy_version)
