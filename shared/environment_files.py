"""Environments and tools as a task source names them, `environment = "game.py:Game"` and `tools =
["tools.py:search"]`: their identity, and what can be told of them without running them. They run in
the sandbox only (`shared.tasks.environments`).

The scorer of such a source has a name of its own, a JSON object (`EnvironmentSpec.name`), beside
the names of verifiers and rewards (`shared.reward_files`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shared.contracts.limits import MAX_TURNS
from shared.registry import ENVIRONMENTS, AmbiguousNameError, UnknownNameError
from shared.reward_files import Part, RewardFileError, code_hash, statement_of
from shared.suggestions import did_you_mean

DEFAULT_MAX_TURNS = 8
TOOLS = {"calculator": f"{Path(__file__).parent / 'tasks' / 'calculator.py'}:calculator"}
"""Tools that come with Swarm, by name."""
CALLS = 1
"""Version of the rules by which a call is read in an answer (`shared.tasks.environments`). Another
one is another environment.
"""
NOT_TOOLS = frozenset({"reset", "get_reward"})
"""Methods of an environment's class that the policy cannot call, beside those that begin with
`_`."""
_FORMS = (
    "write a class with reset(**row), tools as methods, and get_reward(), or one with reply(task, turns) and score(task, turns)"
)
_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array", "dict": "object"}
_ARGUMENT = re.compile(r"\s+(\w+)(?: *\([^)]*\))?: *(.+)")

Schema = dict[str, Any]
"""A tool as chat templates take it: `type`, and `function` with `name`, `description` and the JSON
schema of its `parameters`."""


class EnvironmentSpec(NamedTuple):
    """The tools or environment of a source's answers. `use`: an environment, which gives the reward
    too; else `tools`, with the `verifier` that scores the last turn.
    """

    use: str = ""
    tools: tuple[str, ...] = ()
    verifier: str = ""
    max_turns: int = DEFAULT_MAX_TURNS

    @property
    def name(self) -> str:
        """The name of the source's scorer."""
        return json.dumps(self._asdict())

    @classmethod
    def of(cls, name: str) -> EnvironmentSpec | None:
        """The inverse of `name`; None for a verifier's."""
        if not name.startswith("{"):
            return None
        found = json.loads(name)
        return cls(found["use"], tuple(found["tools"]), found["verifier"], found["max_turns"])

    @property
    def parts(self) -> list[Part]:
        """Its functions, or its class; of one that is installed, its name."""
        return [Part(use) for use in ([self.use] if self.use else self.tools)]

    @property
    def title(self) -> str:
        """The words by which people know it."""
        return f"environment {self.parts[0].title}" if self.use else f"tools {', '.join(part.function for part in self.parts)}"

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the code that answers the policy, with its number of turns. Groups of
        another one are not taken in, because they cannot be played again.
        """
        return _id(self)

    @property
    def tools_json(self) -> str:
        """JSON of `schemas`; empty without any. Raises RewardFileError."""
        return _tools_json(self)

    def schemas(self) -> list[Schema]:
        """The tools that the policy may call; none for an environment with its own form of turns.

        Raises:
            RewardFileError: a file or a function cannot be used.
        """
        return [schema for part in self.parts if part.file for schema in _schemas(part, self.use != "")]

    def problems(self) -> Iterator[str]:
        """List what is wrong with it, as far as it can be told without running it."""
        try:
            if self.use and not self.parts[0].file:
                ENVIRONMENTS.check(self.use)
            names = [schema["function"]["name"] for schema in self.schemas()]
        except (RewardFileError, UnknownNameError, AmbiguousNameError) as error:
            yield str(error)
            return
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"two tools are called {twice[0]}: rename one"
        if not 1 <= self.max_turns <= MAX_TURNS:
            yield f"max_turns is {self.max_turns}: let it be 1 to {MAX_TURNS}"


def is_environment(name: str) -> bool:
    """Check whether a scorer's name is that of an environment or of tools."""
    return name.startswith("{")


def tool_problem(use: str) -> str:
    """Why this names no tool; empty if it may."""
    if use in TOOLS or Part(use).file:
        return ""
    return f"{use[:80]!r} names no tool: write FILE.py:FUNCTION, or {did_you_mean(use, TOOLS) or ', '.join(TOOLS)}"


def is_door(part: Part) -> bool:
    """Check whether a file's class answers turns itself (`reply`), and not by tools."""
    node = statement_of(part)
    return isinstance(node, ast.ClassDef) and "reply" in _methods(node)


