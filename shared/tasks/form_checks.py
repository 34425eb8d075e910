"""Checks that an answer which consists of words or text is right as a whole."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from shared.tasks.numerals import MAX_PLACES, decimal_places, read_number, rounds_from
from shared.tasks.plain_expression import is_plain_expression

Check = Callable[[str, dict[str, Any]], bool]
"""Tells whether an answer is right, or readable, as a whole, given reasoning-gym's raw entry. A
ValueError counts as no.
"""


def _same(usual: Callable[[str], Any]) -> Check:
    """The reference answer, as far as `usual` of both tells."""
    return lambda answer, entry: bool(usual(answer) == usual(str(entry["answer"])))


same_text = _same(str)
same_text_any_case = _same(lambda text: text.strip().lower())
same_letters = _same(lambda text: text.replace(" ", "").lower())
same_tokens = _same(str.split)
same_tokens_any_case = _same(lambda text: text.lower().split())
same_rows = _same(lambda text: [row.split() for row in text.strip().split("\n")])
same_board = _same(lambda text: "".join(text.split()))


def word_list(answer: str, entry: dict[str, Any]) -> bool:
    """The sorted words separated by commas, ignoring space around them."""
    return bool([word.strip() for word in answer.split(",")] == entry["metadata"]["sorted_words"])


def role_statement(answer: str, entry: dict[str, Any]) -> bool:
    """Every inhabitant once, each followed by one of the two roles, with nothing but `is`, `a`,
    `an` and `and` between them.
    """
    if len(answer) > 2 * len(entry["answer"]):
        return False
    words = re.sub(r"[.,()]", " ", answer.lower()).split()
    names = {name.lower() for name in entry["metadata"]["names"]}
    roles = {role.lower() for role in _plain_roles(entry)}
    found = []
    for word in words:
        if word in names or word in roles:
            found.append(word)
        elif word not in ("is", "a", "an", "and"):
            return False
    people = found[::2]
    return len(found) == 2 * len(names) and set(people) == names and all(word in roles for word in found[1::2])


def _plain_roles(entry: dict[str, Any]) -> list[str]:
    terms = entry["metadata"]["knight_knave_terms"]
    return [terms["knight"], terms["knave"]]


def same_document(answer: str, entry: dict[str, Any]) -> bool:
    """The same JSON document, all of it; `1` and `1.0` differ."""
    return answer == entry["answer"].strip() or same_json(read_json(answer), read_json(entry["answer"]))


# Checks that an answer which is a number, or consists of numbers, is right as a whole.


_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_PREFIXED = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,400}|0[bB][01]{1,400}|0[oO][0-7]{1,400}|[0-9]{1,400})")
_FRACTION = re.compile(
    r"(?:(\$)?\s*\\d?frac\s*\{\s*([0-9]{1,30})\s*\}\s*\{\s*([0-9]{1,30})\s*\}\s*(\$)?"
    r"|(\$)?\s*([0-9]{1,30})\s*/\s*([0-9]{1,30})\s*(\$)?)",
    re.IGNORECASE,
)
_RATIO = re.compile(r"[0-9]{1,400}/0*[1-9][0-9]{0,400}")
_INTEGERS = re.compile(r"-?[0-9]{1,18}")
_INTEGER_LIST = re.compile(r"\[ *-?[0-9]{1,18}(?: *, *-?[0-9]{1,18})* *\]")
_LONG_DECIMALS = re.compile(rf"\.0*[1-9][0-9]{{{MAX_PLACES}}}")
_FACTORS = re.compile(r"[0-9]{1,60}(?:\s*×\s*[0-9]{1,60})*")
_POINT = re.compile(r"\(?\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)?")


def same_number(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer's value, in any notation of `read_number`."""
    value = read_number(answer)
    return value is not None and value == read_number(str(entry["answer"]))


def same_integer(answer: str, entry: dict[str, Any]) -> bool:
    """The same integer, with a sign or leading zeros."""
    return _INTEGER.fullmatch(answer) is not None and int(answer) == int(entry["answer"])


