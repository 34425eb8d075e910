"""Forms of answers: what earns full marks in a dataset of reasoning-gym besides its reference.

reasoning-gym's scorers read what they understand and skip the rest, so a right number with any text
around it, or a right list followed by anything, gets full marks. A `Form` prevents that in two
steps: before the scorer, `reads` decides whether the whole text is an answer; after it, `is_right`
decides whether full marks are deserved. Without a form they are for what says the same as the
reference (`says_the_same`). This also applies to datasets that a newer reasoning-gym adds. A
scorer of this project (`shared.tasks.scorers`) decides alone.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shared.tasks.numerals import MAX_PLACES, decimal_places, read_number, rounds_from
from shared.tasks.plain_expression import is_plain_expression

PARTIAL_CEILING = 0.95
"""Largest reward of an answer that is not right as a whole; below every threshold for "solved"."""

NOT_WHOLE = 0.0
"""Reward of an answer that gets full marks from reasoning-gym but is not right as a whole. It is no
higher than that of a wrong answer; otherwise a group's advantage would reward the text around the
right part.
"""

Check = Callable[[str, dict[str, Any]], bool]
"""Tells whether an answer is right, or readable, as a whole, given reasoning-gym's raw entry. A
ValueError counts as no.
"""


def says_the_same(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer in other case and spacing, or its number in another notation."""
    reference = str(entry["answer"])
    if "".join(answer.split()).lower() == "".join(reference.split()).lower():
        return True
    value = read_number(answer)
    return value is not None and value == read_number(reference)


@dataclass(frozen=True, slots=True)
class Form:
    """Rules by which a dataset's answers are read and judged. `shrinks`: for an answer longer than
    the reference, partial credit is multiplied by the ratio of their lengths.
    """

    reads: Check | None = None
    is_right: Check = says_the_same
    shrinks: bool = False


def _any(answer: str, entry: dict[str, Any]) -> bool:
    """Leave it to reasoning-gym's scorer."""
    return True


def _whole(pattern: str) -> Check:
    """The pattern, and nothing else."""
    whole = re.compile(pattern)
    return lambda answer, entry: whole.fullmatch(answer) is not None


def _parts(pattern: str, split: Callable[[str], list[str]] = str.split, most: int = 1000) -> Check:
    """At most so many parts that match the pattern, and nothing else."""
    part = re.compile(pattern)
    return lambda answer, entry: len(parts := split(answer)) <= most and all(map(part.fullmatch, parts))


# Strict JSON, in which nothing can be hidden: no duplicate keys, no NaN or infinities, limited
# length and depth.

MAX_CHARS = 65_536
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


def same_document(answer: str, entry: dict[str, Any]) -> bool:
    """The same JSON document, all of it; `1` and `1.0` differ."""
    return answer == entry["answer"].strip() or same_json(read_json(answer), read_json(entry["answer"]))


# Numbers and lists of them.

_RATIO = re.compile(r"[0-9]{1,400}/0*[1-9][0-9]{0,400}")
_LONG_DECIMALS = re.compile(rf"\.0*[1-9][0-9]{{{MAX_PLACES}}}")
_FRACTION = re.compile(
    r"(?:(\$)?\s*\\d?frac\s*\{\s*([0-9]{1,30})\s*\}\s*\{\s*([0-9]{1,30})\s*\}\s*(\$)?"
    r"|(\$)?\s*([0-9]{1,30})\s*/\s*([0-9]{1,30})\s*(\$)?)",
    re.IGNORECASE,
)
_POINT = re.compile(r"\(?\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)?")


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


def _values(text: str) -> list[Fraction | None] | None:
    found = read_json(text.replace("'", '"'))
    if not isinstance(found, list):
        return None
    values = [read_number(item if isinstance(item, str) else repr(item)) for item in found]
    return None if None in values else values


