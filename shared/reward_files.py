"""Rewards in a Python file of the user's, `reward = "rewards.py:accuracy"`: their names, their
source and what can be told of them without running it. It runs in the sandbox only
(`shared.tasks.reward_calls`).

A verifier's name is that of an entry (`exact`), of a function in a file (`/home/rewards.py:short`),
`judge` for the built-in rubric, which is such a file too, or a JSON list of such names with
weights. The source is read once in a process and handed to its scorers, so that a file that changes
on disk does not affect a running process.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shared.plain_files import read_named
from shared.suggestions import did_you_mean
from shared.text import error_text, listed

MAX_SOURCE_BYTES = 2 * 2**20
"""Of a file and the modules beside it that it imports."""
_MAX_MODULES = 200
NAMES_TOLD = 40
"""Names of columns that an error lists."""
_HASH_DIGITS = 12
_FILE_REWARD = re.compile(r"(?s)(.+\.py):([^:/]+)")
NOTED_NOWHERE = frozenset({"log_extra", "log_metric"})
"""Functions that TRL passes, of which what a reward notes with them is not kept here."""
GROUP_WORDS = frozenset({"prompts", "completions"}) | NOTED_NOWHERE
"""Words that TRL passes besides the columns, as far as they can be had here."""
NOT_HERE = {
    "completion_ids": "a reward is called without tokens, as completions of other nodes have none of this model's",
    "trainer_state": "a reward is called where there is no trainer",
    "environments": "there are none",
}
"""Words that TRL passes, and why they cannot be had here."""
FORMS = (
    "write f(completions, **columns), which returns a list (TRL), compute_score(data_source, solution_str, ground_truth, "
    "extra_info=None) (verl), f(answer, reference), or f(task, answer, replies) beside requests(task, answer) for a judge"
)
REQUESTS = "requests"
"""The function, beside a reward of the form `judge`, that writes what the judge is asked."""
MAX_REQUESTS, MAX_REQUEST_CHARS = 8, 250_000
"""What a judge may be asked about one answer: texts, and characters of each."""
Requests = list[str] | int
"""Texts to ask a judge about one answer; or a `Mark`: why there are none."""
Replies = Sequence[str | None] | int
"""The judge's replies to `Requests`, None where it gave none."""
_BUILT_IN = {"judge": (str(Path(__file__).parent / "tasks" / "rubric.py"), "reward")}
"""Files and functions of this project's own rewards, by name."""
BUILT_IN_REWARDS = tuple(_BUILT_IN)
"""Names that choose a reward as a verifier's name does."""


class RewardFileError(ValueError):
    """A reward's file cannot be used; the message names it, the cause and the remedy."""


class Part(NamedTuple):
    """A reward of a sum. `use`: the name of a verifier, `FILE.py:FUNCTION`, or `judge`."""

    use: str
    weight: float = 1.0

    @property
    def file(self) -> str:
        """The file that it is in; empty for a verifier."""
        if self.use in _BUILT_IN:
            return _BUILT_IN[self.use][0]
        found = _FILE_REWARD.fullmatch(self.use)
        return found[1] if found else ""

    @property
    def function(self) -> str:
        """The function's name; of a verifier, its own."""
        return _BUILT_IN[self.use][1] if self.use in _BUILT_IN else self.use.rpartition(":")[2]

    @property
    def title(self) -> str:
        """The name by which people know it: the file without its folder."""
        return f"{Path(self.file).name}:{self.function}" if self.file and self.use not in _BUILT_IN else self.use


