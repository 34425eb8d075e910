"""Checks that the solution of a puzzle is right as a whole: nothing but the solution, and every
step allowed by the rules.

This is checked before reasoning-gym's simulation (`..._is_readable`), or after it if the simulation
skips what it does not understand.
"""

from __future__ import annotations

import re
from typing import Any

from shared.tasks.strict_json import read_json

MAX_MOVES = 1000
"""More moves than any of the puzzles needs; longer answers are not simulated."""
MAX_CUBE_MOVES = 200
MAX_CUBE_WORK = 20_000
"""Largest product of turns and stickers per face; 200 turns of a cube of ten take about 0.1 s."""

_CUBE_MOVE = re.compile(r"([0-9]{0,2})(?:[LRDUBF]w?|[XYZMES])'?([0-9]{0,2})")
_CAR_MOVE = re.compile(r"[A-Z][+-][0-9]")
_JUG_MOVE = re.compile(r"(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z]")
_DISK_MOVE = re.compile(r"Move disk [0-9]{1,3} from Peg [0-9]{1,3} to Peg [0-9]{1,3}")
_PRESSES = re.compile(r"[A-Ca-c](?:\s*(?:→|->|,|\s)\s*[A-Ca-c]){0,99}")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z])\s*=\s*[0-9]\s*")
_AGENT = re.compile(r"Agent\[\s*([0-9]{1,4}(?:\.[0-9])?)\s*,\s*([0-9]{1,4}(?:\.[0-9])?)\s*\]")
_BOX_MOVE = re.compile(
    r"move\(\s*box_(\w{1,32})\s*,\s*(?:target_(\w{1,32})|square\[\s*([0-9]{1,4}\.[0-9])\s*,\s*([0-9]{1,4}\.[0-9])\s*\])\s*\)"
)


def is_readable_cube(answer: str, entry: dict[str, Any]) -> bool:
    """Moves of the cube and nothing else, few enough to simulate quickly."""
    moves = [_CUBE_MOVE.fullmatch(move) for move in answer.split()]
    if len(moves) > MAX_CUBE_MOVES or None in moves:
        return False
    turns = sum(int(move[2] or 1) for move in moves if move is not None)
    return turns <= MAX_CUBE_MOVES and turns * int(entry["metadata"]["cube_size"]) ** 2 <= MAX_CUBE_WORK


def is_readable_traffic(answer: str, entry: dict[str, Any]) -> bool:
    """Moves of cars and nothing else."""
    moves = answer.split()
    return 0 < len(moves) <= MAX_MOVES and all(_CAR_MOVE.fullmatch(move) for move in moves)


def legal_traffic(answer: str, entry: dict[str, Any]) -> bool:
    """Every car can move as far as the answer says. reasoning-gym lets a blocked car go as far as
    it can.
    """
    from reasoning_gym.games.rush_hour import Board

    board = Board(entry["metadata"]["board_config"])
    pieces = board._pieces
    for move in answer.split():
        piece = pieces[ord(move[0]) - ord("A")]
        before = piece.position
        board.perform_moves(move)
        if piece.fixed or piece.position != before + int(move[1:]) * piece.stride:
            return False
    return bool(board.solved)


def is_readable_sokoban(answer: str, entry: dict[str, Any]) -> bool:
    """Letters that are moves and nothing else."""
    return len(answer) <= MAX_MOVES and re.fullmatch(r"[LDUR]+", answer) is not None


def is_readable_jugs(answer: str, entry: dict[str, Any]) -> bool:
    """A JSON list of moves and nothing else."""
    moves = read_json(answer)
    return isinstance(moves, list) and len(moves) <= MAX_MOVES and all(isinstance(m, str) and _JUG_MOVE.fullmatch(m) for m in moves)


def is_readable_hanoi(answer: str, entry: dict[str, Any]) -> bool:
    """Lines that are moves and nothing else."""
    return all(_DISK_MOVE.fullmatch(line.strip()) for line in answer.splitlines() if line.strip())


def is_readable_presses(answer: str, entry: dict[str, Any]) -> bool:
    """Buttons separated by arrows, commas or spaces, and nothing else."""
    return _PRESSES.fullmatch(answer) is not None


def usable_presses(answer: str, entry: dict[str, Any]) -> bool:
    """The light allows every button press. reasoning-gym skips presses that it forbids, but counts
    them.
    """
    metadata = entry["metadata"]
    buttons = {button["name"]: button for button in metadata["buttons"]}
    value, light = metadata["initial_value"], metadata["initial_state"]
    presses = re.findall(r"[A-C]", answer.upper())
    for press in presses:
        button = buttons[press]
        if button["active_state"] not in (light, "any"):
            return False
        amount = button["value"]
        value = {"add": value + amount, "subtract": value - amount, "multiply": value * amount}[button["type"]]
        light = "green" if light == "red" else "red"
    return bool(value == metadata["target_value"]) and len(presses) <= len(metadata["solution_path"])


