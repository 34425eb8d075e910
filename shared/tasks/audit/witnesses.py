"""Finds a right answer to a task whose dataset gives none, from its metadata or by search."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from itertools import product
from typing import Any

from shared.contracts.messages import Task

MAX_STATES = 60_000
"""Largest number of positions that the search in the traffic puzzle visits, about half a second."""


def right_answers(task: Task) -> list[str]:
    """Answers that should earn full marks; usually one. Several, best guess first, if only scoring
    can tell; none if unknown.
    """
    if task.answer is not None and "Integral(" not in task.answer:
        return [task.answer]
    if task.ref.dataset == "rush_hour":
        return _traffic(task.question)
    search = _SEARCHES.get(task.ref.dataset)
    return search(json.loads(task.metadata)) if search else []


def _coloring(metadata: dict[str, Any]) -> list[str]:
    colors = metadata["possible_answer"]
    return [json.dumps({str(vertex): color for vertex, color in colors.items()})] if colors else []


def _cube(metadata: dict[str, Any]) -> list[str]:
    return [metadata["example_correct_answer"]] if metadata["example_correct_answer"] else []


def _conclusion(metadata: dict[str, Any]) -> list[str]:
    literals = [sign + name for name in metadata["variables"] for sign in ("", "¬")]
    pairs = [f"({a} {operator} {b})" for a, b in product(literals, literals) for operator in "∨∧→" if a < b]
    return [metadata["example_answer"], *pairs]


def _boxes(metadata: dict[str, Any]) -> list[str]:
    """Moves each box to a target of its colour, first along x and then along y, one box after the
    other. Any right plan will do. If a box has no target, there is no plan.
    """
    squares = {tuple(map(float, name.split("_"))): list(items) for name, items in metadata["initial_state"].items()}
    targets: dict[str, list[tuple[float, ...]]] = {}
    for at, items in squares.items():
        for item in items:
            targets.setdefault(item, []).append(at)
    steps = []
    for (x, y), items in list(squares.items()):
        for box in [item for item in items if item.startswith("box_")]:
            target = box.replace("box_", "target_")
            if not targets.get(target):
                return []
            at_x, at_y = x, y
            to_x, to_y = targets[target].pop()
            while (at_x, at_y) != (to_x, to_y):
                next_x, next_y = at_x, at_y
                if at_x != to_x:
                    next_x += 1 if to_x > at_x else -1
                else:
                    next_y += 1 if to_y > at_y else -1
                steps.append({f"Agent[{at_x}, {at_y}]": f"move({box}, square[{next_x}, {next_y}])"})
                at_x, at_y = next_x, next_y
            steps.append({f"Agent[{at_x}, {at_y}]": f"move({box}, {target})"})
    return [json.dumps(steps)]


def _traffic(question: str) -> list[str]:
    """Shortest solution, by breadth-first search over the 36 squares of the board. Cars are named
    in the question as in moves.
    """
    board = re.sub(r"\s", "", question.split("Board:")[1])
    queue: deque[tuple[str, list[str]]] = deque([(board, [])])
    seen = {board}
    while queue and len(seen) < MAX_STATES:
        state, path = queue.popleft()
        if state[16:18] == "AA":
            return [" ".join(path)]
        for car in sorted(set(state) - {".", "x"}):
            squares = [at for at, mark in enumerate(state) if mark == car]
            stride = squares[1] - squares[0]
            for step in (-1, 1):
                ahead = (squares[-1] if step > 0 else squares[0]) + step * stride
                same_row = stride == 6 or ahead // 6 == squares[0] // 6
                if not 0 <= ahead < 36 or not same_row or state[ahead] != ".":
                    continue
                moved = list(state)
                moved[ahead], moved[squares[0] if step > 0 else squares[-1]] = car, "."
                following = "".join(moved)
                if following not in seen:
                    seen.add(following)
                    queue.append((following, [*path, f"{car}{step:+d}"]))
    return []


_SEARCHES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "boxnet": _boxes,
    "graph_color": _coloring,
    "propositional_logic": _conclusion,
    "rubiks_cube": _cube,
}
