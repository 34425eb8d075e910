"""Experiments: specs in, raw records out, tables and plots made from the records alone.

Two drivers share the services' own code for tasks, pools, batches, advantages and objectives; no
learning rule lives here.
"""
