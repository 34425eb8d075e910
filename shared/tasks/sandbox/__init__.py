"""Deriving and scoring in worker processes that hold nothing worth stealing and are killed when they hang.

`pool.ScorerPool` is the parent's side, `crew` keeps one worker's jobs, `child` its process; `worker` is what runs there. A worker
has an empty environment, no credentials and resource limits; it talks MessagePack frames over its standard input and output.
"""

from shared.tasks.sandbox.jobs import JobResult, ScoringJob
from shared.tasks.sandbox.pool import SandboxError, ScorerPool

__all__ = ["JobResult", "SandboxError", "ScorerPool", "ScoringJob"]
