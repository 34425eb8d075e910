"""Several processes that train one policy, started by torchrun. Every process runs the same
`Learner` on the same batch.

Rank 0 is the service (`lead`) and tells the others what to do (`channel`, `follow`).
"""
