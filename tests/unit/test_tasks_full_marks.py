"""Answers that were once paid in full and are not right, each by name; and right ones in other
forms, which stay paid.

`tests/integration/test_task_audit.py` looks for such answers in all datasets.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from shared.tasks.derive import REFUSED_SETTINGS, Item, TaskError, dataset_names
from shared.tasks.forms import NOT_WHOLE, PARTIAL_CEILING, read_json, same_json
from shared.tasks.numerals import read_number, rounds_from
from tests.long_forms import FULL
from tests.unit.task_answers import FULL_MARKS, PAYLOAD, QUICK_S, Wrong, items, reward, right

FEW, FEWER = (20, 12) if FULL else (5, 4)
"""Of tasks that take a quarter of a second each to derive or to score."""


@pytest.mark.parametrize(
    ("dataset", "config", "wrong"),
    [
        pytest.param("coin_flip", {"min_trials": 30, "max_trials": 40}, lambda item: "0", id="coin_flip zero"),
        pytest.param("number_sorting", {}, lambda item: json.dumps([float("nan")] * _length(item)), id="number_sorting NaN"),
        pytest.param(
            "number_sorting", {}, lambda item: json.dumps([value + 0.5 for value in _floats(item)]), id="number_sorting shifted"
        ),
        pytest.param(
            "propositional_logic", {}, lambda item: item.entry["metadata"]["premises"][0], id="propositional_logic premise"
        ),
        pytest.param("propositional_logic", {}, lambda item: _premises(item), id="propositional_logic all premises"),
        pytest.param(
            "propositional_logic", {}, lambda item: f"{_premises(item)} ∨ buy this", id="propositional_logic text as a variable"
        ),
        pytest.param(
            "time_intervals",
            {"max_time_difference_seconds": 10**11, "max_date_difference_days": 10**5, "task_types": ["time", "time_seconds"]},
            lambda item: "00:00:00" if right(item).count(":") == 2 else "00:00",
            id="time_intervals tolerance",
        ),
        pytest.param(
            "figlet_font", {"min_word_len": 12, "max_word_len": 15}, lambda item: right(item)[:10], id="figlet_font long words"
        ),
        pytest.param(
            "emoji_mystery",
            {"min_words_in_sentence": 25, "max_words_in_sentence": 35},
            lambda item: f"#{right(item)[1:]}",
            id="emoji_mystery",
        ),
        pytest.param("codeio", {}, lambda item: right(item).replace("1", "2", 1) + " ", id="codeio one character"),
        pytest.param("decimal_arithmetic", {}, lambda item: _last_digit_up(right(item)), id="decimal_arithmetic last digit"),
        pytest.param(
            "polynomial_equations",
            {"min_degree": 2, "max_degree": 2},
            lambda item: f"{right(item)}, {PAYLOAD}",
            id="polynomial text",
        ),
        pytest.param("gsm_symbolic", {}, lambda item: f"{right(item)} {PAYLOAD}", id="gsm_symbolic"),
        pytest.param("letter_jumble", {}, lambda item: f"{right(item)} {PAYLOAD}", id="letter_jumble"),
        pytest.param("word_sorting", {}, lambda item: f"{right(item)}, {PAYLOAD}", id="word_sorting"),
        pytest.param("kakurasu", {}, lambda item: f"{PAYLOAD} {right(item)}", id="kakurasu"),
        pytest.param("survo", {}, lambda item: f"{PAYLOAD} {right(item)}", id="survo"),
        pytest.param("knights_knaves", {}, lambda item: f"{PAYLOAD}. {right(item)}", id="knights_knaves"),
        pytest.param("pool_matrix", {}, lambda item: f"{right(item)} # {PAYLOAD}", id="pool_matrix"),
        pytest.param("sokoban", {}, lambda item: f"{right(item)} {PAYLOAD}", id="sokoban", marks=pytest.mark.slow),
        pytest.param("quantum_lock", {}, lambda item: f"{right(item)} ({'xyz' * 20})", id="quantum_lock"),
        pytest.param("spell_backward", {}, lambda item: f"{right(item)} {PAYLOAD}", id="spell_backward"),
        pytest.param(
            "time_intervals", {"task_types": ["date"]}, lambda item: f"{right(item)} {PAYLOAD}", id="time_intervals payload"
        ),
        pytest.param(
            "fraction_simplification", {"styles": ["latex_frac"]}, lambda item: f"{right(item)[1:-1]} {PAYLOAD}", id="fraction"
        ),
        pytest.param(
            "advanced_geometry", {"task_types": ["orthocenter"]}, lambda item: f"{right(item)}, {PAYLOAD}", id="advanced_geometry"
        ),
        pytest.param("boxnet", {}, lambda item: json.dumps([{PAYLOAD: "1"}]), id="boxnet"),
    ],
)
def test_what_is_not_right_as_a_whole_earns_no_full_marks(dataset: str, config: dict[str, Any], wrong: Wrong) -> None:
    for item in items(dataset, FEWER if dataset == "sokoban" else 12, **config):
        answer = wrong(item)
        if answer.strip() != right(item):
            earned = reward(item, answer)
            assert earned <= PARTIAL_CEILING < FULL_MARKS, (answer, right(item))
            if PAYLOAD in answer:
                assert earned <= 0.8, (answer, right(item))


SOLVED = {
    "boxnet": (
        '[{"Agent[0.5, 2.5]": "move(box_green, square[0.5, 1.5])"}, {"Agent[0.5, 1.5]": "move(box_green, target_green)"}, '
        '{"Agent[1.5, 3.5]": "move(box_blue, square[0.5, 3.5])"}, {"Agent[0.5, 3.5]": "move(box_blue, target_blue)"}, '
        '{"Agent[2.5, 3.5]": "move(box_red, target_red)"}]',
        ('"move(box_blue, target_blue)"', '"move(box_blue, target_green)"'),
        ("square[0.5, 1.5]", "square[0.5, 0.5]"),
        ("}]", '}, {"Agent[0.5, 2.5]": "move(box_green, target_green)"}]'),
        ("}]", f'}}, {{"{PAYLOAD}": "1"}}]'),
        ("}]", f'}}, "{PAYLOAD}"]'),
        ("box_red, target_red", f"box_red, target_red {PAYLOAD}"),
        ("}]", f"}}] {PAYLOAD}"),
    ),
    "rush_hour": (
        "D+1 I-1 J+1 B+1 B+1 H-1 C+1 C+1 C+1 G-1 E-1 H+1 B-1 B-1 J-1 K-1 D+1 H+1 H+1 A+1 F+1 B-1 I-1 A+1 A+1 H-1 H-1 D-1 K+1 A+1",
        ("D+1 I-1", "D+1 D+9 I-1"),
        ("K+1 A+1", "K+1 A+9"),
        ("D+1 I-1", f"D+1 {PAYLOAD} I-1"),
        ("K+1 A+1", f"K+1 A+1 {PAYLOAD}"),
        ("K+1 A+1", "K+1 A+1 or 0"),
        ("K+1 A+1", "K+1"),
    ),
}
"""A solution of the first task of datasets that give none, and changes that make it wrong."""


@pytest.mark.parametrize("dataset", SOLVED)
def test_a_solution_with_a_move_that_is_not_allowed_or_with_text_earns_no_full_marks(dataset: str) -> None:
    (item,), (solution, *changes) = items(dataset, 1), SOLVED[dataset]
    assert reward(item, solution) == 1.0
    wrong = [solution[::-1].replace(old[::-1], new[::-1], 1)[::-1] for old, new in changes]
    assert solution not in wrong
    assert {answer: reward(item, answer) >= FULL_MARKS for answer in wrong} == dict.fromkeys(wrong, False)


def _length(item: Item) -> int:
    return len(item.entry["metadata"]["sorted_numbers"])


def _floats(item: Item) -> list[float]:
    return [float(number) for number in item.entry["metadata"]["sorted_numbers"]]


def _premises(item: Item) -> str:
    return " ∧ ".join(f"({premise})" for premise in item.entry["metadata"]["premises"])


def _last_digit_up(number: str) -> str:
    return f"{number[:-1]}{(int(number[-1]) + 1) % 10}"


@pytest.mark.parametrize(("dataset", "numbers", "target", "answer"), [
    ("countdown", [2, 4, 5], 10, "2.5*4"), ("puzzle24", [2, 4, 5, 14], 24, "2.5*4 + 14"),
])  # fmt: skip
def test_a_decimal_does_not_use_the_integers_beside_its_point(dataset: str, numbers: list[int], target: int, answer: str) -> None:
    from shared.tasks.scorers import SCORERS

    entry = {"metadata": {"numbers": numbers, "target": target}}
    assert SCORERS[dataset](answer, entry) < FULL_MARKS
    assert SCORERS["countdown"]("2*5", {"metadata": {"numbers": [2, 5], "target": 10}}) == 1.0
    assert SCORERS["countdown"]("999999+9", {"metadata": {"numbers": [9, 999999], "target": 1000000}}) < FULL_MARKS


@pytest.mark.slow
def test_an_empty_board_earns_something_only_where_it_is_right() -> None:
    for config in ({}, {"grid_size_x": 50, "grid_size_y": 50, "filled_cells": 300}):
        died = 0
        for item in items("game_of_life", FEW if config else 20, **config):
            board = json.loads(right(item))
            empty = json.dumps([[0] * len(row) for row in board])
            alive = any(any(row) for row in board)
            died += not alive
            assert reward(item, empty) == (0.0 if alive else 1.0)
            assert reward(item, right(item)) == reward(item, right(item).replace(",", ", ")) == 1.0
            board[0][0] = 1 - board[0][0]
            assert reward(item, json.dumps(board)) == 0.0
        assert died < (FEW if config else 20)


def test_the_table_in_the_documentation_is_of_datasets_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    table = page.partition("| dataset | full marks also for |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(named) > 30 and set(named) <= {*dataset_names()}


def test_settings_that_choose_the_answer_or_the_tolerance_are_refused_with_the_reason() -> None:
    for dataset, settings in REFUSED_SETTINGS.items():
        for key in settings:
            with pytest.raises(TaskError, match=key) as caught:
                next(items(dataset, 1, **{key: "WORD" if dataset == "figlet_font" else 0.001}))
            assert "omit it" in str(caught.value)


def test_a_right_answer_inside_text_earns_nothing_where_reasoning_gym_pays_it_in_full() -> None:
    for item in items("survo", 5):
        assert item.dataset.score_answer(f"{PAYLOAD} {right(item)}", item.entry) == 1.0
        assert reward(item, f"{PAYLOAD} {right(item)}") == 0.0
    for item in items("chain_sum", 5):
        assert item.dataset.score_answer(f",{right(item)},", item.entry) == 1.0
        assert reward(item, f",{right(item)},") == NOT_WHOLE
        assert reward(item, right(item)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "config", "other"),
    [
        ("chain_sum", {}, lambda item: f"{int(right(item)):,}.00"),
        ("gsm_symbolic", {}, lambda item: f"{float(right(item)):,.1f}"),
        ("coin_flip", {"max_trials": 5}, lambda item: "{numerator}/{denominator}".format(**item.entry["metadata"]["rational"])),
        (
            "fraction_simplification",
            {},
            lambda item: "{simplified_numerator} / {simplified_denominator}".format(**item.entry["metadata"]),
        ),
        (
            "fraction_simplification",
            {},
            lambda item: "$\\frac{{{simplified_numerator}}}{{{simplified_denominator}}}$".format(**item.entry["metadata"]),
        ),
        ("number_sorting", {}, lambda item: json.dumps(_floats(item))),
        ("number_filtering", {}, lambda item: right(item).replace("'", '"')),
        ("number_filtering", {}, lambda item: right(item).replace("'", "")),
        ("list_functions", {}, lambda item: right(item).replace(", ", ",")),
        ("binary_matrix", {}, lambda item: right(item).replace("\n", " \n")),
        ("rotate_matrix", {}, lambda item: right(item).replace("\n", " \n")),
        ("pool_matrix", {}, lambda item: re.sub(r"[0-9.]+", lambda cell: f"{float(cell[0]):.2f}", right(item))),
        ("quantum_lock", {}, lambda item: right(item).replace(" → ", ", ")),
        ("knights_knaves", {}, lambda item: " and ".join(reversed(right(item).rstrip(".").replace("and ", "").split(", ")))),
        ("group_anagrams", {}, lambda item: json.dumps([group[::-1] for group in json.loads(right(item))[::-1]])),
        ("sudoku", {}, lambda item: right(item).replace("\n", " \n")),
        ("arc_agi", {}, lambda item: right(item).replace("\n", " \n ")),
        ("spell_backward", {}, lambda item: right(item).upper()),
        ("game_of_life_halting", {}, lambda item: f"{right(item).lower()}."),
        ("decimal_chain_sum", {}, lambda item: f"{right(item)}0"),
        ("complex_arithmetic", {}, lambda item: f"({right(item).replace('i', 'j')})"),
        ("polynomial_equations", {}, lambda item: ", ".join(reversed(right(item).split(", ")))),
        ("bitwise_arithmetic", {}, lambda item: str(int(right(item), 16))),
        ("prime_factorization", {}, lambda item: "×".join(reversed(right(item).split(" × ")))),
    ],
)
def test_right_answers_in_another_form_stay_paid(dataset: str, config: dict[str, Any], other: Wrong) -> None:
    for item in items(dataset, 8, **config):
        assert reward(item, f"\n {other(item)} \n") == 1.0, (other(item), right(item))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("rubiks_cube", "R999 " * 50),
        ("rubiks_cube", "R " * 30_000),
        ("propositional_logic", "(P ∨ " * 200 + "Q" + ")" * 200),
        ("propositional_logic", " ∨ ".join(["P"] * 300)),
        ("propositional_logic", "¬" * 1000 + "P"),
        ("codeio", json.dumps({"a": "x" * 60_000})),
        ("codeio", json.dumps([[index] for index in range(3000)])),
        ("sokoban", "LR" * 30_000),
        ("jugs", json.dumps(["fill A", "empty A"] * 4000)),
        ("rush_hour", "A+9 " * 15_000),
        ("intermediate_integration", "*".join(f"sin(x+{number})" for number in range(80))),
        ("intermediate_integration", "sin(" * 50 + "x" + ")" * 50),
        ("simple_integration", "+".join(f"X**{number}/7" for number in range(1, 150))),
    ],
)
def test_answers_that_took_seconds_are_decided_quickly(dataset: str, answer: str) -> None:
    for item in items(dataset, 3):
        started_s = time.process_time()
        assert reward(item, answer) < FULL_MARKS
        assert time.process_time() - started_s < QUICK_S


@pytest.mark.slow
def test_wrong_antiderivatives_are_decided_quickly_and_right_ones_need_not_look_like_the_reference() -> None:
    for item in items("intermediate_integration", 8):
        variable, oracle = item.entry["metadata"]["variable"], right(item)
        started_s = time.process_time()
        for answer in (
            f"{variable}*({oracle})",
            f"exp({variable})*sin({variable})**3*log({variable}) + C",
            f"tan({variable})**5/7",
        ):
            assert reward(item, answer) == 0.0
        assert time.process_time() - started_s < QUICK_S
        if "Integral(" not in oracle:
            identity = (
                f" + sin({variable})**2 + cos({variable})**2"
                if re.search(r"\b(sin|cos)\(", item.entry["metadata"]["integrand"])
                else ""
            )
            assert reward(item, oracle) == reward(item, f"({oracle})*2/2{identity}") == 1.0


def without_integrating(item: Item) -> str:
    """Right at the four points that were once looked at first, made from the integrand alone."""
    variable, integrand = item.entry["metadata"]["variable"], item.entry["metadata"]["integrand"]
    points, terms = ("0.2137", "0.0491", "0.1373", "0.3109"), []
    for point in points:
        value = re.sub(rf"(?<![A-Za-z]){variable}(?![A-Za-z])", point, integrand)
        basis = "*".join(f"(({variable}-{other})/({point}-{other}))**2" for other in points if other != point)
        terms.append(f"({value})*({variable}-{point})*{basis}")
    return " + ".join(terms)


VANISHES = "99*((x-0.2137)*(x-0.0491)*(x-0.1373)*(x-0.3109))**2"


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["simple_integration", "intermediate_integration"])
def test_an_answer_that_does_not_integrate_earns_nothing_and_one_short_constant_is_all_that_is_added(dataset: str) -> None:
    for item in items(dataset, 8):
        variable, oracle = item.entry["metadata"]["variable"], right(item)
        if "Integral(" in oracle:
            continue
        bare = oracle.removesuffix(" + C")
        wrong = [without_integrating(item), f"({oracle})*(1 + 987654321)/987654322 + 987654321"]
        extras = (VANISHES, "v*i*s*i*t/(e*v*i*l)*987654321012345", "Abs(x)")
        if dataset == "simple_integration":
            # Elsewhere the domain may end before the kink.
            extras += ("Abs(x-5) + x", "sqrt((x-5)**2) + x", "sqrt(x**2-10*x+25) + x")
        wrong += [f"{oracle} + {extra.replace('x', variable)}" for extra in extras]
        wrong += [f"{bare} + {text}" for text in ("C + K", "C*K", "c*987654", "sin(C)", "C**2")]
        assert {answer: reward(item, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)
        honest = [f"{bare} + {text}" for text in ("C", "K", "c", "1", "pi/2", "1234567")] + [f"C + ({bare})", f"({bare})*2/2 - C"]
        assert {answer: reward(item, answer) for answer in honest} == dict.fromkeys(honest, 1.0)


def test_an_integrand_that_is_real_for_negative_numbers_alone_has_more_than_one_right_answer() -> None:
    from shared.tasks.scorers import SCORERS

    entry = {"answer": "(10*x + 18)*sqrt(-5*x - 9)/3", "metadata": {"variable": "x", "integrand": "5*sqrt(-5*x - 9)"}}
    assert SCORERS["intermediate_integration"]("-2*(-5*x - 9)**(3/2)/3 + C", entry) == 1.0
    assert SCORERS["intermediate_integration"]("-2*(-5*x - 8)**(3/2)/3 + C", entry) == 0.0


DIGITS = "1234567890123456789" * 4


@pytest.mark.parametrize(
    ("dataset", "config", "wrong"),
    [
        ("number_sorting", {}, lambda item: re.sub(r"['\"](-?[0-9]+(?:\.[0-9]+)?)['\"]", lambda m: _longer(m[1]), right(item))),
        ("advanced_geometry", {"task_types": ["angle_measure"]}, lambda item: _longer(right(item).removesuffix("°"))),
        ("power_function", {}, lambda item: _longer(f"{float(right(item)):f}")),
        ("complex_arithmetic", {}, lambda item: "{:.0f}.001{d}{:+.0f}.001{d}i".format(*item.entry["metadata"]["result"], d=DIGITS)),
    ],
)
def test_digits_that_are_not_compared_are_not_paid(dataset: str, config: dict[str, Any], wrong: Wrong) -> None:
    for item in items(dataset, 8, **config):
        answer = wrong(item)
        assert DIGITS in answer and reward(item, answer) < FULL_MARKS, answer
        assert reward(item, right(item)) == 1.0


def _longer(number: str) -> str:
    return f"{number}{'' if '.' in number else '.'}{'0' * 20}{DIGITS}"


def test_a_number_in_json_has_no_more_digits_than_value() -> None:
    assert read_json("[1.5, -0.25e-10, 0.12345678901234567, -0.0012345678901234567]")
    with pytest.raises(ValueError, match="digits"):
        read_json(f"[1.5{'0' * 20}{DIGITS}]")
    with pytest.raises(ValueError, match="digits"):
        read_json("[0.123456789012345678]")


@pytest.mark.parametrize("name", ["nan", "oo", "zoo", "E", "I", "N", "S", "pi"])
def test_a_configuration_cannot_name_a_variable_that_the_parser_reads_as_something_else(name: str) -> None:
    config = {"variables": [name], "allow_multivariate_polynomials": False}
    try:
        (item,) = items("polynomial_multiplication", 1, **config)
    except TaskError:
        return
    assert reward(item, name) == reward(item, f"7*{name} + 5*{name}**2 + 123456789*{name}") == 0.0


def test_numbers_are_read_as_a_whole_or_not_at_all() -> None:
    assert [read_number(text) for text in ("1,000", " 3.0 ", "+.5", "1e3", "-0")] == [1000, 3, 0.5, 1000, 0]
    for text in ("", "nan", "inf", "1,00", "1_000", "1 000", "5x", "--5", "1e9999", "٣", "1" * 500, ".", "e5", "0x10", "1/2"):
        assert read_number(text) is None, text
    third = read_number("0.333333333333")
    assert third is not None
    assert rounds_from("0.33333", third, 4) and rounds_from("0.3333", third, 4)
    assert not rounds_from("0.333", third, 4) and not rounds_from("0.3334", third, 4) and not rounds_from("0", third, 0)


def test_json_hides_no_second_value() -> None:
    assert read_json('{"a": [1, "b", null]}') == {"a": [1, "b", None]}
    for text in ('{"a": 1, "a": 2}', "[NaN]", "[Infinity]", "[1] x", "[" * 50 + "]" * 50, "[" * 100_000):
        with pytest.raises(ValueError):
            read_json(text)
    assert same_json({"a": [1]}, {"a": [1]})
    assert not same_json(1, True) and not same_json([1], [1.0]) and not same_json({"a": 1}, {"a": 1, "b": 2})


def test_moves_with_a_jug_that_the_library_does_not_use_are_paid_though_its_answer_is_none() -> None:
    """Its solver of `jugs` knows three."""
    item = next(each for each in items("jugs", 40, num_jugs=4) if right(each) == '["No solution"]')
    assert reward(item, right(item)) == 0.0
    moves = _jug_moves(item.entry["metadata"]["puzzle"]["jug_capacities"], item.entry["metadata"]["puzzle"]["target"])
    assert reward(item, json.dumps(moves)) == 1.0
    assert reward(item, json.dumps(moves[:-1])) < FULL_MARKS


def _jug_moves(capacities: list[int], target: int) -> list[str]:
    # The shortest, by a search of our own.
    numbers, names = range(len(capacities)), "ABCD"
    waiting: list[tuple[tuple[int, ...], list[str]]] = [((0,) * len(capacities), [])]
    seen = {waiting[0][0]}
    for held, moves in waiting:
        if target in held:
            return moves
        for one in numbers:
            for move, other, change in [
                (f"fill {names[one]}", None, capacities[one] - held[one]),
                (f"empty {names[one]}", None, -held[one]),
                *(
                    (f"pour {names[one]}->{names[to]}", to, -min(held[one], capacities[to] - held[to]))
                    for to in numbers
                    if to != one
                ),
            ]:
                after = list(held)
                after[one] += change
                if other is not None:
                    after[other] -= change
                if tuple(after) not in seen:
                    seen.add(tuple(after))
                    waiting.append((tuple(after), [*moves, move]))
    raise AssertionError("no solution")
