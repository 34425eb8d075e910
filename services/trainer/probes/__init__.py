"""Tests of a model when it is loaded: which layers can be trained, how its logits are computed,
which weights adapters reach.
"""
