"""What trainer, engines and commands know of a language model: reading it, its weights, its
tokenizer, its prompts.

The only part of `shared` that may import torch and transformers.
"""