def is_prefixed_integer(answer: str, entry: dict[str, Any]) -> bool:
    """An integer in decimal, hexadecimal, octal or binary, and nothing else."""
    return _PREFIXED.fullmatch(answer) is not None


def is_number(answer: str, entry: dict[str, Any]) -> bool:
    """One number with no more decimal places than are compared, and nothing else."""
    return read_number(answer) is not None and not _LONG_DECIMALS.search(answer)


def near_decimal(answer: str, entry: dict[str, Any]) -> bool:
    """The value or a rounding of it. The dataset's own tolerance, which a configuration sets, must
    hold as well.
    """
    exact = read_number(entry["answer"])
    return exact is not None and rounds_from(answer, exact, 1)


def probability(answer: str, entry: dict[str, Any]) -> bool:
    """The value as a fraction or decimal, or rounded to at least four decimal places."""
    text, ratio = answer.replace(" ", ""), entry["metadata"]["rational"]
    exact = Fraction(ratio["numerator"], ratio["denominator"])
    if _RATIO.fullmatch(text):
        return Fraction(text) == exact
    return rounds_from(text, exact, 4) or rounds_from(text, Fraction(entry["answer"]), 4)


def whole_complex(answer: str, entry: dict[str, Any]) -> bool:
    """Every result is a whole complex number, so rounding explains at most half a unit of the
    second decimal place.
    """
    if _LONG_DECIMALS.search(answer):
        return False
    text = re.sub(r"\s", "", answer).lower().replace("i", "j").strip("()")
    text = re.sub(r"(?<![0-9.])j", "1j", text)
    return abs(complex(text) - complex(*entry["metadata"]["result"])) <= 0.005


def simplified_fraction(answer: str, entry: dict[str, Any]) -> bool:
    """The simplified fraction with a slash or in LaTeX, and nothing else."""
    match = _FRACTION.fullmatch(answer)
    if match is None:
        return False
    opening, top, bottom, closing = match.group(1, 2, 3, 4) if match[2] else match.group(5, 6, 7, 8)
    metadata = entry["metadata"]
    wanted = (metadata["simplified_numerator"], metadata["simplified_denominator"])
    return opening == closing and (int(top), int(bottom)) == wanted


def factor_list(answer: str, entry: dict[str, Any]) -> bool:
    """Integers with multiplication signs between them, and nothing else."""
    return _FACTORS.fullmatch(answer) is not None


def nearest_candidate(answer: str, entry: dict[str, Any]) -> bool:
    """The right one of the numbers offered, as it is offered or rounded to at least two decimal
    places.
    """
    metadata = entry["metadata"]
    offered = metadata["formatted_candidates"][metadata["candidates"].index(metadata["solution"])]
    return read_number(answer) == read_number(offered) or rounds_from(answer, Fraction(metadata["solution"]), 2)


def number_list(answer: str, entry: dict[str, Any]) -> bool:
    """The same values in the same order, each as a number or as a string that contains one."""
    ours, wanted = (_values(text) for text in (answer, entry["answer"]))
    return ours is not None and ours == wanted


def integer_list(answer: str, entry: dict[str, Any]) -> bool:
    """The same list of integers, with any spacing."""
    lists = [
        [int(number) for number in _INTEGERS.findall(text)] for text in (answer, entry["answer"]) if _INTEGER_LIST.fullmatch(text)
    ]
    return len(lists) == 2 and lists[0] == lists[1]


def _values(text: str) -> list[Fraction | None] | None:
    found = read_json(text.replace("'", '"'))
    if not isinstance(found, list):
        return None
    values = [read_number(item if isinstance(item, str) else repr(item)) for item in found]
    return None if None in values else values


def root_list(answer: str, entry: dict[str, Any]) -> bool:
    """As many roots as there are, in any order, each right to four decimal places. An empty answer
    means no roots.
    """
    roots = [Fraction(part.strip()) for part in entry["answer"].split(",") if part.strip()]
    if not roots:
        return answer in ("", '""')
    given = sorted(answer.split(","), key=lambda part: read_number(part) or 0)
    if len(given) != len(roots) or any(read_number(part) is None or decimal_places(part) > MAX_PLACES for part in given):
        return False
    # The reference answer is itself rounded to four decimal places, so a longer expansion differs
    # from it by up to half a unit.
    values = [read_number(part) for part in given]
    return all(value is not None and abs(value - root) * 20_000 <= 1 for value, root in zip(values, sorted(roots), strict=True))


