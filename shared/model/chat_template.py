"""Renders a tokenizer's chat template, and checks that it can write this project's prompts: one
user turn, preceded by a system turn if one is set, up to where the answer starts.

A template is a program by the model's author. Some refuse a system turn and some drop it silently,
some write today's date, and some never end; a trial prompt detects each before anything is sampled.
A template may also never end on certain questions, so it only ever runs in a process of its own,
with limits on time, memory and what it writes.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import os
import random
import re
import resource
import signal
import threading
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from shared.runtime.process_limits import MappedMemory, limit_data

_QUESTION = "zebra crossing"
_MIXED = "Is 12 + 34 = 567089?\n\nSay TRUE or `False`:  x < 3 & y > 'a' - \"b\" * 4 / \\frac{1}{2} + [5] caf\u00e9."
_LINE = " ".join(f"apple {number} and pear {number + 7}," for number in range(60))
"""A line of about 1,500 characters."""
_SYSTEM = "marmalade jar"
_ANSWER = "teapot lid"
_LONG = "zebra crossing " * 1000
_CPU_S = 2
_WALL_S = 60.0
_MEMORY_BYTES = 256 * 2**20
_MOST_WRITTEN = 2**20
"""What one prompt may take: processor time, time, memory, and characters beside eight times those
of its turns. Real templates take milliseconds and kilobytes.
"""
_TOO_LONG = f"takes more than {_CPU_S} s of processor time"
_TIMERS = {signal.ITIMER_PROF: _CPU_S, signal.ITIMER_VIRTUAL: 2 * _CPU_S, signal.ITIMER_REAL: _WALL_S}
_LIMIT_SIGNALS: dict[int, str] = {signal.SIGVTALRM: _TOO_LONG, signal.SIGALRM: f"takes more than {_WALL_S:g} s"}
_OUT_OF_MEMORY = 3
_MOST_RENDERERS = 4
_MOST_REFUSED = 1000
_FILE = "(chat_template.jinja)"
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
"""How Python writes an object that a template names without using it; each process has another."""
_CLOCK = re.compile(r"""strftime_now\(\s*("[^"]*"|'[^']*')\s*\)""")
_DAYS = (0, 1, 8, 40, 150, 400, 4000, 9000)
_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

Turn = dict[str, str]
"""`role` and `content`."""


class TemplateError(Exception):
    """A template cannot write a conversation; the message has the kind and the first line of what
    it raised.
    """


class TemplateLimitError(TemplateError):
    """A template takes too much to write a conversation; the message says of what."""


def takes_system_prompt(tokenizer: Any) -> bool:
    """Check whether a system prompt reaches the model; without a template it always does, as plain
    text.
    """
    if not tokenizer.chat_template:
        return True
    try:
        text = rendered(tokenizer, _turns(system=_SYSTEM))
    except TemplateError:
        return False
    return _SYSTEM in text and _QUESTION in text


def template_problem(tokenizer: Any, system_prompt: str = "", ends: Collection[int] = ()) -> str:
    """Why questions cannot be asked with this tokenizer's template, with the remedy; empty if they
    can. ends: tokens that end an answer, beside the tokenizer's and the template's own.
    """
    if not tokenizer.chat_template:
        return ""
    try:
        return _problem(tokenizer, system_prompt, ends)
    except TemplateLimitError as error:
        return f"its chat template {error} to write a question: correct the template {_FILE}, or use another model"


def with_fixed_date(template: str) -> str:
    """A template with a constant where it would write today's date."""
    return _CLOCK.sub(lambda found: repr(_DATE.strftime(found[1][1:-1])), template)


def default_system_prompt(tokenizer: Any) -> bool:
    """Check whether the template writes a system turn by default if none is given, which changes
    what precedes the question.
    """
    if not tokenizer.chat_template or not takes_system_prompt(tokenizer):
        return False
    without = rendered(tokenizer, _turns()).partition(_QUESTION)[0]
    given = rendered(tokenizer, _turns(system=_SYSTEM)).partition(_QUESTION)[0]
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
        after = rendered(tokenizer, _turns(answer=_ANSWER), opened=False).rpartition(_ANSWER)[2]
    except TemplateError:
        return None
    if among is None:
        added = tokenizer.added_tokens_decoder.items()
        among = {number for number, token in added if token.special} | set(tokenizer.all_special_ids)
    return next((token for token in tokenizer(after, add_special_tokens=False)["input_ids"] if token in among), None)


