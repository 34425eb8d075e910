"""Finds what no code of the product uses: a module's functions, classes and constants, and methods.

A use is a name in the module itself, an import by another or an attribute of the module there; or a
string that names module and attribute as entry points and registries do. Being handed on by an
`__init__.py` is none, and neither is a function's own recursion. Methods are compared by name only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PATH = re.compile(r"([\w.]*)[.:](\w+)")
_CALLING = {"command", "callback", "field_validator", "model_validator", "check"}
"""Decorators that have what they decorate called: typer's, pydantic's and the border's."""


@dataclass
class Uses:
    """What one file uses. bare: the lines on which a name stands. of_modules: by name the modules
    or packages that it is taken from; an empty one stands for any.
    """

    bare: dict[str, list[int]] = field(default_factory=dict)
    of_modules: list[tuple[str, str]] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)


def uncalled(product: Mapping[str, ast.Module], others: Mapping[str, ast.Module], allowed: Mapping[str, str]) -> list[str]:
    """`file: name` of everything in `product` that neither it nor `others` use.

    allowed: reasons, by `file: name` or by name alone.
    """
    uses = {file: _uses(file, tree) for file, tree in [*product.items(), *others.items()]}
    taken: dict[str, set[str]] = {}
    for each in uses.values():
        for module, name in each.of_modules:
            taken.setdefault(name, set()).add(module)
    attributes = {name for each in uses.values() for name in each.attributes}
    found = []
    for file, tree in product.items():
        here = _module(file)
        for name, node in _defined(tree):
            is_taken = not name.startswith("_") and any(
                module in ("", here) or here.startswith(f"{module}.") for module in taken.get(name, ())
            )
            if not is_taken and not any(_is_beside(line, node) for line in uses[file].bare.get(name, ())):
                found.append(f"{file}: {name}")
        found += [f"{file}: {name}" for name in _methods(tree) if name not in attributes]
    return [each for each in found if each not in allowed and each.rpartition(" ")[2] not in allowed]


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_beside(line: int, node: ast.stmt) -> bool:
    return not isinstance(node, Function | ast.ClassDef) or not node.lineno <= line <= (node.end_lineno or 0)


def _uses(file: str, tree: ast.Module) -> Uses:
    """What an `__init__.py` imports counts if it does more with it than hand it on."""
    found = Uses()
    hands_on = file.endswith("__init__.py")
    imported: dict[str, tuple[str, str]] = {}
    members: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                found.bare.setdefault(node.id, []).append(node.lineno)
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
            if isinstance(node.value, ast.Name):
                members.append((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom):
            imported |= {each.asname or each.name: (node.module or "", each.name) for each in node.names}
        elif isinstance(node, ast.Import):
            imported |= {each.asname: ("", each.name) for each in node.names if each.asname}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not hands_on:
            if path := _PATH.fullmatch(node.value):
                found.of_modules.append((path[1], path[2]))
            elif node.value.isidentifier():
                found.attributes.add(node.value)  # a method that another process is asked for by name
    found.of_modules += [path for name, path in imported.items() if not hands_on or name in found.bare]
    found.of_modules += [(".".join(filter(None, imported[name])), member) for name, member in members if name in imported]
    return found


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, Function | ast.ClassDef):
            names = [] if _is_called(node) else [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        yield from ((name, node) for name in names if not name.startswith("__"))


def _methods(tree: ast.Module) -> Iterator[str]:
    for each in ast.walk(tree):
        for node in each.body if isinstance(each, ast.ClassDef) else ():
            if isinstance(node, Function) and not node.name.startswith("__") and not _is_called(node):
                yield node.name


def _is_called(node: Function | ast.ClassDef) -> bool:
    return any(not _CALLING.isdisjoint(re.findall(r"\w+", ast.unparse(each).partition("(")[0])) for each in node.decorator_list)