def is_number_list(answer: str, entry: dict[str, Any]) -> bool:
    """Numbers separated by commas, and nothing else."""
    return answer in ("", '""') or all(read_number(part) is not None for part in answer.split(","))


def pooled_matrix(answer: str, entry: dict[str, Any]) -> bool:
    """Each element is right to two decimal places."""
    ours, exact = answer.split("\n"), entry["answer"].split("\n")
    if len(ours) != len(exact):
        return False
    for row, wanted in zip(ours, exact, strict=True):
        cells, right = row.split(), [Fraction(number) for number in wanted.split()]
        values = [read_number(cell) for cell in cells]
        if len(cells) != len(right) or None in values:
            return False
        if any(decimal_places(cell) > MAX_PLACES for cell in cells):
            return False
        if any(value is not None and abs(value - number) * 200 > 1 for value, number in zip(values, right, strict=True)):
            return False
    return True


def is_number_grid(answer: str, entry: dict[str, Any]) -> bool:
    """Rows of numbers and nothing else."""
    return len(answer) <= 100_000 and all(read_number(cell) is not None for row in answer.split("\n") for cell in row.split())


def geometry(answer: str, entry: dict[str, Any]) -> bool:
    """A number (for an angle, optionally with a degree sign) or a point, and nothing else."""
    kind = entry["metadata"]["task_type"]
    if kind == "angle_measure":
        return is_number(answer.removesuffix("°"), entry)
    if kind == "orthocenter":
        match = _POINT.fullmatch(answer)
        return match is not None and all(is_number(part, entry) for part in match.groups())
    return is_number(answer, entry)


# Checks that the solution of a puzzle is right as a whole: nothing but the solution, and every step
# allowed by the rules.
#
# This is checked before reasoning-gym's simulation (`..._is_readable`), or after it if the
# simulation skips what it does not understand.


MAX_CHARS = 65_536
MAX_MOVES = 1000
"""More moves than any of the puzzles needs; longer answers are not simulated."""
MAX_CUBE_MOVES = 200
MAX_CUBE_WORK = 20_000
"""Largest product of turns and stickers per face; 200 turns of a cube of ten take about 0.1 s."""

_CUBE_MOVE = re.compile(r"([0-9]{0,2})(?:[LRDUBF]w?|[XYZMES])'?([0-9]{0,2})")
_JUG_MOVE = re.compile(r"(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z]")
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


def _parts(pattern: str, split: Callable[[str], list[str]] = str.split, most: int = MAX_CHARS) -> Check:
    """Parts that match the pattern, and nothing else."""
    part = re.compile(pattern)
    return lambda answer, entry: len(parts := split(answer)) <= most and all(map(part.fullmatch, parts))


is_readable_traffic = _parts(r"[A-Z][+-][0-9]", most=MAX_MOVES)
is_readable_sokoban = _parts("[LDUR]", list, MAX_MOVES)
is_readable_hanoi = _parts(r"\s*(?:Move disk [0-9]{1,3} from Peg [0-9]{1,3} to Peg [0-9]{1,3})?\s*", str.splitlines)
is_bit_grid = _parts("[01]")
is_integer_grid = _parts(r"-?[0-9]{1,18}")


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


def is_readable_jugs(answer: str, entry: dict[str, Any]) -> bool:
    """A JSON list of moves and nothing else."""
    moves = read_json(answer)
    return isinstance(moves, list) and len(moves) <= MAX_MOVES and all(isinstance(m, str) and _JUG_MOVE.fullmatch(m) for m in moves)


def is_readable_presses(answer: str, entry: dict[str, Any]) -> bool:
    """Buttons separated by arrows, commas or spaces, and nothing else."""
    return _PRESSES.fullmatch(answer) is not None


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


def is_lists_of_words(answer: str, entry: dict[str, Any]) -> bool:
    """A JSON list of lists and nothing else: of an object, reasoning-gym would take the keys."""
    groups = read_json(answer)
    return isinstance(groups, list) and all(isinstance(group, list) for group in groups)


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


