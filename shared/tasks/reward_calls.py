"""Calls rewards from files (`shared.reward_files`) in the form that they have: a group at once as
TRL does, an answer at a time as verl does, `f(answer, reference)`, or `f(task, answer, replies)`
with a judge's replies to what `requests(task, answer)` wrote; and adds up several.

A reward gets whole completions, with thoughts. `None` means that it does not apply: it is left out
of the sum, and an answer to which no reward applies has none.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import os
import re
import selectors
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableSequence, Sequence
from functools import lru_cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import walk_tb
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from shared.contracts.wire import MAX_REWARD
from shared.registry import failure, plugin_errors
from shared.reward_files import (
    MAX_REQUEST_CHARS,
    MAX_REQUESTS,
    NOTED_NOWHERE,
    REQUESTS,
    Module,
    Part,
    Replies,
    Requests,
    RewardFileError,
    Signature,
    code_hash,
    modules_of,
    parts_of,
    read_signature,
    statement_of,
)
from shared.rewards import SANDBOXED, Mark
from shared.tasks.answers import without_thought
from shared.tasks.derive import Item, TaskError
from shared.text import visible

Word = memoryview | MutableSequence[int]
"""A writable sequence with an integer at index 0."""


class JudgedTask(NamedTuple):
    """A task as the functions of a judged reward get it. `reference`: its reference answer, None if
    it has none. `columns`: all of a file's row, as `**columns` of a reward.
    """

    question: str
    reference: str | None
    columns: Mapping[str, Any]


class Scored(NamedTuple):
    """Rewards of a group, None where there is none, and what else is known about each answer.
    `problem`: of the first answer whose reward is unknown. `parts`: of several rewards, the own
    values of each, by its name.
    """

    rewards: list[float | None]
    marks: list[Mark]
    problem: str
    parts: Mapping[str, list[float | None]] = MappingProxyType({})


ScoreTexts = Callable[[str, Item, Sequence[str | None], Word, int], Scored]
"""Scores texts with a verifier that is no file's, given by its name."""


class Rewards:
    """One or several rewards, of which at least one is in a file or has a weight."""

    def __init__(self, verifier: str) -> None:
        """Loads the files. Raises TaskError."""
        self.parts = parts_of(verifier)
        self._functions = [RewardFunction(part) if part.file else None for part in self.parts]
        self._names: list[str] = []
        for title in (visible(part.title, 100) for part in self.parts):
            again = sum(name.partition(" #")[0] == title for name in self._names)
            self._names.append(f"{title} #{again + 1}" if again else title)

    @property
    def scores_groups(self) -> bool:
        """Check whether a function is called with a group at once, so that one answer that it never
        returns for costs all of them their rewards.
        """
        return any(function is not None and function.signature.form == "group" for function in self._functions)

    @property
    def is_judged(self) -> bool:
        """Check whether a judge is asked."""
        return any(function is not None and function.signature.form == "judge" for function in self._functions)

    def requests(
        self, item: Item, texts: Sequence[str | None], word: Word, first_step: int, problems: list[str]
    ) -> list[list[Requests]]:
        """List what to ask a judge about each answer, for each reward of the form `judge`.
        `problems` gets what is wrong with the first request that cannot be had.
        """
        judged = [each for each in self._functions if each is not None and each.signature.form == "judge"]
        return [[each.requests(item, text, word, step, problems) for step, text in enumerate(texts, first_step)] for each in judged]

    def score(
        self,
        item: Item,
        texts: Sequence[str | None],
        word: Word,
        first_step: int,
        score_texts: ScoreTexts,
        replies: Sequence[Sequence[Replies]] | None = None,
    ) -> Scored:
        """The weighted sums over the rewards that apply. A text that is None has cost a worker
        before. `replies`: a judge's, in the order of `requests`.

        Raises:
            TaskError: a judge is asked, and there are no replies; or a reward cannot be used.
        """
        if self.is_judged and replies is None:
            raise TaskError("task_verifier", "a judge is asked about local groups only")
        if self.scores_groups and None in texts:
            return Scored([None] * len(texts), [Mark.TIMEOUT] * len(texts), "")
        found, given = [], iter(replies or ())
        for place, (part, function) in enumerate(zip(self.parts, self._functions, strict=True)):
            if function is None:
                found.append(score_texts(part.use, item, texts, word, first_step))
            elif function.signature.form == "judge":
                found.append(function.judged(item, texts, word, first_step, next(given)))
            else:
                # The word must change with each call, or a later one would have less time.
                found.append(function.score(item, texts, word, first_step, place))
        if len(found) == 1 and self.parts[0].weight == 1.0:
            return found[0]
        rewards, marks = [], []
        for place in range(len(texts)):
            reward, mark = _sum(
                [(part.weight, each.rewards[place], each.marks[place]) for part, each in zip(self.parts, found, strict=True)]
            )
            rewards.append(reward)
            marks.append(mark)
        parts = dict(zip(self._names, (each.rewards for each in found), strict=True))
        problem = next(
            (f"fails, as {name} {each.problem}" for name, each in zip(self._names, found, strict=True) if each.problem), ""
        )
        return Scored(rewards, marks, problem, parts)


