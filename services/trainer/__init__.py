"""The trainer turns batches of scored groups into policy versions: advantages, objectives,
gradients, checkpoints.

Sampling, scoring and the choice of a batch live in other services; how messages and policies travel
is in `shared`.
"""
