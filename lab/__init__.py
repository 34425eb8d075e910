"""Simulates experiments: a run of a spec leaves raw records, and tables and plots are made from
these records alone. Experiments with real processes are `swarm experiment sharing`.

A simulation uses the services' own code for tasks, pools, batches, advantages and objectives. No
learning rule is implemented here.
"""
