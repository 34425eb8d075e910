"""The row of dashboard "Node" about the trainer's update: is the policy changing, and in a healthy
way?
"""

from __future__ import annotations

from monitoring.panels import Panel, Row, quantiles, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"
NATS_PER_TOKEN = "suffix: nats"


def _gauge(title: str, description: str, unit: str, *metrics: tuple[str, str], minimum: float | None = None) -> Panel:
    """Gauges of the last step, each `(metric, legend)`."""
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
            description="Mean reward of the last step's groups, own and others' apart.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(series(f"max by (origin) (swarm_trainer_reward{{{NODE}}})", "{{origin}}"),),
        ),
        _gauge(
            "Loss",
            "Of the last step. Policy-gradient losses hover near zero and do not fall; look at the reward.",
            "short",
            ("swarm_trainer_loss", "loss"),
        ),
        _gauge(
            "Gradient norm",
            "Of the last step, before clipping (trainer.grad_clip). Spikes that last: lower the learning rate. The local and the "
            "foreign part are before foreign groups are held to their bound.",
            "short",
            ("swarm_trainer_grad_norm", "norm"),
            ("swarm_trainer_grad_norm_local", "local groups"),
            ("swarm_trainer_grad_norm_foreign", "foreign groups"),
            minimum=0,
        ),
        _gauge(
            "Entropy",
            "Per token, in nats. A fall towards zero with a reward that stands still is a policy that has stopped to explore.",
            NATS_PER_TOKEN,
            ("swarm_trainer_entropy_nats", "entropy"),
            minimum=0,
        ),
        _gauge(
            "Importance ratio",
            "Policy to proximal probability of the trained tokens. The mean stays near 1; a maximum far above is clipped.",
            "short",
            ("swarm_trainer_importance_ratio", "mean"),
            ("swarm_trainer_importance_ratio_max", "largest"),
            minimum=0,
        ),
        _gauge(
            "Clipped tokens",
            "Share of tokens whose ratio left the clip range. 0 with one update a batch and fresh groups.",
            "percentunit",
            ("swarm_trainer_clip_ratio", "clipped"),
            minimum=0,
        ),
        _gauge(
            "Distance between policies",
            "KL per token, in nats: behaviour (the sampler's against the trained policy; grows with staleness and with differences "
            "between engines), reference (to the base policy; 0 unless trainer.kl_coefficient is set).",
            NATS_PER_TOKEN,
            ("swarm_trainer_kl_behaviour_nats", "behaviour"),
            ("swarm_trainer_kl_reference_nats", "reference"),
        ),
        _gauge("Learning rate", "Of the last step.", "sci", ("swarm_trainer_learning_rate", "rate"), minimum=0),
        Panel(
            title="Completion length",
            description="Tokens per completion. A 95th percentile at generator.max_new_tokens means answers are cut off.",
            unit="suffix: tokens",
            minimum=0,
            width=6,
            queries=quantiles("swarm_completion_tokens", NODE, "node", ""),
        ),
        Panel(
            title="Completions cut off",
            description="Share of completions that generator.max_new_tokens cut off, most of them before their answer. A share "
            "that grows while the reward falls: answers get longer than there is room for.",
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
            description="Per second: groups skipped by reason, groups without advantage, foreign answers that this node's policy "
            "finds absurd, steps that "
            "changed nothing.",
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
            "Encoded again",
            "Share of the last step's groups whose text this node had to encode with its own tokenizer, because they came from "
            "another.",
            "percentunit",
            ("swarm_trainer_reencoded_ratio", "encoded again"),
            minimum=0,
        ),
        Panel(
            title="Held-out pass rate",
            description="Of the newest evaluated policy, beside that of the base policy.",
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
