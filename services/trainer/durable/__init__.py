"""Everything that outlives the trainer: checkpoints, published policies, exports, and the batch log
that it reads.
"""