def _schemas(part: Part, is_class: bool) -> list[Schema]:
    """The schemas of a function, or of the methods of a class that are tools."""
    node = statement_of(part)
    if not is_class:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            raise RewardFileError(f"{part.file}: {part.function} is no plain function: a tool is `def {part.function}(...)`")
        return [_schema(node, part, skip=0)]
    if not isinstance(node, ast.ClassDef):
        raise RewardFileError(f"{part.file}: {part.function} is no class of this file: {_FORMS}")
    methods = _methods(node)
    if "reply" in methods and "score" in methods:
        return []
    if not methods.keys() >= NOT_TOOLS:
        missing = ", ".join(sorted(NOT_TOOLS - methods.keys()))
        raise RewardFileError(f"{part.file}: {part.function} has no {missing}: {_FORMS}")
    tools = [method for name, method in methods.items() if name not in NOT_TOOLS and not name.startswith("_")]
    if not tools:
        raise RewardFileError(f"{part.file}: {part.function} has no method that the policy could call: {_FORMS}")
    return [_schema(method, part, skip=0 if _is_static(method) else 1) for method in tools]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def _is_static(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in method.decorator_list)


def _schema(node: ast.FunctionDef | ast.AsyncFunctionDef, part: Part, *, skip: int) -> Schema:
    """The schema of a function. skip: its first arguments, which are not the policy's."""
    where = f"{part.file}: tool {node.name}"
    if isinstance(node, ast.AsyncFunctionDef):
        raise RewardFileError(f"{where} is async: make it a plain function")
    given = node.args
    if given.vararg or given.kwarg or given.posonlyargs:
        raise RewardFileError(f"{where} takes *args, **kwargs or arguments without a name: name each, with its type")
    told = ast.get_docstring(node) or ""
    description, arguments = _docstring(told)
    if not description:
        raise RewardFileError(f"{where} has no docstring: write what it does, which is all that the model knows of it")
    plain = given.args[skip:]
    optional = {each.arg for each in plain[len(plain) - len(given.defaults) :]} if given.defaults else set()
    optional |= {each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None}
    properties = {}
    for each in (*plain, *given.kwonlyargs):
        kind = None if each.annotation is None else _kind(each.annotation)
        if kind is None:
            has = "no type" if each.annotation is None else f"the type {ast.unparse(each.annotation)}"
            raise RewardFileError(f"{where}: {each.arg} has {has}: use {', '.join(_TYPES)}, list[...], Literal[...] or ... | None")
        properties[each.arg] = kind | ({"description": arguments[each.arg]} if each.arg in arguments else {})
    parameters = {"type": "object", "properties": properties, "required": [name for name in properties if name not in optional]}
    return {"type": "function", "function": {"name": node.name, "description": description, "parameters": parameters}}


def _kind(node: ast.expr) -> dict[str, Any] | None:
    """The JSON schema of a type hint; None for one that has none."""
    match node:
        case ast.Constant(value=str() as quoted):
            try:
                return _kind(ast.parse(quoted, mode="eval").body)
            except SyntaxError:
                return None
        case ast.Name(id=name):
            return {"type": _TYPES[name.lower()]} if name.lower() in _TYPES else None
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _kind(left)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _kind(inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = [
                each.value for each in (inner.elts if isinstance(inner, ast.Tuple) else [inner]) if isinstance(each, ast.Constant)
            ]
            return {"type": "string", "enum": values} if all(isinstance(each, str) for each in values) else {"enum": values}
        case ast.Subscript(value=ast.Name(id="list" | "List"), slice=inner):
            items = _kind(inner)
            return None if items is None else {"type": "array", "items": items}
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return {"type": "object"}
    return None


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """A function's description, and the descriptions of its arguments under `Args:`."""
    before, _, after = text.partition("Args:")
    before = re.split(r"\n\s*(?:Returns|Raises):", before)[0]
    found = {}
    for line in re.split(r"\n\s*(?:Returns|Raises):", after)[0].splitlines():
        if match := _ARGUMENT.fullmatch(line):
            found[match[1]] = match[2]
    return " ".join(before.split()), found


@lru_cache(maxsize=64)
def _id(spec: EnvironmentSpec) -> str:
    codes = [[part.function, code_hash(part.file) if part.file else ENVIRONMENTS.code_id(part.use)] for part in spec.parts]
    return hashlib.sha256(json.dumps([codes, spec.max_turns, CALLS]).encode()).hexdigest()


@lru_cache(maxsize=64)
def _tools_json(spec: EnvironmentSpec) -> str:
    schemas = spec.schemas()
    return json.dumps(schemas) if schemas else ""


@lru_cache(maxsize=64)
def tools_of(name: str) -> tuple[str, ...]:
    """The names of the tools of a scorer's name, in order."""
    spec = EnvironmentSpec.of(name)
    return tuple(schema["function"]["name"] for schema in spec.schemas()) if spec else ()
