"""What a policy sharded over processes (FSDP2) requires of the training code.

`Parallel` is all that the learner knows of the other processes; a single process uses `ALONE`.
`torchrun` has the code that leads them.
"""
