"""A step in numbers for /metrics and for the node's status."""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.trainer.records import PhaseSeconds, StepRecord
from shared.runtime import ServiceContext

_PHASES = tuple(PhaseSeconds.__dataclass_fields__)
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_WINDOW_STEPS = 50


class TrainerGauges:
    """The trainer's metrics. Labels are bounded: phases, origins, reasons for leaving a group out, kinds of write."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.steps = counter("swarm_trainer_steps", "Steps trained by this process, those of a replay included.")
        self.unchanged = counter("swarm_trainer_unchanged_steps", "Steps that left the weights as they were.")
        self.last_step = gauge("swarm_trainer_last_step_timestamp_seconds", "When the last step ended.")
        self.seconds = Histogram(
            "swarm_trainer_step_duration_seconds", "Of each phase of a step.", ["phase"], buckets=_BUCKETS_S, registry=registry
        )
        self.version = gauge("swarm_policy_version", "Version of the newest policy that was published.")
        self.loss = gauge("swarm_trainer_loss", "Loss of the last step.")
        self.grad_norm = gauge("swarm_trainer_grad_norm", "Gradient norm of the last step, before clipping.")
        self.entropy = gauge("swarm_trainer_entropy_nats", "Entropy per token in the last step.")
        self.clip_fraction = gauge("swarm_trainer_clip_ratio", "Share of clipped tokens in the last step.")
        self.importance_ratio = gauge("swarm_trainer_importance_ratio", "Mean policy to proximal ratio in the last step.")
        self.importance_ratio_max = gauge("swarm_trainer_importance_ratio_max", "Largest policy to proximal ratio.")
        self.kl_behaviour = gauge("swarm_trainer_kl_behaviour_nats", "KL(behaviour || policy) per token in the last step.")
        self.learning_rate = gauge("swarm_trainer_learning_rate", "Learning rate of the last step.")
        self.reward = gauge("swarm_trainer_reward", "Mean reward in the last step, by whose groups.", "origin")
        self.staleness = gauge("swarm_trainer_staleness_steps_max", "Largest staleness of a local group in the last step.")
        self.groups = counter("swarm_trainer_groups", "Groups taken in.", "origin")
        self.zero_advantage = counter("swarm_trainer_zero_advantage_groups", "Groups taken in whose rewards do not differ.")
        self.skipped = counter("swarm_trainer_skipped_groups", "Groups left out because they cannot be trained on.", "reason")
        self.absurd = counter("swarm_trainer_absurd_answers", "Foreign answers left out because the own policy finds them absurd.")
        self.reencoded = gauge("swarm_trainer_reencoded_ratio", "Share of groups of the last step that were encoded again.")
        self.tokens = counter("swarm_trainer_tokens", "Completion tokens taken in.")
        self.write_failures = counter("swarm_trainer_write_failures", "Writes that failed and are tried again.", "kind")
        self.checkpoint_step = gauge("swarm_trainer_checkpoint_step", "Step of the newest checkpoint.")
        self.fallbacks = counter("swarm_trainer_corrupt_checkpoints", "Checkpoints that were found broken at start.")
        self._recent: deque[PhaseSeconds] = deque(maxlen=_WINDOW_STEPS)

    def observe(self, record: StepRecord, context: ServiceContext) -> None:
        """Show a step on /metrics and on the status board."""
        self.steps.inc()
        self.unchanged.inc(0 if record.updated else 1)
        self.last_step.set(time.time())
        self.loss.set(record.loss)
        self.grad_norm.set(record.grad_norm)
        self.entropy.set(record.entropy)
        self.clip_fraction.set(record.clip_fraction)
        self.importance_ratio.set(record.importance_ratio)
        self.importance_ratio_max.set(record.importance_ratio_max)
        self.kl_behaviour.set(record.kl_behaviour)
        self.learning_rate.set(record.learning_rate)
        self.staleness.set(record.staleness_max or 0)
        self.reencoded.set(record.reencoded_share)
        self.zero_advantage.inc(record.groups_zero_advantage)
        self.absurd.inc(record.answers_absurd)
        self.tokens.inc(record.tokens)
        self.groups.labels("local").inc(record.groups_local)
        self.groups.labels("external").inc(record.groups_external)
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
        board, recent = context.status, list(self._recent)
        board.set("step", record.step)
        board.set("loss", record.loss)
        board.set("grad_norm", record.grad_norm if record.grad_norm < 1e30 else 1e30)
        if record.reward_local is not None:
            board.set("reward_local", record.reward_local)
        if record.reward_external is not None:
            board.set("reward_external", record.reward_external)
        board.set("staleness_mean", record.staleness_mean or 0.0)
        board.set("staleness_max", record.staleness_max or 0)
        board.set("step_seconds", record.phase_seconds.total)
        total_s = max(1e-9, sum(p.total for p in recent))
        for phase in _PHASES:
            board.set(f"{phase}_share", sum(getattr(p, phase) for p in recent) / total_s)
