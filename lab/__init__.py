"""Experiments: a spec is run and leaves raw records; tables and plots are made from the records
alone.

Two drivers share the services' own code for tasks, pools, batches, advantages and objectives; no
learning rule lives here.
"""
