"""The sampler: keeps the pools of local and foreign scored groups and builds each batch of I + J
groups for the trainer.

`pool`, `strategies`, `memory` and `assembly` decide over plain values what to choose and when;
`service` connects them to the node plane. Nothing here scores, trains or uses the swarm plane.
"""
