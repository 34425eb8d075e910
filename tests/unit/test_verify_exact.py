"""What `exact` takes for the same text."""

from __future__ import annotations

import pytest

from shared.contracts.messages import TaskRef
from shared.tasks.derive import Item
from shared.tasks.prompt import text_task
from shared.tasks.verify_exact import verifier


def reward(reference: str, answer: str) -> float:
    task = text_task(TaskRef(dataset="mine", config="{}", seed=1, index=0), "?", reference)
    return float(verifier(Item(task=task, entry={}, dataset=None))(answer))


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("10⁶", "106"),
        ("106", "10⁶"),
        ("H₂O", "H2O"),
        ("½", "1/2"),
        ("½", "1⁄2"),
        ("①", "1"),
        ("10 ㎡", "10 m2"),
        ("ℝ", "R"),
        ("Maße", "Masse"),
        ("__init__", "init"),
        ("*", ""),
        ("80", "so 80"),
        ("80", "80!"),
        (".", ""),
        ("80", "80\u200b"),
        ("B", "(A)"),
        ("B", "(B"),
        ("B", "(AB)"),
        ("B", "B) or C)"),
    ],
)
def test_a_sign_that_says_something_else_is_another_text(reference: str, answer: str) -> None:
    assert reward(reference, answer) == 0.0
    assert reward(reference, reference) == reward(answer or "x", answer or "x") == 1.0


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("12", "１２"),
        ("file", "ﬁle"),
        ("3 km", "3\u00a0km"),
        ("3 km", "3\u202fKM"),
        ("café", "cafe\u0301"),
        ("a  B\nc", "A b C"),
        ("80", "**80**"),
        ("80", "$80$"),
        ("$80$", "80"),
        (r"\boxed{80}", "80"),
        ("__init__", "`__init__`"),
        ("**80**", "80"),
        ("`80`", "80"),
        ("80.", "80"),
        ("80", "80."),
        ("**80.**", "$80$."),
        ("Paris.", "*paris*"),
        ("80\u200b", "80"),
        ("\ufeff80", "80"),
        ("don't", "don\u2019t"),
        ("-4", "\u22124"),
        ("B", "(B)"),
        ("B", "B)"),
        ("B", "B."),
        ("B", r"\text{B}"),
        ("B", r"\textbf{(B)}"),
        ("(A)", "a"),
        (r"\text{east}", "east"),
        ("east", r"\mathrm{east}"),
    ],
)
def test_case_spacing_encoding_and_marks_around_the_whole_do_not_count(reference: str, answer: str) -> None:
    assert reward(reference, answer) == 1.0
