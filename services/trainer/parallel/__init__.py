"""What a policy that is spread over processes (FSDP2) asks of the code that trains it.

`Parallel` is all that the learner knows of the other processes; one on its own has `ALONE`. How
they are led is in `torchrun`.
"""
