"""Deriving and scoring in worker processes that hold nothing worth stealing and are killed when they hang.

`pool.ScorerPool` is the parent's side, `worker` the child's. A worker has an empty environment, no credentials and resource limits;
it talks MessagePack frames over its standard input and output.
"""

from shared.tasks.sandbox.pool import JobResult, SandboxError, ScorerPool, ScoringJob

__all__ = ["JobResult", "SandboxError", "ScorerPool", "ScoringJob"]
