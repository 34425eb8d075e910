"""Checks that a tokenizer's chat template can render this project's prompts: one user turn,
preceded by a system turn if one is set.

A template is a program by the model's author. Some refuse a system turn and some drop it silently;
a trial prompt detects either before anything is sampled.
"""

from __future__ import annotations

from typing import Any

_QUESTION = "zebra crossing"
_SYSTEM = "marmalade jar"


def takes_system_prompt(tokenizer: Any) -> bool:
    """Whether a system prompt reaches the model; without a template it always does, as plain
    text.
    """
    if not tokenizer.chat_template:
        return True
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}]
    try:
        text = _rendered(tokenizer, messages)
    except Exception:  # noqa: BLE001 (a template fails in its own way)
        return False
    return _SYSTEM in text and _QUESTION in text


def template_problem(tokenizer: Any, system_prompt: str = "") -> str:
    """Why questions cannot be asked with this tokenizer's template, with the remedy; empty if they
    can.
    """
    if not tokenizer.chat_template:
        return ""
    try:
        text = _rendered(tokenizer, [{"role": "user", "content": _QUESTION}])
    except Exception as error:  # noqa: BLE001 (a template fails in its own way)
        cause = (str(error).splitlines() or [""])[0][:200]
        return (
            f"its chat template cannot write a question ({type(error).__name__}: {cause}): correct the template "
            "(chat_template.jinja), or remove it, so that questions are plain text"
        )
    if _QUESTION not in text:
        return (
            "its chat template leaves the question out: correct the template (chat_template.jinja), or remove it, so that "
            "questions are plain text"
        )
    if system_prompt and not takes_system_prompt(tokenizer):
        return (
            "its chat template has no place for a system prompt, so that model.system_prompt would never reach the model: leave "
            "model.system_prompt empty, or change the template (chat_template.jinja)"
        )
    return ""


def default_system_prompt(tokenizer: Any) -> bool:
    """Whether the template writes a system turn by default if none is given, which changes what
    precedes the question.
    """
    if not tokenizer.chat_template or not takes_system_prompt(tokenizer):
        return False
    question = {"role": "user", "content": _QUESTION}
    without = _rendered(tokenizer, [question]).partition(_QUESTION)[0]
    given = _rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, question]).partition(_QUESTION)[0]
    before, _, after = given.partition(_SYSTEM)
    return len(without) > len(before) + len(after)


def ending_token(tokenizer: Any) -> int | None:
    """The first control token that the template writes after an answer; None without a template or
    such a token.

    Unlike `shared.model.prompts.turn_end` this accepts any control token, even one that is not
    declared as an end token.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _SYSTEM}]
    try:
        after = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(_SYSTEM)[2]
    except Exception:  # noqa: BLE001 (a template fails in its own way)
        return None
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    return next((token for token in tokenizer(after, add_special_tokens=False)["input_ids"] if token in control), None)


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