class Module(NamedTuple):
    """A module's name, file and source."""

    name: str
    path: str
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, of which those in `required` have no default. `takes_all`: it
    has `**columns` and reads them; `reads`: those of them that it reads by name.
    """

    names: tuple[str, ...]
    required: frozenset[str]
    takes_more: bool = False
    takes_all: bool = False
    reads: frozenset[str] = frozenset()

    @property
    def form(self) -> str:
        """`group` as TRL calls it, `verl`, `plain`, or `judge`; empty for none of them."""
        return self._form({*self.names}) or self._form({*self.names, *self.reads})

    def _form(self, names: set[str]) -> str:
        if "completions" in names:
            return "group"
        if {"task", "answer", "replies"} <= names:
            return "judge" if self.required <= {"task", "answer", "replies"} else ""
        if {"solution_str", "ground_truth"} <= names:
            return "verl" if self.required <= {"data_source", "solution_str", "ground_truth", "extra_info"} else ""
        return "plain" if {"answer", "reference"} <= names and self.required <= {"answer", "reference"} else ""

    @property
    def columns(self) -> frozenset[str]:
        """The names of columns that it takes besides the reference answer; with `takes_all` those
        of all others too.
        """
        if self.form == "verl":
            return frozenset({"data_source", "extra_info"})
        return frozenset() if self.form in ("plain", "judge") else frozenset(self.names) - GROUP_WORDS - NOT_HERE.keys()

    def problem(self, columns: Collection[str] | None = None) -> str:
        """Why it cannot be called; empty if it can. `columns`: those that there are, if known."""
        if not self.form:
            return f"its parameters are ({', '.join(self.names)}), which is no form of a reward: {FORMS}"
        if self.form != "group":
            return ""
        if wrong := sorted(self.required & NOT_HERE.keys()):
            return f"it needs {wrong[0]}, which cannot be had here: {NOT_HERE[wrong[0]]}; remove it or give it a default"
        missing = sorted((self.columns & self.required).difference(self.columns if columns is None else columns))
        if columns is None or not missing:
            return ""
        near, known = did_you_mean(missing[0], columns), listed(sorted(columns), NAMES_TOLD, 40)
        told = f"it needs the column {missing[0]!r}, and the columns are {known}" + (f" ({near})" if near else "")
        return f"{told}: use one of them, or give it a default"


def columns_used(verifier: str) -> frozenset[str] | None:
    """The columns, besides question and answer, that rewards get; None for all that there are: a
    reward has `**columns` and reads them, or only running its file tells its parameters.
    """
    used: frozenset[str] = frozenset()
    if verifier.startswith("{"):
        return None  # `reset` gets the row
    for part in parts_of(verifier):
        try:
            signature = read_signature(part) if part.file else Signature((), frozenset())
        except RewardFileError:
            continue  # which `reward_problems` tells
        if signature is None or signature.form == "judge" or (signature.takes_all and signature.form != "plain"):
            return None
        used |= signature.columns if signature.form else frozenset()
    return used


def is_given_groups(verifier: str) -> bool:
    """Check whether a reward is called with all answers of a group, so that a call that fails says
    nothing of any. Raises RewardFileError.
    """
    signatures = (read_signature(part) for part in parts_of(verifier) if part.file)
    return any(signature is not None and signature.form == "group" for signature in signatures)


def may_get_messages(verifier: str) -> bool:
    """Check whether a reward gets completions as messages where the row's prompt is messages: one
    of the form `group`, or of a form that only running its file tells.
    """
    for part in () if verifier.startswith("{") else parts_of(verifier):
        try:
            signature = read_signature(part) if part.file else Signature((), frozenset())
        except RewardFileError:
            continue  # which `reward_problems` tells
        if signature is None or signature.form == "group":
            return True
    return False


def not_given(verifier: str) -> Iterator[str]:
    """List what TRL would give to these rewards, which they can do without, and what they get here:
    a sentence for each parameter.
    """
    for part in parts_of(verifier) if has_rewards(verifier) else ():
        try:
            code = _code_of(part.file, part.function) if part.file else None
        except RewardFileError:
            continue  # which `reward_problems` tells
        if code is None or _signature(code).form != "group":
            continue
        defaults, read = _defaults(code), _signature(code).reads
        for name in ("completion_ids", "trainer_state"):  # TRL gives `environments` only where it has some
            if name in defaults:
                instead = f"here it gets its default, {defaults[name]}"
            elif name in read:
                instead = f"here it is not among **{_more(code)}"
            else:
                continue
            yield f"reward {part.title} takes {name}, which TRL gives: {instead} ({NOT_HERE[name]})"
        for name in sorted(NOTED_NOWHERE & {*_signature(code).names, *read}):
            yield f"reward {part.title} takes {name}, which TRL logs: what it notes with it is not kept here"


def is_judged(verifier: str) -> bool:
    """Check whether a judge is asked about answers. False for what cannot be read."""
    for part in parts_of(verifier):
        try:
            signature = read_signature(part) if part.file else None
        except RewardFileError:
            continue  # which `reward_problems` tells
        if signature is not None and signature.form == "judge":
            return True
    return False


def parts_of(verifier: str) -> list[Part]:
    """The rewards that a verifier's name stands for; of an environment's or of tools
    (`shared.environment_files`), what is in files.
    """
    if verifier.startswith("{"):
        found = json.loads(verifier)
        return [part for use in ([found["use"]] if found["use"] else found["tools"]) if (part := Part(use)).file]
    if verifier.startswith("["):
        return [Part(str(use), float(weight)) for use, weight in json.loads(verifier)]
    return [Part(verifier)]


def name_of(parts: Sequence[Part]) -> str:
    """The verifier's name for these rewards."""
    if len(parts) == 1 and parts[0].weight == 1.0:
        return parts[0].use
    return json.dumps([[part.use, part.weight] for part in parts])


