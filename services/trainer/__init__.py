"""The trainer turns batches of scored groups into policy versions: advantages, objectives,
gradients, checkpoints.

Other services sample, score and choose batches; `shared` transports messages and policies.
"""