def _problem(tokenizer: Any, system_prompt: str, ends: Collection[int]) -> str:
    # First what takes too much, then what is wrong, the gravest first.
    _render_all(tokenizer)
    system = _SYSTEM if system_prompt and takes_system_prompt(tokenizer) else ""
    try:
        text, *later = (rendered(tokenizer, _turns(system=system), days=days) for days in _DAYS)
        others = {each: rendered(tokenizer, _turns(system=system, question=each)) for each in (_MIXED, _LINE[:250].strip(), _LINE)}
    except TemplateLimitError:
        raise
    except TemplateError as error:
        return (
            f"its chat template cannot write a question ({error}): correct the template {_FILE}, or remove it, so that questions "
            "are plain text"
        )
    if _QUESTION not in text:
        return f"its chat template leaves the question out: correct it {_FILE}, or remove it, so that questions are plain text"
    if any(question not in written for question, written in others.items()):
        return (
            "its chat template changes the question, such as its digits, capitals, signs or line breaks, or a long one: correct it "
            f"{_FILE}, or remove it, so that questions are plain text"
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
    if end := _ends_prompt(tokenizer, text, system, {*ends, tokenizer.eos_token_id, ending_token(tokenizer)}):
        return (
            f"its chat template ends the prompt with {end!r}, which ends an answer, so that the model would be asked to go on "
            f"after its answer: write what opens an answer there {_FILE}, inside {{% if add_generation_prompt %}}...{{% endif %}}"
        )
    return ""


def _ends_prompt(tokenizer: Any, text: str, system: str, ends: Collection[int | None]) -> str:
    """The end token that a prompt ends with; empty if it ends with none, or answers follow it there
    in conversations too, as with DialoGPT's `<|endoftext|>` and Phi-3's `<|assistant|>`.
    """
    *_, last = tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"] or [None]
    if last is None or last not in ends:
        return ""
    try:
        answered = rendered(tokenizer, _turns(system=system, answer=_ANSWER), opened=False)
    except TemplateError:
        answered = ""
    return "" if answered.startswith(text) else str(tokenizer.decode([last]))


def _render_all(tokenizer: Any) -> None:
    """Render every kind of conversation that any process will, and a long question, so that what
    takes too much takes it here.
    """
    kinds = itertools.product(("", _SYSTEM), ("", _ANSWER), (True, False), (_QUESTION, _LONG))
    for system, answer, opened, question in kinds:
        try:
            rendered(tokenizer, _turns(system=system, answer=answer, question=question), opened=opened)
        except TemplateLimitError:
            raise
        except TemplateError:  # which of them must succeed is decided elsewhere
            continue


def _left_out_opening(tokenizer: Any, text: str, system: str) -> str:
    """Find what the template writes between a question and its answer and does not write when it
    asks for an answer. Templates in which an answer follows the question's end directly need
    nothing.
    """
    try:
        if text != rendered(tokenizer, _turns(system=system), opened=False):
            return ""
        before, found, _ = rendered(tokenizer, _turns(system=system, answer=_ANSWER), opened=False).partition(_ANSWER)
    except TemplateError:  # one that takes no answer cannot be compared
        return ""
    return before[len(text) :].strip() if found and before.startswith(text) else ""


def _turns(*, system: str = "", answer: str = "", question: str = _QUESTION) -> list[Turn]:
    said = [("system", system), ("user", question), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in said if content]


def takes_tools(tokenizer: Any) -> bool:
    """Check whether the template has a place for the tools that a model may call."""
    if not tokenizer.chat_template:
        return False
    tool = {"name": "kettle", "description": "boil", "parameters": {"type": "object", "properties": {}, "required": []}}
    try:
        return "kettle" in rendered(tokenizer, _turns(), tools=[{"type": "function", "function": tool}])
    except TemplateError:
        return False


def rendered(
    tokenizer: Any, messages: Sequence[Turn], *, opened: bool = True, days: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text of a conversation. days: after `_DATE`, for the clock and as the seed of anything
    random. tools: what the model may call, as JSON schemas.

    Raises:
        TemplateError: the template raises something, or takes too much.
    """
    request = json.dumps([messages, opened, days, list(tools)]).encode()
    key = os.getpid(), type(tokenizer), repr((tokenizer.chat_template, tokenizer.special_tokens_map))
    cause: Exception | None = None
    for _ in range(2):  # again if somebody ended the process that renders
        try:
            if (renderer := _RENDERERS.get(key)) is None:
                renderer = _RENDERERS[key] = _Renderer(tokenizer)
                while len(_RENDERERS) > _MOST_RENDERERS:
                    _RENDERERS.pop(next(iter(_RENDERERS)), None)
            kind, text = renderer.answer(request)
        except (EOFError, OSError) as error:
            cause = error
            _RENDERERS.pop(key, None)
            continue
        if kind:
            raise (TemplateLimitError if kind == "limit" else TemplateError)(text)
        return text
    raise TemplateError(f"the process that renders it ended ({type(cause).__name__}: {cause})")


class _Renderer:
    """A fork of this process that renders one template, one conversation at a time.

    It is made when the template is tried, before there are weights in this process: a later fork
    would keep the memory of all weights that change. So it forks the process that works, and forks
    it again when a conversation took too much.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._lock = threading.Lock()
        self._refused: dict[bytes, str] = {}
        self._connection, theirs = Pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self.process_id = os.fork()
        if self.process_id == 0:
            _keep_serving(tokenizer, theirs)
        theirs.close()
        weakref.finalize(self, _end, self.process_id, self._connection, os.getpid())

    def answer(self, request: bytes) -> tuple[str, str]:
        """An empty word and the text; or "limit" or "error" and its description.

        Raises:
            EOFError, OSError: the process was ended, or does not answer.
        """
        with self._lock:
            if request in self._refused:  # the same question comes in the groups of several nodes
                return "limit", self._refused[request]
            self._connection.send_bytes(request)
            if not self._connection.poll(2 * _WALL_S):
                raise TimeoutError(f"no answer within {2 * _WALL_S:g} s")
            kind, text = json.loads(self._connection.recv_bytes())
            if kind == "limit" and len(self._refused) < _MOST_REFUSED:
                self._refused[request] = text
        return kind, text


def _end(process_id: int, connection: Connection, owner: int) -> None:
    connection.close()  # which ends the process that works
    if os.getpid() == owner:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)


def _keep_serving(tokenizer: Any, connection: Connection) -> NoReturn:
    """Fork the process that works, again and again, until the other process ends or wants no more.
    This fork needs no lock that another thread may have held, and none of the open files.
    """
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):  # the other process decides when it ends
            signal.signal(number, signal.SIG_IGN)
        for limit in _LIMIT_SIGNALS:
            signal.signal(limit, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, _late)
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # nothing of the other process is freed here
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            worker = os.fork()
            if worker == 0:
                _serve(tokenizer, connection)
            status = os.waitpid(worker, 0)[1]
            cause = _LIMIT_SIGNALS.get(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else ""
            if cause:
                connection.send_bytes(json.dumps(["limit", cause]).encode())
            elif os.waitstatus_to_exitcode(status) != _OUT_OF_MEMORY:
                break
    finally:
        os._exit(0)


def _serve(tokenizer: Any, connection: Connection) -> NoReturn:
    status = 0
    try:
        memory = MappedMemory().data_bytes()
        if memory is not None:
            limit_data(memory + _MEMORY_BYTES)
        while status == 0:
            messages, opened, days, tools = json.loads(connection.recv_bytes())
            # The second timer is for what no handler interrupts, the third for what waits.
            for timer, seconds in _TIMERS.items():
                signal.setitimer(timer, seconds)
            try:
                answer = "", _render(tokenizer, messages, opened, days, tools)
                limit = _MOST_WRITTEN + 8 * (sum(len(turn["content"]) for turn in messages) + len(json.dumps(tools)))
                if len(answer[1]) > limit:
                    answer = "limit", f"writes more than {limit:,} characters"
            except _LateError:
                answer = "limit", _TOO_LONG
            except MemoryError:
                answer, status = ("limit", f"takes more than {_MEMORY_BYTES // 2**20} MiB of memory"), _OUT_OF_MEMORY
            except Exception as error:  # noqa: BLE001 (a template's own)
                answer = "error", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            connection.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(status)


class _LateError(BaseException):
    """No template catches it."""


def _late(*_: object) -> None:
    raise _LateError


def _render(tokenizer: Any, messages: Sequence[Turn], opened: bool, days: int, tools: Sequence[Any]) -> str:
    def strftime_now(form: str) -> str:
        return (_DATE + datetime.timedelta(days=days, seconds=days)).strftime(form)

    random.seed(days)
    given: dict[str, Any] = {"tools": tools} if tools else {}
    return str(
        tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False, strftime_now=strftime_now, **given)
    )


_RENDERERS: dict[Any, _Renderer] = {}
