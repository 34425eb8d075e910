"""Deriving and scoring in worker processes that hold nothing worth stealing and are killed when
they hang.

`pool.ScorerPool` is the parent's side, `worker_queue` keeps one worker's jobs, `child` its process;
`worker` is what runs there. Foreign groups have a `foreign` lane with processes of its own: a
`forker`, which forks a process for each group (`forked`). All have an empty environment, no
credentials and limits (`confine`: files, system calls, network, user), and talk MessagePack frames
over their standard input and output.
"""

from shared.tasks.sandbox.foreign import CROWDED_OUT, DROPPED
from shared.tasks.sandbox.jobs import JobResult, ScoringJob
from shared.tasks.sandbox.pool import SandboxError, ScorerPool

__all__ = ["CROWDED_OUT", "DROPPED", "JobResult", "SandboxError", "ScorerPool", "ScoringJob"]
