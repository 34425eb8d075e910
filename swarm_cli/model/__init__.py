"""`swarm model` and `swarm eval`: bringing models in, what they need, exports, and how well they
answer.
"""