def _is_near(given: list[str], wanted: list[str], places: int) -> bool:
    """Check numbers, each right to so many decimal places: the reference is itself a rounding."""
    pairs = [(read_number(one), Fraction(other), decimal_places(one)) for one, other in zip(given, wanted, strict=True)]
    return all(
        value is not None and written <= MAX_PLACES and abs(value - right) * 2 * 10**places <= 1 for value, right, written in pairs
    )


def is_number_list(answer: str, entry: dict[str, Any]) -> bool:
    """Numbers separated by commas, and nothing else; an empty answer means none."""
    return answer in ("", '""') or all(read_number(part) is not None for part in answer.split(","))


def root_list(answer: str, entry: dict[str, Any]) -> bool:
    """As many roots as there are, in any order, each right to four decimal places."""
    roots = [part for part in entry["answer"].split(",") if part.strip()]
    given = [] if answer in ("", '""') else answer.split(",")
    given, roots = (sorted(each, key=lambda part: read_number(part) or 0) for each in (given, roots))
    return len(given) == len(roots) and _is_near(given, roots, 4)


def pooled_matrix(answer: str, entry: dict[str, Any]) -> bool:
    """Each element is right to two decimal places."""
    given, wanted = ([row.split() for row in text.split("\n")] for text in (answer, entry["answer"]))
    return [*map(len, given)] == [*map(len, wanted)] and _is_near(sum(given, []), sum(wanted, []), 2)


def geometry(answer: str, entry: dict[str, Any]) -> bool:
    """A number (for an angle, optionally with a degree sign) or a point, and nothing else."""
    kind = entry["metadata"]["task_type"]
    if kind == "angle_measure":
        return is_number(answer.removesuffix("°"), entry)
    if kind == "orthocenter":
        match = _POINT.fullmatch(answer)
        return match is not None and all(is_number(part, entry) for part in match.groups())
    return is_number(answer, entry)


# Solutions of puzzles: nothing but the solution, and every step allowed by the rules. That is
# checked before reasoning-gym's simulation, or after it if that skips what it does not understand.

MAX_MOVES = 1000
"""More moves than any of the puzzles needs; longer answers are not simulated."""
MAX_CUBE_MOVES = 200
MAX_CUBE_WORK = 20_000
"""Largest product of turns and stickers per face; 200 turns of a cube of ten take about 0.1 s."""

_CUBE_MOVE = re.compile(r"([0-9]{0,2})(?:[LRDUBF]w?|[XYZMES])'?([0-9]{0,2})")
_JUG_MOVE = re.compile(r"(?:fill|empty) [A-Z]|pour [A-Z]->[A-Z]")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z])\s*=\s*[0-9]\s*")
_AGENT = re.compile(r"Agent\[\s*([0-9]{1,4}(?:\.[0-9])?)\s*,\s*([0-9]{1,4}(?:\.[0-9])?)\s*\]")
_BOX_MOVE = re.compile(
    r"move\(\s*box_(\w{1,32})\s*,\s*(?:target_(\w{1,32})|square\[\s*([0-9]{1,4}\.[0-9])\s*,\s*([0-9]{1,4}\.[0-9])\s*\])\s*\)"
)


def role_statement(answer: str, entry: dict[str, Any]) -> bool:
    """Every inhabitant once, each followed by one of the two roles, with nothing but `is`, `a`,
    `an` and `and` between them.
    """
    if len(answer) > 2 * len(entry["answer"]):
        return False
    words = re.sub(r"[.,()]", " ", answer.lower()).split()
    names = {name.lower() for name in entry["metadata"]["names"]}
    roles = {entry["metadata"]["knight_knave_terms"][term].lower() for term in ("knight", "knave")}
    found = []
    for word in words:
        if word in names or word in roles:
            found.append(word)
        elif word not in ("is", "a", "an", "and"):
            return False
    people = found[::2]
    return len(found) == 2 * len(names) and set(people) == names and all(word in roles for word in found[1::2])


