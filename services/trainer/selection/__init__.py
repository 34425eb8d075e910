"""Which tokens of a batch are trained on, with which advantages: budgets, preferences, and a check
against the policy.
"""
