"""The row of dashboard "Node" about what the processes use and what they write down."""

from __future__ import annotations

from monitoring.panels import Panel, Row, Threshold, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"

RESOURCES = Row(
    title="Machine, connections, checkpoints",
    panels=(
        Panel(
            title="Trainer's GPU memory",
            description="Of the trainer's device: allocated to tensors, reserved from the driver, and the peak. All 0 on a CPU.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(series(f"max by (kind) (swarm_trainer_gpu_memory_bytes{{{NODE}}})", "{{kind}}"),),
        ),
        Panel(
            title="Memory by process",
            description="Resident memory; scorer processes are not in it.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(series(f"process_resident_memory_bytes{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="CPU by process",
            description="Cores in use; scorer processes are not in it.",
            unit="suffix: cores",
            minimum=0,
            width=6,
            queries=(series(f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval])", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="Running since",
            description="Age of each process. A line that drops to zero again and again is a process that crashes and is started "
            "again.",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"time() - process_start_time_seconds{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="NATS connection",
            description="1 while connected, by process and plane.",
            unit="short",
            minimum=0,
            maximum=1,
            decimals=0,
            width=6,
            queries=(series(f"min by (role, plane) (swarm_nats_connected{{{NODE}}})", "{{role}} {{plane}}"),),
        ),
        Panel(
            title="NATS reconnects and errors",
            description="Per second, by process and plane.",
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
            title="Clock ahead of the server's",
            description="By process, against its NATS server; below zero: behind. Alert SwarmClockSkewed looks for 20 seconds. "
            "Others refuse groups whose sender's clock is far off.",
            unit="s",
            width=6,
            queries=(series(f"swarm_clock_skew_seconds{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="Certificate lasts",
            description="Until the certificate of each plane's server runs out, as it was shown when the connection was made: "
            "a renewed one counts from the next connection on. No value without TLS.",
            unit="s",
            width=6,
            thresholds=(Threshold(value=7 * 86_400, color="green"),),
            queries=(series(f"min by (plane) (swarm_certificate_expiry_timestamp_seconds{{{NODE}}}) - time()", "{{plane}}"),),
        ),
        Panel(
            title="Steps since the checkpoint",
            description="Steps that a trainer killed now would train again. It swings between 0 and trainer.checkpoint_every.",
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
            description="Writes of checkpoints, policies and records that failed and are tried again, and checkpoints found "
            "broken at start.",
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
