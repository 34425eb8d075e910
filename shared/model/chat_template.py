"""Checks that a tokenizer's chat template can render this project's prompts: one user turn,
preceded by a system turn if one is set, up to where the answer starts.

A template is a program by the model's author. Some refuse a system turn and some drop it silently,
some write today's date, and some never end; a trial prompt detects each before anything is sampled.
The trial runs in a process of its own, with limits on time and memory.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import random
import re
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

from shared.runtime.parent_death import end_with_parent
from shared.tasks.sandbox.limits import MappedMemory, limit_data

_QUESTION = "zebra crossing"
_MIXED = "Is 12 + 34 = 567089?\nSay TRUE or `False`."
_SYSTEM = "marmalade jar"
_ANSWER = "teapot lid"
_LONG = "zebra crossing " * 1000
_CPU_S = 2
_WALL_S = 60.0
_MEMORY_BYTES = 256 * 2**20
"""What the trial prompts of a template may take. Real templates take milliseconds and kilobytes."""
_MOST_BYTES = 4096
_FILE = "(chat_template.jinja)"
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
"""How Python writes an object that a template names without using it; each process has another."""
_CLOCK = re.compile(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""")
_DAYS = (0, 1, 8, 40, 150, 400, 4000, 9000)
_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)


class _TemplateFails(Exception):
    """A template raised something; the message has the kind and its first line."""


def takes_system_prompt(tokenizer: Any) -> bool:
    """Whether a system prompt reaches the model; without a template it always does, as plain
    text.
    """
    if not tokenizer.chat_template:
        return True
    try:
        text = _rendered(tokenizer, _turns(system=_SYSTEM))
    except _TemplateFails:
        return False
    return _SYSTEM in text and _QUESTION in text


def template_problem(tokenizer: Any, system_prompt: str = "") -> str:
    """Why questions cannot be asked with this tokenizer's template, with the remedy; empty if they
    can. After that the template may be rendered in this process.
    """
    if not tokenizer.chat_template:
        return ""
    return _confined(lambda: _problem(tokenizer, system_prompt))


def with_fixed_date(template: str) -> str:
    """A template with a constant where it would write today's date."""
    return _CLOCK.sub(lambda found: repr(_DATE.strftime(found[1][1:-1])), template)


def default_system_prompt(tokenizer: Any) -> bool:
    """Whether the template writes a system turn by default if none is given, which changes what
    precedes the question.
    """
    if not tokenizer.chat_template or not takes_system_prompt(tokenizer):
        return False
    without = _rendered(tokenizer, _turns()).partition(_QUESTION)[0]
    given = _rendered(tokenizer, _turns(system=_SYSTEM)).partition(_QUESTION)[0]
    before, _, after = given.partition(_SYSTEM)
    return len(without) > len(before) + len(after)


def ending_token(tokenizer: Any, among: Collection[int] | None = None) -> int | None:
    """The first control token that the template writes after an answer, or the first of `among`;
    None without a template or such a token.

    A tokenizer may declare another end token: Gemma's is `<eos>`, while its turns, and so its
    answers, end with `<end_of_turn>`.
    """
    if not tokenizer.chat_template:
        return None
    try:
        after = _rendered(tokenizer, _turns(answer=_ANSWER), opened=False).rpartition(_ANSWER)[2]
    except _TemplateFails:
        return None
    if among is None:
        added = tokenizer.added_tokens_decoder.items()
        among = {number for number, token in added if token.special} | set(tokenizer.all_special_ids)
    return next((token for token in tokenizer(after, add_special_tokens=False)["input_ids"] if token in among), None)


