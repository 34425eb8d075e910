"""Chooses which tokens of a batch are trained on, and with which advantages: budgets, preferences,
and a check against the policy.
"""
