"""For each dataset: which answers besides the reference answer get full marks, and what an answer
must look like to earn anything.

reasoning-gym's scorers read what they understand and skip the rest, so a right number with any text
around it, or a right list followed by anything, gets full marks. A `Form` prevents that in two
steps: before the scorer, `reads` decides whether the whole text is an answer; after it, `is_right`
decides whether full marks are deserved. A dataset that is not listed here gives full marks only for
its reference answer. This also applies to datasets that a newer reasoning-gym adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.tasks import form_checks as checks

PARTIAL_CEILING = 0.95
"""Largest reward of an answer that is not right as a whole; below every threshold for "solved"."""

NOT_WHOLE = 0.0
"""Reward of an answer that gets full marks from reasoning-gym but is not right as a whole. It is no
higher than that of a wrong answer; otherwise a group's advantage would reward the text around the
right part.
"""


def _always(answer: str, entry: dict[str, Any]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Form:
    """Rules by which a dataset's answers are read and judged. `also_paid` (answers besides the
    reference answer) and `stricter` (answers that only reasoning-gym accepts) are texts for the
    table in docs/tasks.md.
    """

    also_paid: str = ""
    is_right: checks.Check = checks.same_text
    reads: checks.Check | None = None
    stricter: str = ""
    shrinks: bool = False
    """For an answer longer than the reference, multiply partial credit by the ratio of their
    lengths.
    """


EXACT = Form()
_CASE = "other case"
_WHOLE = "text around the answer"
_NUMBER = "the same value in another notation: `1,000`, `3.0`, `1e3`"
_SCORER = Form(is_right=_always, stricter="partial credit")

FORMS: dict[str, Form] = {
    "advanced_geometry": Form(
        "the same value to 2 (angle, with or without °) or 3 (point) decimal places", _always, checks.geometry, _WHOLE
    ),
    "arc_agi": Form("other white space", checks.same_board, stricter="`Shape: ...` lines with any text"),
    "bitwise_arithmetic": Form("the same integer, also in decimal, octal or binary", _always, checks.is_prefixed_integer),
    "boxnet": Form(
        "any plan of legal moves that brings every box home",
        checks.legal_box_plan,
        checks.is_readable_box_plan,
        "moves that are not legal, other keys, one agent twice in a step",
    ),
    "binary_matrix": Form("other white space within and around rows", _always, stricter="partial credit"),
    "calendar_arithmetic": Form(
        "the same integer with a sign or leading zeros; Yes and No in any case",
        lambda answer, entry: checks.same_text_any_case(answer, entry) or checks.same_integer(answer, entry),
    ),
    "chain_sum": Form(_NUMBER, checks.same_number, stricter="commas anywhere, underscores"),
    "codeio": Form("the same JSON document", _always, stricter="partial credit"),
    "coin_flip": Form(
        "the same probability as a fraction, or rounded to 4 places or more with an error below 1 %",
        checks.probability,
        checks.is_probability,
        "0 for a small probability, a number that the answer's digits begin with",
    ),
    "color_cube_rotation": Form(_CASE, checks.same_text_any_case),
    "complex_arithmetic": Form(
        "the same number, `i` or `j`, in parentheses; an error up to 0.005",
        checks.whole_complex,
        checks.is_complex,
        "an error up to 0.01",
    ),
    "countdown": Form(
        "any expression over exactly these integers that is exactly the target", _always, stricter="decimals; an error of 1e-5"
    ),
    "cryptarithm": Form("any valid mapping, in any order", _always, checks.is_readable_cryptarithm, "a letter twice"),
    "decimal_arithmetic": Form(
        "the same value; a rounding of it to 1 decimal place or more with an error below 1 %, if the dataset's tolerance allows it",
        checks.near_decimal,
        stricter="any number within the tolerance, which a configuration sets",
    ),
    "decimal_chain_sum": Form(_NUMBER, checks.same_number),
    "dice": Form(_CASE, checks.same_text_any_case, stricter="line breaks inside the number"),
    "family_relationships": Form(_CASE, checks.same_text_any_case),
    "figlet_font": Form(
        "other case; spaces between the letters", checks.same_letters, stricter="ten right letters of a longer word", shrinks=True
    ),
    "fraction_simplification": Form(
        "`a/b`, `\\frac{a}{b}`, `\\dfrac{a}{b}`, with or without a pair of $", checks.simplified_fraction, stricter=_WHOLE
    ),
    "futoshiki": Form("other white space at the ends of lines", checks.same_rows),
    "game_of_life": Form("other white space", _always, stricter="partial credit"),
    "game_of_life_halting": Form("other case, quotes, a full stop", _always, stricter="any text (its truth value was compared)"),
    "graph_color": Form("any valid coloring", _always, checks.is_readable_coloring, "keys that are no vertices, a vertex twice"),
    "group_anagrams": Form("groups and words in any order", _always, checks.is_lists_of_words, "objects in place of lists"),
    "gsm_symbolic": Form(_NUMBER, _always, stricter="the first number in any text"),
    "intermediate_integration": Form(
        "any antiderivative, with one letter as constant",
        _always,
        checks.is_integral,
        "an integral left standing; **scored locally only: no group of another node is taken**",
    ),
    "jugs": Form("any moves that reach the target", _always, checks.is_readable_jugs, "words after a move"),
    "kakurasu": Form("any grid with these sums", _always, checks.is_bit_grid, "text without 0 and 1 around the cells"),
    "knight_swap": Form("any legal moves, not more than the reference's", _always),
    "knights_knaves": Form(
        "inhabitants in any order, other case, without `is`, `a`, `and`", _always, checks.role_statement, _WHOLE
    ),
    "letter_jumble": Form(_CASE, checks.same_text_any_case, stricter="words after the sentence", shrinks=True),
    "list_functions": Form("other spaces in a list of integers", _always, stricter="partial credit"),
    "manipulate_matrix": Form("other white space within and around rows", checks.same_rows),
    "mini_sudoku": Form("other white space at the ends of lines", checks.same_rows),
    "n_queens": Form("any valid board with the given queens", _always, stricter="partial credit"),
    "needle_haystack": Form("other case; spaces", checks.same_letters),
    "number_filtering": Form("numbers as numbers or strings, in another notation", _always, stricter="partial credit"),
    "number_format": Form(
        "the same number as it is offered, in another notation, or rounded to 2 places or more",
        checks.nearest_candidate,
        stricter="any number within 0.01, another candidate included",
    ),
    "number_sorting": Form(
        "numbers as numbers or strings, in another notation",
        checks.number_list,
        checks.has_number_list,
        "NaN; numbers up to 1 away from the right ones",
    ),
    "palindrome_generation": Form("any palindrome of exactly these letters, other case", _always),
    "palindrome_partitioning": Form("partitions in any order", _always, checks.is_lists_of_words, "objects in place of lists"),
    "path_star": Form("other white space", checks.same_tokens),
    "polynomial_equations": Form(
        'roots in any order, right to 4 decimal places; `""` for none',
        checks.root_list,
        checks.is_number_list,
        "text between roots",
    ),
    "polynomial_multiplication": Form("the same expanded polynomial, terms in any order", _always, checks.is_polynomial),
    "pool_matrix": Form(
        "elements right to 2 decimal places; other white space",
        checks.pooled_matrix,
        checks.is_number_grid,
        "an error of 1 %; comments",
    ),
    "power_function": Form("any number that is the same to 3 significant figures", checks.is_number),
    "prime_factorization": Form("factors in any order, other white space", checks.factor_list),
    "products": Form(_NUMBER, checks.same_number, stricter="commas anywhere, underscores"),
    "propositional_logic": Form(
        "any conclusion that follows and is no tautology, no bare variable and no repetition of premises",
        _always,
        stricter="a premise again, alone or joined to others; anything from contradictory premises; lower-case text as a variable",
    ),
    "puzzle24": Form(
        "any expression over exactly these integers that is exactly 24", _always, stricter="other numbers, decimals, rounding"
    ),
    "quantum_lock": Form(
        "any shortest sequence, with →, ->, commas or spaces",
        _always,
        checks.is_readable_presses,
        "text around the sequence",
    ),
    "rearc": Form("other white space", checks.same_board, stricter="`Shape: ...` lines with any text"),
    "rectangle_count": Form("the same integer with a sign or leading zeros", checks.same_integer),
    "rotate_matrix": Form("other white space within and around rows", _always, stricter="partial credit"),
    "rubiks_cube": Form(
        "any solution of up to 200 moves", _always, checks.is_readable_cube, "tokens that are no moves; more moves"
    ),
    "rush_hour": Form(
        "any solution of legal moves", checks.legal_traffic, checks.is_readable_traffic, "text between moves; a blocked car"
    ),
    "sentence_reordering": Form("other case, other white space", checks.same_tokens_any_case),
    "shortest_path": Form("any shortest path", _always),
    "simple_integration": Form(
        "any antiderivative, with one letter as constant",
        _always,
        checks.is_integral,
        "an integral left standing; **scored locally only: no group of another node is taken**",
    ),
    "sokoban": Form("any solution of up to 1,000 moves", _always, checks.is_readable_sokoban, "any text between moves"),
    "spell_backward": Form(_CASE, checks.same_text_any_case, stricter="text after the word", shrinks=True),
    "spiral_matrix": _SCORER,
    "string_insertion": _SCORER,
    "sudoku": Form("other white space at the ends of lines", checks.same_rows),
    "survo": Form("other white space", _always, checks.is_integer_grid, "text between the cells"),
    "time_intervals": _SCORER,
    "tower_of_hanoi": Form("any shortest sequence of legal moves", _always, checks.is_readable_hanoi, "text before a move"),
    "tsumego": Form(_CASE, checks.same_text_any_case),
    "word_ladder": Form("any ladder of known words, other case", _always),
    "word_sorting": Form("other white space around words", checks.word_list, stricter="words after the list", shrinks=True),
    "zebra_puzzles": Form(_CASE, checks.same_text_any_case, stricter="line breaks inside the name"),
}


def form_of(dataset: str) -> Form:
    """The form of a dataset's answers."""
    return FORMS.get(dataset, EXACT)