def is_readable_cryptarithm(answer: str, entry: dict[str, Any]) -> bool:
    """Each letter occurs once. If a letter has two digits, reasoning-gym takes the last."""
    pairs = [_ASSIGNMENT.fullmatch(pair) for pair in answer.split(",")[:27]]
    letters = [pair[1] for pair in pairs if pair is not None]
    return len(letters) == len(pairs) == len(set(letters))


def is_readable_coloring(answer: str, entry: dict[str, Any]) -> bool:
    """A colour, as an integer, for each vertex and for nothing else."""
    colors = read_json(answer)
    vertices = {str(vertex) for vertex in entry["metadata"]["puzzle"]["vertices"]}
    return isinstance(colors, dict) and colors.keys() == vertices and all(type(color) is int for color in colors.values())


def is_readable_knight_swap(answer: str, entry: dict[str, Any]) -> bool:
    """`No`, or a JSON list of strings."""
    if answer.lower() == "no":
        return True
    moves = read_json(answer)
    return isinstance(moves, list) and len(moves) <= MAX_MOVES and all(isinstance(move, str) for move in moves)


def is_bit_grid(answer: str, entry: dict[str, Any]) -> bool:
    """Rows of 0 and 1 separated by spaces, and nothing else."""
    return all(cell in ("0", "1") for row in answer.split("\n") for cell in row.split())


def is_integer_grid(answer: str, entry: dict[str, Any]) -> bool:
    """Rows of integers separated by spaces, and nothing else."""
    return all(re.fullmatch(r"-?[0-9]{1,18}", cell) for row in answer.split("\n") for cell in row.split())


def anagram_groups(answer: str, entry: dict[str, Any]) -> bool:
    """The same groups, in any order, with their words in any order."""
    return _lists_of_words(answer) == sorted(sorted(group) for group in entry["metadata"]["solution"])


def palindrome_partitions(answer: str, entry: dict[str, Any]) -> bool:
    """Every partition, each exactly once."""
    given = read_json(answer)
    if not isinstance(given, list) or not all(isinstance(part, list) for part in given):
        return False
    partitions = [tuple(part) for part in given]
    return len(set(partitions)) == len(partitions) and set(partitions) == {tuple(part) for part in entry["metadata"]["solution"]}


def _lists_of_words(text: str) -> list[list[str]] | None:
    groups = read_json(text)
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return None
    return sorted(sorted(group) for group in groups)


def life_board(answer: str, entry: dict[str, Any]) -> float:
    """Full marks for the right board; otherwise the share of living cells that both boards have in
    common, at most 0.9.

    reasoning-gym's scorer counts dead cells too, so an empty board would earn nearly everything on
    a large one.
    """
    ours, wanted = _cells(answer), _cells(entry["answer"])
    if ours is None or wanted is None or [len(row) for row in ours] != [len(row) for row in wanted]:
        return 0.0
    if ours == wanted:
        return 1.0
    pairs = [pair for row, right in zip(ours, wanted, strict=True) for pair in zip(row, right, strict=True)]
    return 0.9 * sum(a and b for a, b in pairs) / sum(a or b for a, b in pairs)


def _cells(text: str) -> list[list[int]] | None:
    board = read_json(text)
    if not isinstance(board, list) or not all(isinstance(row, list) for row in board):
        return None
    return board if all(type(cell) is int and cell in (0, 1) for row in board for cell in row) else None


def is_readable_box_plan(answer: str, entry: dict[str, Any]) -> bool:
    """A list of steps, each a dictionary from an agent to one move, and nothing else."""
    steps = read_json(answer)
    if not isinstance(steps, list) or len(steps) > MAX_MOVES:
        return False
    return all(
        isinstance(step, dict)
        and all(_AGENT.fullmatch(agent) and isinstance(move, str) and _BOX_MOVE.fullmatch(move) for agent, move in step.items())
        for step in steps
    )


def legal_box_plan(answer: str, entry: dict[str, Any]) -> bool:
    """Every move takes a box from its agent's square to its target there or to a neighbouring
    square, and no box is left at the end.
    """
    squares = {name: list(items) for name, items in entry["metadata"]["initial_state"].items()}
    for step in read_json(answer):
        for agent, move in step.items():
            at, to = _AGENT.fullmatch(agent), _BOX_MOVE.fullmatch(move)
            if at is None or to is None:
                return False
            here, box = squares.get(f"{float(at[1])}_{float(at[2])}", []), f"box_{to[1]}"
            if box not in here:
                return False
            here.remove(box)
            if to[2] is not None:
                if to[2] != to[1] or f"target_{to[2]}" not in here:
                    return False
                here.remove(f"target_{to[2]}")
                continue
            x, y = float(to[3]), float(to[4])
            if abs(x - float(at[1])) + abs(y - float(at[2])) != 1 or f"{x}_{y}" not in squares:
                return False
            squares[f"{x}_{y}"].append(box)
    return not any(item.startswith("box_") for items in squares.values() for item in items)
