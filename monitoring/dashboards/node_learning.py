"""The row of dashboard "Node" about the trainer's updates: does the policy change, and is the
change healthy?
"""

from __future__ import annotations

from monitoring.panels import Panel, Row, quantiles, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"
NATS_PER_TOKEN = "suffix: nats"


def _gauge(title: str, description: str, unit: str, *metrics: tuple[str, str], minimum: float | None = None) -> Panel:
    """A panel of gauges of the last step, each `(metric, legend)`."""
    return Panel(
        title=title,
        description=description,
        unit=unit,
        minimum=minimum,
        width=6,
        queries=tuple(series(f"max by (node) ({metric}{{{NODE}}})", legend) for metric, legend in metrics),
    )


LEARNING = Row(
    title="The update",
    panels=(
        Panel(
            title="Reward in the last step",
            description="Mean reward of the last step's groups, local and foreign separately.",
            unit="short",
            width=6,
            queries=(series(f"max by (origin) (swarm_trainer_reward{{{NODE}}})", "{{origin}}"),),
        ),
        _gauge(
            "Loss",
            "Loss of the last step. A policy-gradient loss stays near zero and does not fall; look at the reward instead.",
            "short",
            ("swarm_trainer_loss", "loss"),
        ),
        _gauge(
            "Gradient norm",
            "Gradient norm of the last step, before clipping (trainer.grad_clip). If it stays high, lower the learning rate. "
            "The local and foreign norms are taken before foreign groups are scaled down to their bound.",
            "short",
            ("swarm_trainer_grad_norm", "norm"),
            ("swarm_trainer_grad_norm_local", "local groups"),
            ("swarm_trainer_grad_norm_foreign", "foreign groups"),
            minimum=0,
        ),
        _gauge(
            "Entropy",
            "Entropy per token, in nats. If it falls towards zero while the reward no longer rises, the policy has stopped "
            "exploring.",
            NATS_PER_TOKEN,
            ("swarm_trainer_entropy_nats", "entropy"),
            minimum=0,
        ),
        _gauge(
            "Importance ratio",
            "Probability of the trained tokens under the policy divided by that under the proximal policy. The mean stays near "
            "1; a ratio far above 1 is clipped.",
            "short",
            ("swarm_trainer_importance_ratio", "mean"),
            ("swarm_trainer_importance_ratio_max", "largest"),
            minimum=0,
        ),
        _gauge(
            "Clipped tokens",
            "Share of tokens whose ratio is outside the clip range. 0 with one update per batch and fresh groups.",
            "percentunit",
            ("swarm_trainer_clip_ratio", "clipped"),
            minimum=0,
        ),
        _gauge(
            "Distance between policies",
            "KL per token, in nats. behaviour: between the policy that sampled and the trained policy; it grows with staleness "
            "and with differences between engines. reference: to the base policy; 0 unless trainer.kl_coefficient is set.",
            NATS_PER_TOKEN,
            ("swarm_trainer_kl_behaviour_nats", "behaviour"),
            ("swarm_trainer_kl_reference_nats", "reference"),
        ),
        _gauge("Learning rate", "Learning rate of the last step.", "sci", ("swarm_trainer_learning_rate", "rate"), minimum=0),
        Panel(
            title="Completion length",
            description="Tokens per completion. If the 95th percentile is at generator.max_new_tokens, answers are being cut off.",
            unit="suffix: tokens",
            minimum=0,
            width=6,
            queries=quantiles("swarm_completion_tokens", NODE, "node", ""),
        ),
        Panel(
            title="Completions cut off",
            description="Share of completions cut off at generator.max_new_tokens, most of them before their answer. If it "
            "grows while the reward falls, answers have become longer than the limit.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(
                series(
                    f"sum by (node) (rate(swarm_completions_cut_total{{{NODE}}}[$__rate_interval])) / "
                    f"(sum by (node) (rate(swarm_completion_tokens_count{{{NODE}}}[$__rate_interval])) > 0)",
                    "cut off",
                ),
            ),
        ),
        Panel(
            title="Left out of training",
            description="Per second: groups skipped (by reason), groups without advantage, foreign answers that are too "
            "unlikely under this node's policy (absurd), and steps that changed nothing.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (reason) (rate(swarm_trainer_skipped_groups_total{{{NODE}}}[$__rate_interval]))", "skipped {{reason}}"
                ),
                series(
                    f"sum by (node) (rate(swarm_trainer_zero_advantage_groups_total{{{NODE}}}[$__rate_interval]))", "no advantage"
                ),
                series(f"sum by (node) (rate(swarm_trainer_absurd_answers_total{{{NODE}}}[$__rate_interval]))", "absurd answers"),
                series(f"sum by (node) (rate(swarm_trainer_unchanged_steps_total{{{NODE}}}[$__rate_interval]))", "unchanged steps"),
            ),
        ),
        _gauge(
            "Re-encoded groups",
            "Share of the last step's groups that this node re-encoded from their text, because their "
            "tokens were missing or from another tokenizer.",
            "percentunit",
            ("swarm_trainer_reencoded_ratio", "encoded again"),
            minimum=0,
        ),
        Panel(
            title="Held-out pass rate",
            description="Held-out pass rate of the newest evaluated policy and of the base policy.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(
                series(f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{NODE}}})", "newest"),
                series(f"max by (node) (swarm_held_out_base_pass_ratio{{{NODE}}})", "base"),
            ),
        ),
    ),
)