def is_readable_cube(answer: str, entry: dict[str, Any]) -> bool:
    """Moves of the cube and nothing else, few enough to simulate quickly."""
    moves = [_CUBE_MOVE.fullmatch(move) for move in answer.split()]
    if len(moves) > MAX_CUBE_MOVES or None in moves:
        return False
    turns = sum(int(move[2] or 1) for move in moves if move is not None)
    return turns <= MAX_CUBE_MOVES and turns * int(entry["metadata"]["cube_size"]) ** 2 <= MAX_CUBE_WORK


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


# Texts that reasoning-gym passes to `eval` or to sympy's parser. Which scorers do was found by
# testing every scorer of reasoning-gym 0.1.25 with hostile answers.

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


FORMS: dict[str, Form] = {
    "advanced_geometry": Form(geometry, _any),
    "bitwise_arithmetic": Form(_whole(r"[+-]?(?:0[xX][0-9a-fA-F]{1,400}|0[bB][01]{1,400}|0[oO][0-7]{1,400}|[0-9]{1,400})"), _any),
    "boxnet": Form(is_readable_box_plan, legal_box_plan),
    "coin_flip": Form(_whole(r"[0-9.,/ +-]{1,400}(?:[eE][+-]?[0-9]{1,3})? *"), probability),
    # Without the letters of nan and inf: a distance that is no number would earn full marks.
    "complex_arithmetic": Form(_whole(r"[0-9+\-.ijIJ() eE]{1,200}"), whole_complex),
    "cryptarithm": Form(is_readable_cryptarithm, _any),
    "decimal_arithmetic": Form(None, near_decimal),
    "figlet_font": Form(shrinks=True),
    "fraction_simplification": Form(None, simplified_fraction),
    "graph_color": Form(is_readable_coloring, _any),
    "group_anagrams": Form(is_lists_of_words, _any),
    "intermediate_integration": Form(is_integral, _any),
    "jugs": Form(is_readable_jugs, _any),
    "kakurasu": Form(_parts("[01]", most=MAX_CHARS), _any),
    "knight_swap": Form(None, _any),
    "knights_knaves": Form(role_statement, _any),
    "letter_jumble": Form(shrinks=True),
    "number_format": Form(None, nearest_candidate),
    # Its scorer falls back to `eval` of the task's own answer if that is not JSON.
    "number_sorting": Form(lambda answer, entry: _NUMBER_LIST.fullmatch(entry["answer"]) is not None, number_list),
    "palindrome_generation": Form(None, _any),
    "palindrome_partitioning": Form(is_lists_of_words, _any),
    "polynomial_equations": Form(is_number_list, root_list),
    "polynomial_multiplication": Form(is_polynomial, _any),
    "pool_matrix": Form(
        lambda answer, entry: len(answer) <= 100_000 and all(read_number(cell) is not None for cell in answer.split()),
        pooled_matrix,
    ),
    "power_function": Form(None, is_number),
    "prime_factorization": Form(None, _whole(r"[0-9]{1,60}(?:\s*×\s*[0-9]{1,60})*")),
    "quantum_lock": Form(_whole(r"[A-Ca-c](?:\s*(?:→|->|,|\s)\s*[A-Ca-c]){0,99}"), _any),
    "rubiks_cube": Form(is_readable_cube, _any),
    "rush_hour": Form(_parts(r"[A-Z][+-][0-9]"), legal_traffic),
    "shortest_path": Form(None, _any),
    "simple_integration": Form(is_integral, _any),
    "sokoban": Form(_parts("[LDUR]", list), _any),
    "spell_backward": Form(shrinks=True),
    "survo": Form(_parts(r"-?[0-9]{1,18}", most=MAX_CHARS), _any),
    "tower_of_hanoi": Form(
        _parts(r"\s*(?:Move disk [0-9]{1,3} from Peg [0-9]{1,3} to Peg [0-9]{1,3})?\s*", str.splitlines, MAX_CHARS), _any
    ),
    "word_ladder": Form(None, _any),
    "word_sorting": Form(shrinks=True),
}
NO_FORM = Form()


def form_of(dataset: str) -> Form:
    """The form of a dataset's answers."""
    return FORMS.get(dataset, NO_FORM)
