"""Candidates that were made as wrong answers but turn out to be right, by dataset, with the
reason.
"""

from __future__ import annotations

from shared.tasks.audit.candidates import CHANGE, Candidate

SEVERAL = frozenset(
    {"boxnet", "countdown", "cryptarithm", "graph_color", "group_anagrams", "intermediate_integration", "jugs", "kakurasu"}
    | {"knight_swap", "knights_knaves", "n_queens", "palindrome_generation", "palindrome_partitioning", "polynomial_multiplication"}
    | {"prime_factorization", "propositional_logic", "puzzle24", "quantum_lock", "rubiks_cube", "rush_hour", "shortest_path"}
    | {"simple_integration", "sokoban", "tower_of_hanoi", "word_ladder"}
)
"""Datasets with several right answers, so that a changed answer may be another right one: two moves
exchanged, a term moved.
"""

_ROUNDINGS = frozenset({"a character less", "a character twice", "digits attached", "a number one off", "characters swapped"})
OTHER_RIGHT: dict[str, frozenset[str]] = {
    # Numbers are compared only to some decimal place; what comes after it may differ.
    **dict.fromkeys(("advanced_geometry", "coin_flip", "decimal_arithmetic", "number_format"), _ROUNDINGS),
    **dict.fromkeys(("pool_matrix", "power_function", "number_sorting"), _ROUNDINGS),
    # `j` for `i`, and any number of zeros.
    "complex_arithmetic": _ROUNDINGS | {"another letter"},
    # `34 day` and `34` instead of `34 days`.
    "time_intervals": frozenset({"a character less", "one word less"}),
    # The constant of integration.
    "simple_integration": frozenset({"digits attached", "digits attached in front"}),
    "intermediate_integration": frozenset({"digits attached", "digits attached in front"}),
    # A solved cube or warehouse stays solved after moves that change nothing.
    "sokoban": frozenset({"twice attached"}),
    # A conclusion that follows from many premises.
    "propositional_logic": frozenset({"'(P ∨ Q)'"}),
    "polynomial_equations": _ROUNDINGS
    | {"one element elsewhere", "elements reversed", "the last elements swapped", "elements sorted"},
}


def is_right_after_all(dataset: str, candidate: Candidate) -> bool:
    """Whether the dataset's rules justify full marks for this candidate."""
    if candidate.kind == CHANGE and dataset in SEVERAL:
        return True
    return candidate.name in OTHER_RIGHT.get(dataset, frozenset())