def has_rewards(verifier: str) -> bool:
    """Check whether the name is not that of one verifier."""
    return verifier.startswith(("[", "{")) or bool(Part(verifier).file)


def verifier_words(verifier: str) -> str:
    """Name a verifier or rewards for people: `verifier exact`, `reward rewards.py:short`."""
    if not has_rewards(verifier):
        return f"verifier {verifier}"
    parts = parts_of(verifier)
    if verifier.startswith("{"):
        found = json.loads(verifier)
        if found["use"]:
            return f"environment {parts[0].title if parts else found['use']}"
        return f"{verifier_words(found['verifier'])}, with tools {', '.join(part.function for part in parts)}"
    told = " + ".join(part.title if part.weight == 1.0 else f"{part.weight:g} * {part.title}" for part in parts)
    return f"reward {told}"


def found_from(use: str, folder: Path) -> str:
    """The name with its file's whole path; `folder`: where a relative one begins."""
    part = Part(use)
    return f"{(folder / part.file).absolute()}:{part.function}" if part.file and use not in _BUILT_IN else use


_held: dict[str, list[Module]] = {}


def hold(sources: Iterable[tuple[str, list[list[str]]]]) -> None:
    """Keep sources that another process has read (`to_hold`)."""
    for file, modules in sources:
        _held[file] = [Module(*module) for module in modules]


def to_hold(verifiers: Iterable[str]) -> list[tuple[str, list[Module]]]:
    """The sources of these verifiers' files, for a process that cannot read them. One that cannot
    be read is left out.
    """
    found = []
    for file in sorted({part.file for verifier in verifiers for part in parts_of(verifier) if part.file}):
        try:
            found.append((file, modules_of(file)))
        except RewardFileError:
            continue
    return found


def modules_of(file: str) -> list[Module]:
    """The file, under the name of no module, and the modules beside it that it imports.

    Raises:
        RewardFileError: it cannot be read, or is too large.
    """
    if file not in _held:
        _held[file] = list(_read(Path(file)))
    return _held[file]


def code_hash(file: str) -> str:
    """A short hash over the file and the modules beside it that it imports; empty if it cannot be
    read.
    """
    try:
        texts = [(module.name, module.text) for module in modules_of(file)]
    except RewardFileError:
        return ""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:_HASH_DIGITS]


