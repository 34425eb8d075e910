"""Environments: what the policy meets between its turns, and what it earns in the end.

An environment is pure: what it says and pays depends on the task and on what the policy said so
far. So its words never travel. The generator derives them to go on, and the verifiers of all nodes
to check and to score, each by playing the policy's turns again. It runs in the sandbox's worker, as
verifiers do, and its name comes from this node's `[[tasks]]` entries, never from the wire.

An installed one (`swarm.environments`) is an `Environment`. In a file it may also be a class as
TRL's `environment_factory` takes it: `reset(**row)`, tools as methods, `get_reward()`. Tools alone
are functions; the answer that ends such an episode is scored by the source's verifier.

The policy calls a tool in the form of its model's template. One parser reads all of them, on every
node: JSON in `<tool_call>` tags (Qwen, Hermes), JSON alone (Llama, Mistral), or a call as Python
writes it (Gemma, and templates without tools).
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from shared.contracts.limits import MAX_REPLY_CHARS
from shared.environment_files import EnvironmentSpec, is_door, tools_of
from shared.registry import ENVIRONMENTS, failure
from shared.reward_files import Part
from shared.rewards import Mark
from shared.tasks.derive import Item, TaskError, canonical_json
from shared.tasks.reward_calls import Word, columns_of, loaded_file, read_reward

MAX_GROUP_CHARS = 1_000_000
"""Most that an environment says to all answers of a group together."""
_THOUGHT = "</think>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:tool_code|python)\s*(.*?)\s*```", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Environment(Protocol):
    """Answers the policy's turns in a task. Both functions are pure."""

    def reply(self, task: Item, turns: Sequence[str]) -> str | None:
        """Answer the newest of the policy's turns; None: the episode is over."""
        ...

    def score(self, task: Item, turns: Sequence[str]) -> Any:
        """The reward of an episode that is over, as a scorer returns it: a number, with or without
        whether it passes; None: there is none.
        """
        ...


class Played(NamedTuple):
    """Episodes that were played again: rewards and marks as `score_texts` gives them, and what the
    environment said to each of the policy's turns. An episode whose last turn has a reply goes on.
    """

    rewards: list[float | None]
    marks: list[Mark]
    replies: list[list[str]]


class Call(NamedTuple):
    """A call of a tool, or what is wrong with it."""

    tool: str
    arguments: Mapping[str, Any]
    problem: str = ""


class _Away(Exception):
    """An environment failed, or said what cannot be told to a policy."""


class _Session(Protocol):
    """One episode. `say` is called for one turn after another."""

    def say(self, turns: Sequence[str]) -> Any: ...

    def reward(self, turns: Sequence[str]) -> Any: ...


def play(
    item: Item,
    name: str,
    answers: Sequence[Sequence[str] | str | None],
    word: Word,
    first_step: int,
    score_texts: Callable[..., tuple[list[float | None], list[Mark]]],
    problems: list[str] | None = None,
    parts: dict[str, list[float | None]] | None = None,
) -> Played:
    """Play the turns of each answer again. name: of the source's scorer (`EnvironmentSpec.name`).
    A text is an answer of one turn; None has cost a worker before. The rest is as in
    `shared.tasks.scoring.score_texts`, which is given.

    Raises:
        TaskError: the environment cannot be had, or cannot be used for this task.
    """
    begin = _beginning(name)
    spec = EnvironmentSpec.of(name)
    assert spec is not None
    played: list[list[str]] = []
    rewards: list[float | None] = []
    marks: list[Mark] = []
    told = [] if problems is None else problems
    room = MAX_GROUP_CHARS
    for step, answer in enumerate(answers, first_step):
        word[0] = step
        turns = [answer] if isinstance(answer, str) else answer
        replies: list[str] = []
        reward, mark, problem = None, Mark.TIMEOUT, ""
        if turns is not None:
            _seed(item)
            try:
                session = begin(item)
                _replay(session, turns, replies)
                reward, mark, problem = (None, Mark.UNSAID, "") if spec.tools else read_reward(session.reward(turns))
            except (KeyboardInterrupt, TaskError):
                raise
            except BaseException as error:  # as `plugin_errors` does
                what = str(error) if isinstance(error, _Away) else f"raised {failure(error)}"
                reward, mark, problem = None, Mark.RAISED, what
        room -= sum(map(len, replies))
        if room < 0:
            raise TaskError(
                "task_environment", f"{spec.title} says more than {MAX_GROUP_CHARS:,} characters to one group: say less"
            )
        if problem and not told:
            told.append(problem)
        played.append(replies)
        rewards.append(reward)
        marks.append(mark)
    if spec.tools:
        texts = [
            None if mark is not Mark.UNSAID else answer if isinstance(answer, str) else answer[-1] if answer else ""
            for answer, mark in zip(answers, marks, strict=True)
        ]
        found, of_texts = score_texts(item, spec.verifier, texts, word, first_step, told, parts)
        marks = [other if mark is Mark.UNSAID else mark for mark, other in zip(marks, of_texts, strict=True)]
        return Played(found, marks, played)
    return Played(rewards, marks, played)


def _replay(session: _Session, turns: Sequence[str], replies: list[str]) -> None:
    """Collect what is said to each turn, up to the end of the episode."""
    for number in range(1, len(turns) + 1):
        reply = session.say(turns[:number])
        if reply is None:
            return
        if not isinstance(reply, str):
            raise _Away(f"replied {type(reply).__name__}, and a reply is a text or None")
        if len(reply) > MAX_REPLY_CHARS:
            raise _Away(f"replied {len(reply):,} characters, at most {MAX_REPLY_CHARS:,}")
        replies.append(reply.strip().encode("utf-8", "replace").decode())