# Checks of what reasoning-gym would pass to `eval` or to sympy's parser, or compute for ever. Which
# scorers do was found by testing every scorer of reasoning-gym 0.1.25 with hostile answers.


_COMPLEX = re.compile(r"[0-9+\-.ijIJ() eE]{1,200}")
_HUGE_EXPONENT = re.compile(r"[eE][+-]?[0-9_]{4}")
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9]{0,7}")
_CONSTANT_NAMES = frozenset(string.ascii_letters) | {"C0", "C1", "C_0", "C_1"}
"""Names that a model may use for the constant of integration."""
_SYMPY_NAMES = frozenset({"nan", "NaN", "oo", "zoo", "inf", "E", "I", "N", "O", "Q", "S", "pi", "beta", "gamma", "zeta", "lambda"})
"""Names that sympy's parser does not read as a variable; `nan` would equal every polynomial."""
MAX_COEFFICIENT_DIGITS = 60
"""Largest coefficient of a product of polynomials, in digits; the larger levels of reasoning-gym's
curriculum reach 25.
"""
_NUMBER_LIST = re.compile(r"[\[\]0-9eE+\-., '\"]*")


def is_integral(answer: str, entry: dict[str, Any]) -> bool:
    """An expression of the integrand's variable and letters for the constant."""
    variable = entry["metadata"]["variable"]
    names = {variable} | _CONSTANT_NAMES
    texts = (entry["metadata"]["integrand"], answer)
    return _SYMBOL.fullmatch(variable) is not None and all(is_plain_expression(text, names) for text in texts)


def is_polynomial(answer: str, entry: dict[str, Any]) -> bool:
    """An expression of the variables, which sympy reads as such."""
    names = set(entry["metadata"]["variables"])
    return (
        names.isdisjoint(_SYMPY_NAMES)
        and all(_SYMBOL.fullmatch(name) for name in names)
        and all(is_plain_expression(text, names, MAX_COEFFICIENT_DIGITS) for text in (entry["answer"], answer))
    )


def is_complex(answer: str, entry: dict[str, Any]) -> bool:
    """Excludes the letters of nan and inf, because a distance that is not a number would earn full
    marks.
    """
    return _COMPLEX.fullmatch(answer) is not None


def is_probability(answer: str, entry: dict[str, Any]) -> bool:
    """Text that becomes a fraction of usual size."""
    return len(answer) <= 1000 and not _HUGE_EXPONENT.search(answer)


def has_number_list(answer: str, entry: dict[str, Any]) -> bool:
    """The scorer falls back to `eval` of the task's own answer if that is not JSON."""
    return _NUMBER_LIST.fullmatch(entry["answer"]) is not None


# Strict JSON, in which nothing can be hidden: no duplicate keys, no NaN or infinities, limited
# length and depth.


MAX_JSON_DEPTH = 12
MAX_NUMBER_DIGITS, MAX_NUMBER_CHARS = 17, 25
"""Most digits that count, and characters, of a number with a point or an exponent. A double has no
more digits, and further ones would be text that is not compared.
"""


def read_json(text: str) -> Any:
    """The value that the whole of `text` represents.

    Raises:
        ValueError: not JSON, a duplicate key, `NaN` or `Infinity`, too long, nested more than
            `MAX_JSON_DEPTH` deep, or a number with more digits than a double has.
    """
    if len(text) > MAX_CHARS:
        raise ValueError("too long")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _bound(value, MAX_JSON_DEPTH)
    return value


def same_json(left: Any, right: Any) -> bool:
    """Equality in which `1`, `1.0` and `true` are three different values, unlike in Python."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_json(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _float(text: str) -> float:
    digits = text.lower().partition("e")[0].replace(".", "").lstrip("-0")
    if len(text) > MAX_NUMBER_CHARS or len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError("a number with too many digits")
    return float(text)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _bound(value: Any, depth: int) -> None:
    if depth < 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list) or not isinstance(value, str | int | float | bool | None):
        for item in value:
            _bound(item, depth - 1)
