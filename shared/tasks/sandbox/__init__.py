"""Deriving and scoring in worker processes that hold nothing worth stealing and are killed when
they hang.

`pool.ScorerPool` is the parent's side: `processes` starts and ends what runs, `local` shares local
jobs out among workers. `waiting` keeps the jobs that no worker has yet, `worker_queue` those of one
worker, `child` its process; `worker` is what runs there. Foreign groups have a `foreign` lane with
processes of its own: a `forker`, which forks a process for each group (`forked`). All have an empty
environment, no credentials and limits (`confine`: files, system calls, network, user), and talk
MessagePack frames over their standard input and output.
"""

from shared.tasks.sandbox.foreign import CROWDED_OUT, DROPPED
from shared.tasks.sandbox.jobs import JobResult, ScoringJob
from shared.tasks.sandbox.pool import ScorerPool
from shared.tasks.sandbox.processes import SandboxError

__all__ = ["CROWDED_OUT", "DROPPED", "JobResult", "SandboxError", "ScorerPool", "ScoringJob"]