def _seed(item: Item) -> None:
    """An episode that draws at random is the same one everywhere."""
    number = int(item.task.key[:8], 16)
    random.seed(number)
    np.random.seed(number)


@lru_cache(maxsize=64)
def _beginning(name: str) -> Callable[[Item], _Session]:
    """The function that begins an episode. Raises TaskError."""
    spec = EnvironmentSpec.of(name)
    assert spec is not None
    try:
        problem = next(spec.problems(), "")
        if problem:
            raise ValueError(problem)
        if spec.use and not spec.parts[0].file:
            installed: Environment = ENVIRONMENTS.load(spec.use)
            return lambda item: _Door(installed, item)
    except ValueError as error:
        raise TaskError("task_environment", str(error)) from None
    if not spec.use:
        functions = {part.function: _found(part) for part in spec.parts}
        return lambda _: _Tools(functions)
    made, tools = _found(spec.parts[0]), tools_of(name)
    if is_door(spec.parts[0]):
        return lambda item: _Door(made(), item)
    return lambda item: _Object(made(), tools, item)


def load_environment(name: str) -> None:
    """Import an environment early. Raises TaskError."""
    _beginning(name)


def _found(part: Part) -> Any:
    namespace = loaded_file(part.file)
    if not callable(namespace.get(part.function)):
        raise TaskError("task_environment", f"{part.file}: it has no {part.function} that can be called")
    return namespace[part.function]


class _Door:
    """An `Environment`."""

    def __init__(self, environment: Environment, item: Item) -> None:
        self._environment, self._item = environment, item

    def say(self, turns: Sequence[str]) -> Any:
        return self._environment.reply(self._item, list(turns))

    def reward(self, turns: Sequence[str]) -> Any:
        return self._environment.score(self._item, list(turns))


class _Tools:
    """Functions that the policy may call."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        self._tools = tools

    def say(self, turns: Sequence[str]) -> str | None:
        calls = read_calls(turns[-1], self._tools)
        return "\n".join(map(self._result, calls)) if calls else None

    def reward(self, turns: Sequence[str]) -> Any:
        raise NotImplementedError  # the last turn is scored

    def _result(self, call: Call) -> str:
        if call.problem:
            return f"error: {call.problem}"
        try:
            result = self._tools[call.tool](**call.arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the policy's call may be wrong in any way
            return _ADDRESS.sub("", f"error: {failure(error)}")
        return result if isinstance(result, str) else canonical_json(result)


class _Object(_Tools):
    """An object of a class as TRL's `environment_factory` makes it, one for each episode."""

    def __init__(self, made: Any, tools: Sequence[str], item: Item) -> None:
        super().__init__({name: getattr(made, name) for name in tools})
        self._made = made
        given = {"prompt": item.task.text, "answer": item.task.answer, **columns_of(item)}
        if made.reset(**given) is not None:
            remedy = "what comes first belongs in the question of the row"
            raise TaskError("task_environment", f"{type(made).__name__}.reset returned something: let it return None; {remedy}")

    def reward(self, turns: Sequence[str]) -> Any:
        return self._made.get_reward()


def read_calls(turn: str, tools: Mapping[str, Any]) -> list[Call]:
    """The calls of a turn, in any form that templates teach; none: it is an answer. What a model
    thought before (`</think>`) is no call.
    """
    text = turn.rpartition(_THOUGHT)[2].strip()
    if tagged := _TAGGED.findall(text):
        return [_json_call(each, tools) or Call("", {}, "what is in <tool_call> is no call in JSON") for each in tagged]
    if text[:1] in "{[" and (found := _json_calls(text, tools)):
        return found
    fenced = _FENCED.fullmatch(text)
    return _python_calls(fenced[1] if fenced else text, tools)


def _json_calls(text: str, tools: Mapping[str, Any]) -> list[Call]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call_of(each, tools) for each in (found if isinstance(found, list) else [found])]
    return [each for each in calls if each is not None] if None not in calls else []


def _json_call(text: str, tools: Mapping[str, Any]) -> Call | None:
    try:
        return _call_of(json.loads(text.strip()), tools)
    except (ValueError, RecursionError):
        found = _python_calls(text.strip(), tools)
        return found[0] if len(found) == 1 else None


def _call_of(found: Any, tools: Mapping[str, Any]) -> Call | None:
    if not isinstance(found, dict):
        return None
    found = found.get("function") if isinstance(found.get("function"), dict) else found
    if not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some templates write them as text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return _checked(found["name"], arguments, tools)


def _checked(name: str, arguments: Any, tools: Mapping[str, Any]) -> Call:
    if name not in tools:
        return Call(name, {}, f"there is no function {name[:60]}: there is {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return Call(name, {}, f"{name} was called without its arguments by name")
    return Call(name, arguments)


def _python_calls(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """A call, or a list of calls, of known tools with values alone; none: it is another text."""
    if len(text) > MAX_REPLY_CHARS or not any(f"{name}(" in text for name in tools):
        return []
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if not all(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in tools for node in nodes):
        return []
    return [_python_call(node, tools) for node in nodes if isinstance(node, ast.Call)]


def _python_call(node: ast.Call, tools: Mapping[str, Any]) -> Call:
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    code = getattr(getattr(tools[name], "__func__", tools[name]), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    names = names[1:] if names[:1] == ("self",) else names
    if len(node.args) > len(names):
        return Call(name, {}, f"{name} takes at most {len(names)} arguments")
    try:
        arguments = {key: ast.literal_eval(value) for key, value in zip(names, node.args, strict=False)}
        arguments |= {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg is not None}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Call(name, {}, f"the arguments of {name} are no plain values")
    return _checked(name, arguments, tools)
