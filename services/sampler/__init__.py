"""The sampler: keeps the pools of local and external scored groups and builds each batch of I + J
that the trainer asks for.

What to choose and when is decided in `pool`, `strategies`, `memory` and `assembly` over plain
values; `service` wires them to the node plane. Nothing here scores, trains or looks at the swarm
plane.
"""
