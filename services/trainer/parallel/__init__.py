"""The training code's interface to a policy that is sharded over processes (FSDP2).

The learner uses the other processes only through `Parallel`; a single process uses `ALONE`.
`torchrun` contains the code that leads the processes.
"""
