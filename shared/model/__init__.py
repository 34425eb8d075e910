"""The code for language models that trainer, engines and commands share: reading them, their
weights, tokenizers and prompts.

The only part of `shared` that may import torch and transformers.
"""
