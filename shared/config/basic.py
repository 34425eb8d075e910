"""The basic settings, which most users set. The defaults of all others suit almost everyone."""

from __future__ import annotations

BASIC = frozenset(
    {
        *("node.id", "node.seed", "node.var_dir"),
        *("nats.node_url", "nats.swarm_url", "nats.swarm_id"),
        *("model.path", "model.revision", "model.device", "model.system_prompt"),
        *("generator.engine", "generator.completions", "generator.max_new_tokens"),
        *("eval.tasks", "eval.every_versions"),
        *("verifier.share", "verifier.trust"),
        *("sampler.local", "sampler.external", "sampler.strategy"),
        *("trainer.objective", "trainer.learning_rate", "trainer.token_budget", "trainer.max_steps", "trainer.lora.rank"),
        *("http.base_port",),
    }
)
"""As `section.key`. `swarm config show` prints these and every setting that differs from its
default; with `--all` it prints everything.
"""
