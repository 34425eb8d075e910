"""What is asked of a model when it is loaded: which layers can be trained, how its logits are made,
what adapters reach.
"""