def _sum(values: Sequence[tuple[float, float | None, Mark]]) -> tuple[float | None, Mark]:
    unknown = [mark for _, reward, mark in values if reward is None and mark is not Mark.NOT_APPLICABLE]
    applying = [weight * reward for weight, reward, _ in values if reward is not None]
    if unknown:
        return None, unknown[0]
    if not applying:
        return None, Mark.NOT_APPLICABLE
    total = sum(applying)
    return (total, Mark.UNSAID) if abs(total) <= MAX_REWARD else (None, Mark.NOT_A_NUMBER)


class RewardFunction:
    """A function in a file, loaded."""

    def __init__(self, part: Part) -> None:
        """Raises TaskError: it cannot be loaded, or has no form of a reward."""
        self._part = part
        namespace = loaded_file(part.file)
        if part.function not in namespace:
            raise TaskError("task_verifier", f"{part.file}: it has no function {part.function}")
        self._call = namespace[part.function]
        if isinstance(self._call, type):
            told = f"{part.function} is a class: name a function, or an object that is made of it and can be called"
            raise TaskError("task_verifier", f"{part.file}: {told}")
        if isinstance(self._call, list | tuple):
            one = part.title.removesuffix(part.function)
            told = f'{part.function} is a {type(self._call).__name__}: name each reward of it, rewards = ["{one}...", "{one}..."]'
            raise TaskError("task_verifier", f"{part.file}: {told}")
        if not callable(self._call):
            raise TaskError("task_verifier", f"{part.file}: {part.function} is a {type(self._call).__name__} and no function")
        self.signature = _signature(self._call, part)
        if problem := self.signature.problem():
            if not self.signature.form and getattr(statement_of(part), "decorator_list", None):
                problem = f"its decorator hides its parameters: put @functools.wraps(function) there ({problem})"
            raise TaskError("task_verifier", f"{part.file}: {part.function}: {problem}")
        self._positional = _positional_only(self._call)
        self._requests = namespace.get(REQUESTS)
        if self.signature.form == "judge" and not (callable(self._requests) and read_signature(part)):
            raise TaskError("task_verifier", f"{part.file}: write requests(task, answer) and {part.function}, with no decorator")

    def score(self, item: Item, texts: Sequence[str | None], word: Word, first_step: int, place: int) -> Scored:
        """Call it with the whole group, or once for each answer."""
        if self.signature.form == "group":
            columns = columns_of(item)
            if problem := self.signature.problem(columns):
                raise TaskError("task_verifier", f"{self._part.file}: {self._part.function}: {problem}")
            word[0] = first_step + place % max(1, len(texts))
            return self._group(item, [text or "" for text in texts])
        rewards, marks, first_problem = [], [], ""
        for step, text in enumerate(texts, first_step):
            word[0] = step
            reward, mark, problem = (None, Mark.TIMEOUT, "") if text is None else self._one(item, text)
            first_problem = first_problem or problem
            rewards.append(reward)
            marks.append(mark)
        return Scored(rewards, marks, first_problem)

    def requests(self, item: Item, text: str | None, word: Word, step: int, problems: list[str]) -> Requests:
        """List what to ask a judge about an answer; nothing if there is none besides thoughts."""
        word[0] = step
        if text is None or not without_thought(text).strip():
            return int(Mark.TIMEOUT) if text is None else []
        try:
            asked = _listed(self._requests(task=_judged_task(item), answer=text))  # type: ignore[misc]
            if asked is None or not all(isinstance(each, str) and len(each) <= MAX_REQUEST_CHARS for each in asked):
                raise TypeError(f"{REQUESTS} returned no list of texts of at most {MAX_REQUEST_CHARS:,} characters")
            if len(asked) > MAX_REQUESTS:
                raise ValueError(f"{REQUESTS} returned {len(asked)} texts, where {MAX_REQUESTS} may be asked about an answer")
            return [each.encode(errors="replace").decode() for each in asked]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as `plugin_errors` does
            if not problems:
                problems.append(raised_words(error))
            return int(Mark.RAISED)

    def judged(self, item: Item, texts: Sequence[str | None], word: Word, first_step: int, replies: Sequence[Replies]) -> Scored:
        """Read a judge's replies. Without all of them, or if the reward finds no verdict in them,
        the answer's reward is unknown.
        """
        rewards, marks, first_problem = [], [], ""
        for step, (text, given) in enumerate(zip(texts, replies, strict=True), first_step):
            word[0] = step
            reward, mark, problem = self._verdict(item, text, given)
            first_problem = first_problem or problem
            rewards.append(reward)
            marks.append(mark)
        return Scored(rewards, marks, first_problem)

    def _verdict(self, item: Item, text: str | None, given: Replies) -> tuple[float | None, Mark, str]:
        if text is None or isinstance(given, int):
            return None, Mark.TIMEOUT if text is None else Mark(given), ""  # type: ignore[arg-type]
        if None in given:
            return None, Mark.NO_VERDICT, ""
        reward, mark, problem = self._read_call(lambda: read_reward(self._returned(_reply_arguments(item, text, given))))
        if mark is Mark.NOT_APPLICABLE:
            said = visible(" ... ".join(map(str, given)), 200)
            return None, Mark.NO_VERDICT, f"found no verdict in what the judge replied: {said}"
        return reward, mark, problem

    def _one(self, item: Item, text: str) -> tuple[float | None, Mark, str]:
        if self.signature.form == "plain":
            given: dict[str, Any] = {"answer": text, "reference": item.task.answer}
        else:
            columns = columns_of(item)
            extra = columns.get("extra_info") or {}  # as verl's own loop hands it over where rows have none
            source = str(columns.get("data_source", item.task.ref.dataset))
            given = {"data_source": source, "solution_str": text, "ground_truth": ground_truth(item), "extra_info": extra}
            if not self.signature.takes_more:
                given = {name: value for name, value in given.items() if name in self.signature.names}
        return self._read_call(lambda: read_reward(_one_of(self._returned(given))))

    def _read_call(self, call: Callable[[], tuple[float | None, Mark, str]]) -> tuple[float | None, Mark, str]:
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as `plugin_errors` does
            return None, Mark.RAISED, raised_words(error)

    def _group(self, item: Item, texts: list[str]) -> Scored:
        """Call it once. What fails, or returns no list of that length, says nothing about any."""
        count = len(texts)
        try:
            returned = self._returned_for(item, texts)
            values = _listed(returned)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Scored([None] * count, [Mark.RAISED] * count, raised_words(error))
        if values is None or len(values) != count:
            what = f"{type(returned).__name__} ({str(returned)[:40]})" if values is None else _counted(len(values), "reward")
            statement = statement_of(self._part)
            line = f" ({Path(self._part.file).name} line {statement.lineno})" if statement is not None else ""
            told = f"returned {what} for {_counted(count, 'completion')}{line} instead of a list with one for each"
            return Scored([None] * count, [Mark.NOT_A_NUMBER] * count, told)
        read = [read_reward(value) for value in values]
        problem = next((problem for _, _, problem in read if problem), "")
        return Scored([reward for reward, _, _ in read], [mark for _, mark, _ in read], problem)

    def _returned_for(self, item: Item, texts: list[str]) -> Any:
        """Call it as TRL does: with messages if the row's prompt is messages, else with texts. A
        reward that fails because completions are texts gets messages: people have such rewards
        beside rows that they make into messages elsewhere.
        """
        if is_messages(item):
            return self._returned(self._group_arguments(item, texts, as_messages=True))
        try:
            return self._returned(self._group_arguments(item, texts))
        except Exception as error:
            if not self._wants_messages(error, item, texts):
                raise
            try:
                return self._returned(self._group_arguments(item, texts, as_messages=True))
            except Exception:
                raise error from None

    def _wants_messages(self, error: Exception, item: Item, texts: list[str]) -> bool:
        if isinstance(error, IndexError) and "" in texts:  # `completion[0]`: another text has one
            try:
                self._returned(self._group_arguments(item, [text or " " for text in texts]))
            except Exception as other:
                error = other
        return isinstance(error, TypeError | AttributeError) and _READ_AS_MESSAGE.search(str(error)) is not None

    def _group_arguments(self, item: Item, texts: list[str], *, as_messages: bool = False) -> dict[str, Any]:
        """As TRL passes them; each column as a list with its own value for each completion."""
        signature, count = self.signature, len(texts)
        rows = [columns_of(item) for _ in texts]
        names = rows[0] if signature.takes_more else signature.columns & rows[0].keys()
        arguments: dict[str, Any] = {name: [row[name] for row in rows] for name in names if name not in ("prompt", "completion")}
        prompt: Any = item.task.text
        if as_messages:
            prompt = [{"role": message.role, "content": message.text} for message in item.task.prompt]
            arguments["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        else:
            arguments["completions"] = texts
        if "prompts" in signature.names or signature.takes_more:
            arguments["prompts"] = [prompt] * count
        for name in NOTED_NOWHERE & {*signature.names, *signature.reads}:
            arguments[name] = _note_nothing
        return arguments

    def _returned(self, arguments: dict[str, Any]) -> Any:
        first = [arguments.pop(name) for name in self._positional if name in arguments]
        returned = self._call(*first, **arguments)
        return _loop().run_until_complete(_awaited(returned)) if inspect.isawaitable(returned) else returned


def columns_of(item: Item) -> dict[str, Any]:
    """The columns of the task's row; of another task its question, answer and metadata."""
    if item.dataset is None:
        columns: dict[str, Any] = item.entry["rows"].given_columns(item.task.ref.index, item.task.text)
        return columns
    return {"question": item.task.text, "answer": item.task.answer, "metadata": json.loads(item.task.metadata)}


def is_messages(item: Item) -> bool:
    """Check whether the task's prompt was given as messages; of another task than a row's, whether
    it is several.
    """
    if item.dataset is None:
        return bool(item.entry["rows"].is_messages(item.task.ref.index))
    return len(item.task.prompt) > 1


def ground_truth(item: Item) -> Any:
    """The reference answer as the row has it."""
    return item.entry["rows"].ground_truth(item.task.ref.index) if item.dataset is None else item.task.answer


def _judged_task(item: Item) -> JudgedTask:
    return JudgedTask(item.task.text, item.task.answer, columns_of(item))


def _reply_arguments(item: Item, text: str, given: Replies) -> dict[str, Any]:
    return {"task": _judged_task(item), "answer": text, "replies": given}


def _signature(function: Callable[..., Any], part: Part) -> Signature:
    if (written := read_signature(part)) is not None:
        return written
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TaskError("task_verifier", f"{part.file}: the parameters of {part.function} cannot be told ({error})") from None
    plain = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    more = any(each.kind is each.VAR_KEYWORD for each in parameters)
    required = frozenset(each.name for each in plain if each.default is each.empty)
    return Signature(tuple(each.name for each in plain), required, more, more)


def _positional_only(function: Callable[..., Any]) -> list[str]:
    try:
        return [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.POSITIONAL_ONLY]
    except (TypeError, ValueError):
        return []


def read_reward(raw: Any) -> tuple[float | None, Mark, str]:
    """Read what a reward returned for one answer: a number, None, or with it whether it passes."""
    if raw is None:
        return None, Mark.NOT_APPLICABLE, ""
    reward, mark = _number(raw)
    problem = "" if reward is not None else f"returned {type(raw).__name__} ({str(raw)[:40]}), which is no finite number"
    return reward, mark, problem


def _number(raw: Any) -> tuple[float | None, Mark]:
    """Read what a scorer returned: a number; a pair of number and bool; or an object with `reward`
    and `passed`.
    """
    passed: Any = None
    if isinstance(raw, tuple) and len(raw) == 2:
        raw, passed = raw
    elif hasattr(raw, "reward"):
        raw, passed = raw.reward, getattr(raw, "passed", None)
    if type(passed).__name__ not in ("NoneType", "bool", "bool_"):  # numpy's too
        return None, Mark.NOT_A_NUMBER
    if not hasattr(type(raw), "__float__") and not hasattr(type(raw), "__index__"):
        return None, Mark.NOT_A_NUMBER
    try:
        reward = float(raw)
    except OverflowError:  # an integer that no float can hold
        return None, Mark.NOT_A_NUMBER
    if not -MAX_REWARD <= reward <= MAX_REWARD:  # NaN too
        return None, Mark.NOT_A_NUMBER
    return reward, Mark.UNSAID if passed is None else Mark.PASSED if passed else Mark.FAILED


def _one_of(returned: Any) -> Any:
    """verl's may return an object with `score`."""
    return returned["score"] if isinstance(returned, dict) and "score" in returned else returned


def _listed(returned: Any) -> list[Any] | None:
    """A list, a tuple, an array or what a generator yields as a list; None for anything else."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    return list(returned) if isinstance(returned, list | tuple | Iterator) else None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _note_nothing(*_: Any, **__: Any) -> None:
    """Values that TRL would log."""


# An event loop that opens no file: the sandbox forbids epoll and sockets, and a forked process has
# closed all files.


_outside = False
_REFUSED = re.compile(r"\bCUDA\b|\bGPUs?\b|NVIDIA|HIP\b|shared object file|can't start new thread")
"""Failures without an OSError that the sandbox causes: no GPU, library or thread."""
_READ_AS_MESSAGE = re.compile(r"string indices must be integers|'str' object has no attribute '(get|content|role|items|keys)'")
"""Failures of code that takes a text for a message."""
_MODULE = "swarm_reward_"
_MOST_CAUSES = 16


def leave_sandbox() -> None:
    """Say that this process is outside the sandbox: an `async` reward gets a loop with sockets."""
    global _outside
    _outside = True


def raised_words(error: BaseException) -> str:
    """Describe what a scorer raised, and where."""
    return f"raised {_failure_words(error)}"


def _failure_words(error: BaseException) -> str:
    """Name an error with the line of the user's file; where the sandbox may be the cause, with what
    allows it.
    """
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_MODULE) or name in _beside.modules:
            line = f" ({Path(frame.f_code.co_filename).name} line {number})"
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < _MOST_CAUSES:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    refused = not _outside and any(isinstance(each, OSError) or _REFUSED.search(failure(each)) for each in causes)
    return f"{failure(error)}{line}" + (f" in the sandbox ({_other_way(causes)}{SANDBOXED})" if refused else "")


def _other_way(causes: Sequence[BaseException]) -> str:
    """How code that reads files, starts threads or an event loop of its own can be written for the
    sandbox.
    """
    named = [each.filename for each in causes if isinstance(each, OSError) and isinstance(each.filename, str)]
    paths = [Path(folder, name) for folder in _folders for name in named]
    if any(path.parent == Path(folder) and os.path.isfile(path) for path in paths for folder in _folders):
        return "write what it reads as a Python file beside the reward, and import that; "
    files = {frame.f_code.co_filename for each in causes for frame, _ in walk_tb(each.__traceback__)}
    if any(file.endswith(("/asyncio/runners.py", "/asyncio/events.py")) for file in files):
        return "write it as `async def` and await there; "
    return "write it without threads; " if any(file.endswith("/threading.py") for file in files) else ""


class _Loop(asyncio.SelectorEventLoop):
    def _make_self_pipe(self) -> None:
        self._ssock = self._csock = None

    def _close_self_pipe(self) -> None:
        pass


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop() if _outside else _Loop(selectors.PollSelector())


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


# Modules from sources that another process has read.


class _Source(InspectLoader):
    def __init__(self, module: Module) -> None:
        self._module = module

    def get_source(self, fullname: str) -> str:
        return self._module.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._module.text, self._module.path, "exec")

    def is_package(self, fullname: str) -> bool:
        return self._module.is_package

    def spec(self, name: str) -> ModuleSpec:
        found = spec_from_loader(name, self, origin=self._module.path, is_package=self._module.is_package)
        assert found is not None
        return found


class _Beside(MetaPathFinder):
    """Finds the modules beside rewards, after everything that is installed."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        module = self.modules.get(fullname)
        return None if module is None else _Source(module).spec(fullname)


_beside = _Beside()
_folders: set[str] = set()
"""Folders of the files that were run."""


@lru_cache(maxsize=64)
def loaded_file(file: str) -> dict[str, Any]:
    """The names of a file that was run: of rewards, environments or tools. Raises TaskError."""
    try:
        first, *others = modules_of(file)
    except RewardFileError as error:
        raise TaskError("task_verifier", str(error)) from None
    if _beside not in sys.meta_path:
        sys.meta_path.append(_beside)
    _beside.modules.update((module.name, module) for module in others)
    _folders.add(str(Path(file).parent))
    name = f"{_MODULE}{code_hash(file)}"
    module = module_from_spec(_Source(first).spec(name))
    module.__file__ = file
    linecache.cache[file] = (len(first.text), None, first.text.splitlines(keepends=True), file)
    remedy = "correct it; a package that it needs must be installed where Swarm is"

    def broken(why: str) -> TaskError:
        error = sys.exception()
        return TaskError("task_verifier", f"{file}: it cannot be imported: {_failure_words(error) if error else why}: {remedy}")

    with plugin_errors(broken):
        sys.modules[name] = module
        exec(compile(first.text, file, "exec"), module.__dict__)
    return module.__dict__
