"""Several processes that train one policy, started by torchrun. Every process runs the same
`Learner` on the same batch.

Rank 0 is the service (`lead`) and sends commands to the other ranks (`channel`, `follow`).
"""
