"""What outlives the trainer: checkpoints, published policies, exports, and the log of batches that
it reads.
"""
