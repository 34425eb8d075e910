"""Runs experiments: a run of a spec leaves raw records, and tables and plots are made from these
records alone.

Two drivers use the services' own code for tasks, pools, batches, advantages and objectives. No
learning rule is implemented here.
"""