def _problem(tokenizer: Any, system_prompt: str) -> str:
    # First what takes too much, then what is wrong, the gravest first.
    _render_all(tokenizer)
    system = _SYSTEM if system_prompt and takes_system_prompt(tokenizer) else ""
    try:
        text, *later = (_rendered(tokenizer, _turns(system=system), days=days) for days in _DAYS)
        mixed = _rendered(tokenizer, _turns(system=system, question=_MIXED))
    except _TemplateFails as error:
        return (
            f"its chat template cannot write a question ({error}): correct the template {_FILE}, or remove it, so that questions "
            "are plain text"
        )
    if _QUESTION not in text:
        return f"its chat template leaves the question out: correct it {_FILE}, or remove it, so that questions are plain text"
    if _MIXED not in mixed:
        return (
            f"its chat template changes the question, such as its digits, capitals or line breaks: correct it {_FILE}, or remove "
            "it, so that questions are plain text"
        )
    if found := _ADDRESS.search(text):
        return (
            f"its chat template writes an object of Python{found[0]}, so that every process would write another prompt: correct "
            f"the expression that names a function, or a filter without `| list` or `| join`, in the template {_FILE}"
        )
    if any(each != text for each in later):
        return (
            "its chat template writes the date or something random, so that a question would have another prompt tomorrow and on "
            f"other nodes: write a fixed text in its place {_FILE}; `swarm model import` does that with a date"
        )
    if system_prompt and not system:
        return (
            "its chat template has no place for a system prompt, so that model.system_prompt would never reach the model: leave "
            f"model.system_prompt empty, or change the template {_FILE}"
        )
    if opening := _left_out_opening(tokenizer, text, system):
        return (
            f"its chat template ignores add_generation_prompt and so leaves out what opens an answer ({opening[:60]!r}), which the "
            f"model would have to write itself: add it at the end of the template {_FILE}, inside "
            "{% if add_generation_prompt %}...{% endif %}"
        )
    return ""


def _render_all(tokenizer: Any) -> None:
    """Render every kind of conversation that any process will, and a long question, so that what
    takes too much takes it here.
    """
    kinds = itertools.product(("", _SYSTEM), ("", _ANSWER), (True, False), (_QUESTION, _LONG))
    for system, answer, opened, question in kinds:
        # Which of them must succeed is decided elsewhere.
        with contextlib.suppress(_TemplateFails):
            _rendered(tokenizer, _turns(system=system, answer=answer, question=question), opened=opened)


def _left_out_opening(tokenizer: Any, text: str, system: str) -> str:
    """What the template writes between a question and its answer and does not write when it asks
    for an answer. Templates in which an answer follows the question's end directly need nothing.
    """
    try:
        if text != _rendered(tokenizer, _turns(system=system), opened=False):
            return ""
        before, found, _ = _rendered(tokenizer, _turns(system=system, answer=_ANSWER), opened=False).partition(_ANSWER)
    except _TemplateFails:  # one that takes no answer cannot be compared
        return ""
    return before[len(text) :].strip() if found and before.startswith(text) else ""


def _turns(*, system: str = "", answer: str = "", question: str = _QUESTION) -> list[dict[str, str]]:
    turns = [("system", system), ("user", question), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in turns if content]


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, opened: bool = True, days: int = 0) -> str:
    """days: after `_DATE`, for the clock and as the seed of anything random."""

    def strftime_now(form: str) -> str:
        return (_DATE + datetime.timedelta(days=days, seconds=days)).strftime(form)

    state = random.getstate()
    random.seed(days)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False, strftime_now=strftime_now))
    except MemoryError:
        raise
    except Exception as error:
        raise _TemplateFails(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from None
    finally:
        random.setstate(state)


def _confined(work: Callable[[], str]) -> str:
    """What `work` returns, from a fork of this process that may take `_CPU_S` of processor time and
    `_MEMORY_BYTES`; else what it took too much of.
    """
    # The child renders text and nothing else: it needs no lock that another thread may hold.
    memory, parent = MappedMemory().data_bytes(), os.getpid()
    reads, writes = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        try:
            end_with_parent(signal.SIGKILL, parent)
            if memory is not None:
                limit_data(memory + _MEMORY_BYTES)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
            try:
                said = work()
            except MemoryError:
                said = _too_much(f"{_MEMORY_BYTES // 2**20} MiB of memory")
            os.write(writes, json.dumps(said).encode()[:_MOST_BYTES])
        finally:
            os._exit(0)
    os.close(writes)
    try:
        content = _until_closed(reads, time.monotonic() + _WALL_S)
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return str(json.loads(content)) if content else _too_much(f"{_CPU_S} s of processor time")


def _until_closed(reads: int, deadline: float) -> bytes:
    content = b""
    while select.select([reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (part := os.read(reads, _MOST_BYTES)):
            return content
        content += part
    return b""


def _too_much(what: str) -> str:
    return f"its chat template takes more than {what} to write a question: correct the template {_FILE}, or use another model"
