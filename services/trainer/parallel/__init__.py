"""Several processes that train one policy together, each holding a part of it (FSDP2), started by torchrun.

Every process runs the same `Learner` on the same batch; `Parallel` is all that the learner knows of the others. Process 0 is the
service (`lead`) and tells the others what to do (`channel`, `follow`). A process on its own needs `Alone` and nothing else here.
"""