def code_id(verifier: str) -> str:
    """Identify the code of rewards: another code, weight or function is another scorer."""
    return json.dumps([[part.function, part.weight, code_hash(part.file) if part.file else ""] for part in parts_of(verifier)])


def _read(file: Path) -> Iterator[Module]:
    """Read the file, then what it imports from its folder, then what that imports."""
    folder, waiting, seen, size = file.parent, [(file, "")], {""}, 0
    while waiting:
        path, name = waiting.pop(0)
        text = _text(path, first=not name)
        size += len(text.encode())
        if size > MAX_SOURCE_BYTES or len(seen) > _MAX_MODULES:
            raise RewardFileError(
                f"{file}: it and the modules beside it that it imports are more than {MAX_SOURCE_BYTES // 2**20} MiB or "
                f"{_MAX_MODULES} files: import less"
            )
        yield Module(name, str(path), text)
        for imported in _imports(text, str(path)):
            for found, module in _beside(folder, imported):
                if module not in seen:
                    seen.add(module)
                    waiting.append((found, module))


def _text(path: Path, *, first: bool) -> str:
    try:
        return read_named(path, MAX_SOURCE_BYTES).decode("utf-8")
    except FileNotFoundError:
        near = sorted(each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, near) or (f"there is {', '.join(near[:5])}" if near else "no Python file is in that folder")
        raise RewardFileError(f"{path}: there is no such file; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        what = "it" if first else "which a reward imports,"
        raise RewardFileError(
            f"{path}: {what} cannot be read ({error_text(error)}): save it in UTF-8 where this user can read it"
        ) from None


def _imports(text: str, path: str) -> list[str]:
    names: dict[str, None] = {}
    for node in ast.walk(_parsed(text, path)):
        if isinstance(node, ast.Import):
            names.update((alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names[node.module.partition(".")[0]] = None
    return [name for name in names if name not in sys.stdlib_module_names]


def _beside(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    if (folder / name / "__init__.py").is_file():
        for path in sorted((folder / name).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    elif (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py", name


@lru_cache(maxsize=256)
def _parsed(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RewardFileError(f"{path}: it is not Python ({why}{line}): correct it") from None


def read_signature(part: Part) -> Signature | None:
    """The signature that the file gives the function; None if only running the file tells.

    Raises:
        RewardFileError: there is no such file, it is not Python, or it has no such function.
    """
    found = statement_of(part)
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list:
        return _signature(found)
    return None


def rewards_in(file: str, columns: Collection[str]) -> dict[str, str]:
    """The functions of a file that can score rows of these columns, with their forms; first those
    that read the reference answer or another column. None of a script, which would run.

    Raises:
        RewardFileError: it cannot be read, or is not Python.
    """
    body = _parsed(modules_of(file)[0].text, file).body
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in body):
        return {}
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {node.name: _signature(node) for node in functions if not node.decorator_list and not node.name.startswith("_")}
    usable = [name for name, each in found.items() if each.form not in ("", "judge") and not each.problem(columns)]
    return {name: found[name].form for name in sorted(usable, key=lambda name: not found[name].required - GROUP_WORDS)}


def statement_of(part: Part) -> ast.stmt | None:
    """The statement that binds the function, or the class, at the file's top level; None if only
    running the file tells. Raises RewardFileError as `read_signature`.
    """
    names = {name: node for name, nodes in _bound(part.file).items() for node in nodes}
    if part.function not in names and "*" not in names:
        functions = [
            name for name, node in names.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        has = f"it has {listed(functions, 10)}" if functions else "it has no function"
        hint = did_you_mean(part.function, names) or has
        raise RewardFileError(f"{part.file}: it has no function {part.function}; {hint}")
    return names.get(part.function)


def _bound(file: str) -> dict[str, list[ast.stmt]]:
    """The names at the file's top level, and the statements that bind them. Raises
    RewardFileError.
    """
    bound: dict[str, list[ast.stmt]] = {}
    for node in _top_level(_parsed(modules_of(file)[0].text, file).body):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        for name in names:
            bound.setdefault(name, []).append(node)
    return bound


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for inner in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from _top_level(inner)
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


_Code = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _signature(code: _Code) -> Signature:
    given = code.args
    names = tuple(each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    more = _more(code)
    reads = any(isinstance(each, ast.Name) and each.id == more for each in _inside(code))
    return Signature(names, frozenset(names) - _defaults(code).keys(), bool(more), bool(more) and reads, _read_of_more(code))


def _defaults(code: _Code) -> dict[str, str]:
    """The parameters that have a default, with its text."""
    given = code.args
    positional = (*given.posonlyargs, *given.args)
    found = list(zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True))
    found += [(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None]
    return {each.arg: ast.unparse(default) for each, default in found}


def _more(code: _Code) -> str:
    """The name of its `**columns`; empty if it has none."""
    return code.args.kwarg.arg if code.args.kwarg else ""


def _inside(code: _Code) -> Iterator[ast.AST]:
    for statement in code.body if isinstance(code.body, list) else [code.body]:
        yield from ast.walk(statement)


def _read_of_more(code: _Code) -> frozenset[str]:
    """The names that it reads of its `**columns` by `columns["name"]`, `.get("name")` or
    `.pop("name")`.
    """
    found: list[tuple[ast.expr, ast.expr]] = []
    for each in _inside(code):
        if isinstance(each, ast.Subscript):
            found.append((each.value, each.slice))
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in ("get", "pop"):
            found += [(each.func.value, key) for key in each.args[:1]]
    return frozenset(
        key.value
        for of, key in found
        if isinstance(of, ast.Name) and of.id == _more(code) and isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


def _code_of(file: str, name: str, bound: Collection[str] = ()) -> _Code | None:
    """The code that a name at the file's top level calls: a function, decorated or not, a lambda,
    `functools.partial` of one, or an object with `__call__`; None for another. Raises
    RewardFileError.
    """
    found = _bound(file).get(name, [])
    value = found[-1] if found else None
    if isinstance(value, ast.Assign | ast.AnnAssign):
        value = value.value  # type: ignore[assignment]
    if isinstance(value, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return value
    if not isinstance(value, ast.Call) or name in bound:
        return None
    called = value.func
    if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "partial":
        first = value.args[0] if value.args else None
        return _code_of(file, first.id, (*bound, name)) if isinstance(first, ast.Name) else None
    of_class = _bound(file).get(getattr(called, "id", ""), [])
    body = of_class[-1].body if of_class and isinstance(of_class[-1], ast.ClassDef) else []
    methods = (each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((each for each in methods if each.name == "__call__"), None)


def reward_problems(verifier: str, columns: Collection[str] | None = None) -> Iterator[str]:
    """List what is wrong with rewards, as far as it can be told without running them. `columns`:
    those of the rows that they score, if known.
    """
    for part in parts_of(verifier):
        if not part.file:
            continue
        try:
            signature = read_signature(part)
        except RewardFileError as error:
            yield str(error)
            continue
        if signature is not None and (problem := signature.problem(columns)):
            yield f"{part.file}: {part.function}: {problem}"
        elif signature is not None and signature.form == "judge":
            yield from _requests_problems(part)


def _requests_problems(part: Part) -> Iterator[str]:
    try:
        asks = read_signature(Part(f"{part.file}:{REQUESTS}"))
    except RewardFileError as error:
        yield f"{error}: beside {part.function}(task, answer, replies) write {REQUESTS}(task, answer), which returns texts"
        return
    if asks is not None and (not {"task", "answer"} <= {*asks.names} or asks.required - {"task", "answer"}):
        yield f"{part.file}: {REQUESTS}: its parameters are ({', '.join(asks.names)}): write {REQUESTS}(task, answer)"
