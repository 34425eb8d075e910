"""Converts between text and token ids, the same way for every service: renders a question as a
prompt, encodes and decodes answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.model.chat_template import TemplateError, rendered
from shared.model.quiet_reading import ModelLoadError


class PromptError(ModelLoadError):
    """The chat template cannot write one question. Others may be asked."""


def render_prompt(tokenizer: Any, question: str, system_prompt: str = "") -> list[int]:
    """Token ids of a question up to where the answer starts.

    With a chat template: an optional system turn, one user turn and the assistant's opening. A base
    model without one gets the system prompt, the question and a line break, after the tokens with
    which its tokenizer begins a text.

    Raises:
        PromptError: the chat template cannot write this question as it is.
    """
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        try:
            text = rendered(tokenizer, [*messages, {"role": "user", "content": question}])
        except TemplateError as error:
            raise PromptError(
                f"the model's chat template cannot write the question {question[:60]!r} ({error}): correct the template "
                "(chat_template.jinja), or remove it, so that questions are plain text"
            ) from None
        if question.strip() not in text:
            raise PromptError(
                f"the model's chat template changes or leaves out the question {question[:60]!r}, so that the model would be asked "
                "something else: correct the template (chat_template.jinja), or remove it, so that questions are plain text"
            )
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    text = f"{system_prompt}\n\n{question}\n" if system_prompt else f"{question}\n"
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    # Some tokenizers also append an end token, after which nothing would be left to answer.
    control = set(tokenizer.all_special_ids)
    while ids and ids[-1] in control:
        ids.pop()
    return ids


def encode_answer(tokenizer: Any, text: str, *, ended: bool, end_token_id: int | None) -> list[int]:
    """Token ids of an answer that was sampled with another tokenizer, followed by the end token if
    its author ended it.

    The text is plain: the characters `<|im_end|>` in it become the tokens of these characters,
    never the control token.
    """
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]]
    return [*ids, end_token_id] if ended and end_token_id is not None else ids


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text that is scored and shared for sampled tokens: without control tokens, with spaces
    unchanged.
    """
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
