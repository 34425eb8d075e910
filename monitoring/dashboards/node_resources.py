"""The row of dashboard "Node" about machines, connections and checkpoints."""

from __future__ import annotations

from monitoring.panels import Panel, Row, Threshold, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"

RESOURCES = Row(
    title="Machine, connections, checkpoints",
    panels=(
        Panel(
            title="Trainer's GPU memory",
            description="GPU memory of the trainer: allocated to tensors, reserved from the driver, and peak. All 0 on a CPU.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(series(f"max by (kind) (swarm_trainer_gpu_memory_bytes{{{NODE}}})", "{{kind}}"),),
        ),
        Panel(
            title="Memory by process",
            description="Resident memory, without scorer processes.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(series(f"process_resident_memory_bytes{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="CPU by process",
            description="Cores in use, without scorer processes.",
            unit="suffix: cores",
            minimum=0,
            width=6,
            queries=(series(f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval])", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="Uptime",
            description="Time since each process started. A line that keeps dropping to zero is a process that crashes and "
            "restarts.",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"time() - process_start_time_seconds{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="NATS connection",
            description="1 while connected, by role and plane.",
            unit="short",
            minimum=0,
            maximum=1,
            decimals=0,
            width=6,
            queries=(series(f"min by (role, plane) (swarm_nats_connected{{{NODE}}})", "{{role}} {{plane}}"),),
        ),
        Panel(
            title="NATS reconnects and errors",
            description="Reconnects and errors per second, by role and plane.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (role, plane) (rate(swarm_nats_reconnects_total{{{NODE}}}[$__rate_interval]))",
                    "reconnects {{role}} {{plane}}",
                ),
                series(
                    f"sum by (role, plane, kind) (rate(swarm_nats_errors_total{{{NODE}}}[$__rate_interval]))",
                    "{{kind}} {{role}} {{plane}}",
                ),
            ),
        ),
        Panel(
            title="Clock skew",
            description="Seconds by which each process's clock is ahead of its NATS server's; below zero it is behind. Alert "
            "SwarmClockSkewed fires at 20 seconds. Other nodes refuse groups from a node with a wrong clock.",
            unit="s",
            width=6,
            queries=(series(f"swarm_clock_skew_seconds{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="Certificate time left",
            description="Time until the certificate of each plane's server expires, as seen when the connection was made: a "
            "renewed certificate shows only after a reconnect. No value without TLS.",
            unit="s",
            width=6,
            thresholds=(Threshold(value=7 * 86_400, color="green"),),
            queries=(series(f"min by (plane) (swarm_certificate_expiry_timestamp_seconds{{{NODE}}}) - time()", "{{plane}}"),),
        ),
        Panel(
            title="Steps since the checkpoint",
            description="Steps that the trainer would repeat if it were killed now. Normally between 0 and "
            "trainer.checkpoint_every.",
            unit="suffix: steps",
            minimum=0,
            width=6,
            queries=(
                series(
                    f'max by (node) (swarm_policy_version{{{NODE}, role="trainer"}}) - '
                    f"max by (node) (swarm_trainer_checkpoint_step{{{NODE}}})",
                    "steps",
                ),
            ),
        ),
        Panel(
            title="Failed writes",
            description="Failed writes of checkpoints, policies and records, which are retried, and checkpoints found corrupt "
            "at start.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(
                series(f"sum by (kind) (increase(swarm_trainer_write_failures_total{{{NODE}}}[$__rate_interval]))", "{{kind}}"),
                series(f"sum by (node) (swarm_trainer_corrupt_checkpoints_total{{{NODE}}})", "broken checkpoints"),
            ),
        ),
    ),
)
