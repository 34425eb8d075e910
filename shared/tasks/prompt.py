"""A task's prompt and key: from what a source says, for the sandbox, and for chat templates.

Two tasks of a dataset with the same key are the same task under different references. If one of
them is held out, none is trained on, because the model would be asked what it has practised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from msgspec import Meta

from shared.contracts.limits import MAX_PARTS, MAX_PROMPT_MESSAGES, MAX_TEXT_CHARS
from shared.contracts.messages import Part, PromptMessage, Task, TaskRef, user_prompt
from shared.contracts.wire import PartKind, Role, Sha256

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_PLACES = ("source_dataset", "source_index")
"""Entries of an item's metadata that say where it is from, not what it asks."""


def question_key(question: str) -> str:
    """Equal for questions that differ only in case and spacing."""
    return " ".join(question.split()).casefold()


def text_key(text: str) -> str:
    """The key of a task that its text identifies."""
    return hashlib.sha256(question_key(text).encode("utf-8", "surrogatepass")).hexdigest()


def text_task(ref: TaskRef, question: str, answer: str | None, metadata: str = "{}") -> Task:
    """A task that is one question, which identifies it."""
    return Task(ref=ref, prompt=user_prompt(question), key=text_key(question), answer=answer, metadata=metadata)


def read_prompt(prompt: Any) -> list[PromptMessage]:
    """A prompt as task sources write it: a text, or messages with `role` and `content`, which is a
    text or a list of parts with `type`.

    Raises:
        ValueError: it is neither, or has a part of another kind than text.
    """
    if isinstance(prompt, str):
        return user_prompt(str.__str__(prompt))
    if not isinstance(prompt, list | tuple) or not prompt:
        raise ValueError(f"its prompt is {type(prompt).__name__}: let it be a text or a list of messages")
    return [PromptMessage(role=_role(message), parts=_parts(message)) for message in prompt]


def prompt_text(prompt: list[PromptMessage]) -> str:
    """The prompt as the question of a file's row: a text as it is, and messages each after its
    role, between zero bytes.

    Raises:
        ValueError: a message has zero bytes itself.
    """
    first = prompt[0]
    if len(prompt) == 1 and first.role == "user" and not first.text.startswith("\0"):
        return first.text
    if any("\0" in message.text for message in prompt):
        raise ValueError("has a zero byte: remove it")
    return "".join(f"\0{message.role}\0{message.text}" for message in prompt)


def row_messages(question: str) -> list[tuple[str, str]]:
    """Role and text of each message of a `prompt_text`."""
    _, *parts = question.split("\0") if question.startswith("\0") else ("", "user", question)
    return list(zip(parts[::2], parts[1::2], strict=True))


def row_task(ref: TaskRef, question: str, answer: str) -> Task:
    """The task of a file's row, whose question is a `prompt_text` and identifies it."""
    messages = [{"role": role, "content": text} for role, text in row_messages(question)]
    return Task(ref=ref, prompt=read_prompt(messages), key=text_key(question), answer=answer)


def content_key(task: Task, key: object = None) -> str:
    """The key of a task of an installed package: what the package says (`key` of the item); else
    prompt, answer and metadata together, as a prompt alone may be that of many tasks.
    """
    if key is not None:
        return hashlib.sha256(f"{task.ref.dataset}\x00{key}".encode("utf-8", "surrogatepass")).hexdigest()
    metadata = json.loads(task.metadata)
    if isinstance(metadata, dict):
        metadata = {name: value for name, value in metadata.items() if name not in _PLACES}
    asked = [question_key(task.text), task.answer, metadata]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _role(message: Any) -> Any:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in get_args(Role):
        raise ValueError(f"a message of its prompt has the role {role!r}: let it be {', '.join(get_args(Role))}")
    return role


def _parts(message: Mapping[str, Any]) -> list[Part]:
    content = message.get("content")
    found = [content] if isinstance(content, str) else content
    if not isinstance(found, list | tuple) or not found:
        raise ValueError("a message of its prompt has no content: let that be a text or a list of parts")
    return [Part(text=_part_text(part)) for part in found]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return str.__str__(part)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"its prompt has a part of kind {kind!r}: only text can be asked")
    return str.__str__(part["text"])


# The derived fields between the processes of the sandbox, as lists of texts.


Content = tuple[
    Annotated[
        list[tuple[Role, Annotated[list[tuple[PartKind, Text]], Meta(max_length=MAX_PARTS)]]],
        Meta(max_length=MAX_PROMPT_MESSAGES),
    ],
    Text | None,
    Annotated[str, Meta(max_length=1_048_576)],
    Sha256,
]
"""Prompt, answer, metadata and key."""


def content(task: Task) -> list[Any]:
    """Derived content of a task; equal content packs to the same bytes."""
    prompt = [[message.role, [[part.kind, part.text] for part in message.parts]] for message in task.prompt]
    return [prompt, task.answer, task.metadata, task.key]


def task_of(ref: TaskRef, derived: Content) -> Task:
    """The inverse of `content`. Raises ValueError: the prompt is too long as a whole."""
    messages, answer, metadata, key = derived
    prompt = [PromptMessage(role=role, parts=[Part(kind=kind, text=text) for kind, text in parts]) for role, parts in messages]
    return Task(ref=ref, prompt=prompt, key=key, answer=answer, metadata=metadata)
