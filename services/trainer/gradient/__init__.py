"""From groups of tokens to a gradient: rows, micro-batches, the forward pass, weights of foreign
tokens, the update.

What is trained on was chosen in `services.trainer.selection`; losses are in
`services.trainer.objectives`.
"""
