"""From groups of tokens to a gradient: rows, micro-batches, the forward pass, weights of foreign
tokens, the update.

`services.trainer.selection` chooses what is trained on; `services.trainer.objectives` has the
losses.
"""
