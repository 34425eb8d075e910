"""Every causal language model that transformers can build small, held against a plain forward pass
of one sequence at a time.
"""
