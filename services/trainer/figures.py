"""The trainer's metrics and status figures."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.trainer.records import PhaseSeconds, StepRecord
from services.trainer.selection.group_tokens import GROUP_BUDGET, SENDER_BUDGET
from shared.contracts.control import PolicyPointer
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.runtime import ServiceContext
from shared.runtime.metrics import DURATION_BUCKETS_S, LateGauge


class GpuMemory(Collector):
    """Bytes that torch has allocated, has reserved, and had allocated at its peak, over all GPUs of
    this process; 0 without one.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        """Torch's current figures. Reading them does not initialise CUDA if it is not in use."""
        family = self._family()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpus = range(torch.cuda.device_count()) if used else range(0)
        family.add_metric(["allocated"], sum(torch.cuda.memory_allocated(gpu) for gpu in gpus))
        family.add_metric(["reserved"], sum(torch.cuda.memory_reserved(gpu) for gpu in gpus))
        family.add_metric(["peak"], sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        text = (
            "GPU memory of this process as counted by torch: allocated now, reserved now, and the peak allocated; 0 without a GPU."
        )
        return GaugeMetricFamily("swarm_trainer_gpu_memory_bytes", text, labels=["kind"])


_PHASES = tuple(PhaseSeconds.__dataclass_fields__)
_SKIPPED = (
    *("unscored", "empty", "too_long", "malformed_tokens", "text_alone", "unknown_token", "control_text", "absurd"),
    *("truncated", "negative", "changed_question"),
    *(GROUP_BUDGET, SENDER_BUDGET),
)
_WINDOW_STEPS = 50


class TrainerGauges:
    """The trainer's metrics. Labels are bounded: phases, origins, reasons to leave a group out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def last(name: str, text: str) -> LateGauge:
            return LateGauge(name, f"{text} in the last step.", registry=registry)

        def late(name: str, text: str) -> LateGauge:
            return LateGauge(name, text, registry=registry)

        def counter(name: str, text: str, label: str = "", values: Sequence[str] = ()) -> Counter:
            made = Counter(name, text, [label] if label else [], registry=registry)
            for value in values:
                made.labels(value)
            return made

        self.steps = counter(
            "swarm_trainer_steps_total", "Steps trained by this process, including steps repeated after a restart."
        )
        self.unchanged = counter("swarm_trainer_unchanged_steps_total", "Steps that did not change the weights.")
        self.last_step = late(
            "swarm_trainer_last_step_timestamp_seconds",
            "Unix time of the end of the last step. Absent before.",
        )
        self.seconds = Histogram(
            "swarm_trainer_step_duration_seconds",
            "Time spent in each phase of a step; wait is for the batch.",
            ["phase"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        for phase in _PHASES:
            self.seconds.labels(phase)
        published = "Absent before the first."
        self._version = late("swarm_policy_version", f"Version of the newest published policy. {published}")
        self._published = late("swarm_policy_published_timestamp_seconds", f"Unix time of the newest publication. {published}")
        self.delta_lost = late(
            "swarm_trainer_delta_lost_ratio",
            "Share of the LoRA adapters' delta that was lost when the newest policy was rounded to the dtype it is published in. "
            "0: nothing; 1: the published policy equals the base policy. What generators lose by rounding again is not included.",
        )
        self.loss = last("swarm_trainer_loss", "Loss")
        self.grad_norm = last("swarm_trainer_grad_norm", "Gradient norm before clipping")
        self.grad_norm_local = last("swarm_trainer_grad_norm_local", "Norm of the local groups' part of the gradient")
        self.grad_norm_foreign = last(
            "swarm_trainer_grad_norm_foreign", "Norm of the foreign groups' part of the gradient before any bound"
        )
        self.bounded = counter(
            "swarm_trainer_bounded_groups_total",
            "Foreign groups whose gradient was scaled down (trainer.constants.foreign_norm_factor).",
        )
        self.entropy = last("swarm_trainer_entropy_nats", "Mean entropy in nats per token")
        self.clip_fraction = last("swarm_trainer_clip_ratio", "Share of clipped tokens")
        self.importance_ratio = last("swarm_trainer_importance_ratio", "Mean ratio of policy to proximal policy over tokens")
        self.importance_ratio_max = last(
            "swarm_trainer_importance_ratio_max", "Largest ratio of policy to proximal policy of a token"
        )
        kl = "Mean KL divergence (k3, nats per token) of"
        self.kl_behaviour = last("swarm_trainer_kl_behaviour_nats", f"{kl} the behaviour policy from the proximal policy")
        self.kl_reference = last("swarm_trainer_kl_reference_nats", f"{kl} the policy from the reference policy")
        self.learning_rate = last("swarm_trainer_learning_rate", "Learning rate")
        self.reward = Gauge(
            "swarm_trainer_reward",
            "Mean reward of completions by origin, in the last step that had groups of that origin.",
            ["origin"],
            registry=registry,
        )
        self.staleness = last("swarm_trainer_staleness_steps_max", "Largest staleness (policy versions) of a local group")
        self.groups = counter(
            "swarm_trainer_groups_total",
            "Groups of the steps, with an advantage or not.",
            "origin",
            ("local", "external", "demonstration"),
        )
        self.zero_advantage = counter(
            "swarm_trainer_zero_advantage_groups_total", "Groups whose rewards are all equal: no advantage."
        )
        self.skipped = counter(
            "swarm_trainer_skipped_groups_total",
            "Groups of batches that were not trained on, by reason.",
            "reason",
            _SKIPPED,
        )
        self.absurd = counter(
            "swarm_trainer_absurd_answers_total",
            "Foreign answers left out because they are far too unlikely under this node's policy (trainer.foreign).",
        )
        self.mastered = counter(
            "swarm_trainer_mastered_groups_total",
            "Foreign candidates left out because this node's policy gives their rewarded answers already.",
        )
        self.reencoded = last("swarm_trainer_reencoded_ratio", "Share of groups tokenized again from their text")
        self.tokens = counter(
            "swarm_trainer_tokens_total",
            "Completion tokens trained on (groups with an advantage).",
        )
        saved = "Absent before the first."
        self._checkpoint_step = late("swarm_trainer_checkpoint_step", f"Step of the newest checkpoint. {saved}")
        self.checkpoint_interval = late(
            "swarm_trainer_checkpoint_interval_steps",
            "Steps between checkpoints (trainer.checkpoint_every).",
        )
        self.finished = Gauge(
            "swarm_trainer_finished", "1 once all trainer.max_steps steps have been taken, else 0.", registry=registry
        )
        self.fallbacks = counter("swarm_trainer_corrupt_checkpoints_total", "Corrupt checkpoints found when the trainer started.")
        self.wait_ratio = LateGauge(
            "swarm_trainer_wait_ratio",
            f"Share of the last {_WINDOW_STEPS} steps' time spent waiting for a batch.",
            registry=registry,
        )
        GpuMemory(registry)
        self._alike: deque[tuple[int, dict[str, int], float, dict[str, int]]] = deque()
        self._bonuses: set[str] = set()
        self._recent: deque[PhaseSeconds] = deque(maxlen=_WINDOW_STEPS)

    def published(self, pointer: PolicyPointer | None) -> None:
        if pointer is not None:
            self._version.set(pointer.version)
            self._published.set(pointer.created_at)

    def checkpointed(self, step: int) -> None:
        self._checkpoint_step.set(step)

    def observe(self, record: StepRecord, context: ServiceContext) -> None:
        """Export a step to /metrics and to the status board."""
        self.steps.inc()
        self.unchanged.inc(0 if record.updated else 1)
        self.last_step.set(time.time())
        self.loss.set(record.loss)
        self.grad_norm.set(record.grad_norm)
        self.grad_norm_local.set(record.grad_norm_local)
        self.grad_norm_foreign.set(record.grad_norm_foreign)
        self.bounded.inc(record.groups_bounded)
        self.entropy.set(record.entropy)
        self.clip_fraction.set(record.clip_fraction)
        self.importance_ratio.set(record.importance_ratio)
        self.importance_ratio_max.set(record.importance_ratio_max)
        self.kl_behaviour.set(record.kl_behaviour)
        self.kl_reference.set(record.kl_reference)
        self.learning_rate.set(record.learning_rate)
        self.staleness.set(record.staleness_max)
        self.reencoded.set(record.reencoded_share)
        self.zero_advantage.inc(record.groups_zero_advantage)
        self.absurd.inc(record.answers_absurd)
        self.mastered.inc(sum(record.mastered_of.values()))
        self.tokens.inc(record.tokens)
        self.groups.labels("local").inc(record.groups_local)
        self.groups.labels("external").inc(record.groups_external)
        self.groups.labels("demonstration").inc(record.groups_demonstrated)
        for reason, count in record.skipped.items():
            self.skipped.labels(reason).inc(count)
        for origin, reward in (("local", record.reward_local), ("external", record.reward_external)):
            if reward is not None:
                self.reward.labels(origin).set(reward)
        for phase in _PHASES:
            self.seconds.labels(phase).observe(getattr(record.phase_seconds, phase))
        self._recent.append(record.phase_seconds)
        self._show(record, context)

    def _show(self, record: StepRecord, context: ServiceContext) -> None:
        """The node's status shows the newest step, but shares of time over several steps, because
        those of a single step vary too much. A message cannot contain infinity, which a gradient's
        norm may be.
        """
        board, recent = context.status, list(self._recent)
        board.worked()
        board.set(StatusFigure.STEP, record.step)
        board.set(StatusFigure.LOSS, record.loss)
        board.set(StatusFigure.GRAD_NORM, None if record.grad_norm is None else min(record.grad_norm, 1e30))
        if record.reward_local is not None:
            board.set(StatusFigure.REWARD_LOCAL, record.reward_local)
        if record.reward_external is not None:
            board.set(StatusFigure.REWARD_EXTERNAL, record.reward_external)
        board.set(StatusFigure.STALENESS_MEAN, record.staleness_mean)
        board.set(StatusFigure.STALENESS_MAX, record.staleness_max)
        board.set(StatusFigure.STEP_SECONDS, record.phase_seconds.total)
        total_s = max(1e-9, sum(p.total for p in recent))
        for phase in _PHASES:
            board.set(FigureFamily.SHARE.of(phase), sum(getattr(p, phase) for p in recent) / total_s)
        self.wait_ratio.set(board.get(FigureFamily.SHARE.of("wait")))
        self._alike.append((record.groups_local, record.alike_of, record.cut_off_share or 0.0, record.bonus_of))
        while sum(groups for groups, *_ in self._alike) - self._alike[0][0] >= ALIKE_GROUPS:
            self._alike.popleft()
        groups = sum(groups for groups, *_ in self._alike)
        board.set(FigureFamily.ALIKE.of("of"), groups)
        for kind in ("right", "wrong", "alike"):
            board.set(FigureFamily.ALIKE.of(kind), sum(alike.get(kind, 0) for _, alike, *_ in self._alike))
        cut_off = sum(groups * share for groups, _, share, _ in self._alike) / groups if groups else 0.0
        board.set(FigureFamily.ALIKE.of("cut_off"), cut_off)
        bonus: Tally[str] = Tally()
        for *_, by_names in self._alike:
            bonus.update(by_names)
        told = dict(bonus.most_common(BONUSES_TOLD))
        for names in self._bonuses - told.keys():
            board.set(FigureFamily.BONUS.of(names), None)
        for names, found in told.items():
            board.set(FigureFamily.BONUS.of(names), found)
        self._bonuses = set(told)


ALIKE_GROUPS = 32
"""Local groups over which those with equal rewards are counted, or those of one step."""
BONUSES_TOLD = 4
"""A status holds few figures."""
