"""Deriving and scoring in worker processes that hold nothing worth stealing and are killed when
they hang.

`pool.ScorerPool` is the parent's side and distributes local jobs among workers; `jobs` has what is
known of a job in progress, `child` a worker's process, and `worker` the code that runs there.
Foreign groups have a `foreign` lane with separate processes: a `forker`, which forks a process for
each group. All processes have an empty environment, no credentials, and limits (`confinement`:
files, system calls, network, user). They exchange MessagePack frames (`protocol`) over standard
input and output.

The names below are imported on first use: a process that needs only the limits loads no pool.
"""

from typing import TYPE_CHECKING

from shared.importing import on_first_use

if TYPE_CHECKING:
    from shared.tasks.sandbox.child import SandboxError
    from shared.tasks.sandbox.foreign import CROWDED_OUT, DROPPED
    from shared.tasks.sandbox.jobs import JobResult, ScoringJob
    from shared.tasks.sandbox.pool import ScorerPool

__all__ = ["CROWDED_OUT", "DROPPED", "JobResult", "SandboxError", "ScorerPool", "ScoringJob"]

_HOMES = {
    **dict.fromkeys(("CROWDED_OUT", "DROPPED"), "foreign"),
    **dict.fromkeys(("JobResult", "ScoringJob"), "jobs"),
    "ScorerPool": "pool",
    "SandboxError": "child",
}


__getattr__ = on_first_use(__name__, _HOMES)
