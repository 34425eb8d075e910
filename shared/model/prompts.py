"""Text to token ids, the same way for every service: how a question is asked and how an answer is read back."""

from __future__ import annotations

from typing import Any


def render_prompt(tokenizer: Any, question: str, system_prompt: str = "") -> list[int]:
    """Token ids of a question up to where the answer starts.

    With a chat template: an optional system turn, one user turn and the assistant's opening. A base model without one gets
    the system prompt, the question and a line break.
    """
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": question})
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(token) for token in encoded]
    text = f"{system_prompt}\n\n{question}\n" if system_prompt else f"{question}\n"
    return [int(token) for token in tokenizer(text)["input_ids"]]


def encode_answer(tokenizer: Any, text: str, *, ended: bool, end_token_id: int | None) -> list[int]:
    """Token ids of an answer that another tokenizer sampled; the end token stands last when its author ended it."""
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    return [*ids, end_token_id] if ended and end_token_id is not None else ids
