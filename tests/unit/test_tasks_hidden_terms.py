"""A right formula with a term that its values hardly show is wrong; an antiderivative may have any
form that sympy gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from reasoning_gym import create_dataset

from shared.tasks.derive import Item
from shared.tasks.forms import form_of
from shared.tasks.scorers import SCORERS

INTEGRALS: dict[str, str] = {
    "63*x**8 - 12*x**5 + 28*x**3": "7*x**9 - 2*x**6 + 7*x**4",
    "12*sqrt(4*x + 7)": "2*(4*x + 7)**(3/2)",
    "asin(3*x)": "x*asin(3*x) + sqrt(1 - 9*x**2)/3",
    "3*atan(x)": "3*x*atan(x) - 3*log(x**2 + 1)/2",
    "2*log(x**2)": "2*x*log(x**2) - 4*x",
    "2*exp(x)*cos(x)": "exp(x)*sin(x) + exp(x)*cos(x)",
    "(16*x + 4)*exp(4*x**2 + 2*x + 10)": "2*exp(4*x**2 + 2*x + 10)",
    "-16*sin(8*x - 5)*cos(8*x - 5)": "cos(8*x - 5)**2",
}
"""Integrand and antiderivative, one of each kind that the datasets make."""
WRONG_TERMS = (
    *("x/7", "31*sin(x)", "31*Abs(x)", "x/10**9", "31*(sqrt(x**2) - x)", "31*tanh(x)"),
    *("x*C", "C**2", "C + K", "31*exp(-1/x**2)", "exp(exp(x))", "x**9/10**9"),
)


def integral_reward(dataset: str, integrand: str, reference: str, answer: str) -> float:
    entry = {"answer": reference, "metadata": {"variable": "x", "integrand": integrand}}
    reads = form_of(dataset).reads
    if reads is None or not reads(answer, entry):
        return 0.0
    try:
        return SCORERS[dataset](answer, entry)
    except ValueError:
        return 0.0


@pytest.mark.slow
def test_an_antiderivative_with_a_term_that_changes_earns_nothing() -> None:
    for integrand, right in INTEGRALS.items():
        reference = f"{right} + C"
        for constant in ("1", "K", "pi/2"):
            assert integral_reward("intermediate_integration", integrand, reference, f"{right} + {constant}") == 1.0
        answers = [f"{right} + {term}" for term in WRONG_TERMS]
        paid = [answer for answer in answers if integral_reward("intermediate_integration", integrand, reference, answer)]
        assert not paid, (integrand, paid)


Form = Callable[[Any], Any]
FORMS: tuple[Form, ...] = (
    *(sympy.expand, sympy.factor, sympy.simplify, sympy.apart, sympy.together, sympy.cancel, sympy.trigsimp, sympy.powsimp),
    *(sympy.horner, sympy.radsimp, lambda formula: formula.rewrite(sympy.sinh)),
)
ALSO_RIGHT = {
    "2*exp(x)*cos(x)": ("sqrt(2)*exp(x)*sin(x + pi/4)", "E**x*(sin(x) + cos(x))"),
    "12*sqrt(4*x + 7)": ("2*(4*x + 7)*sqrt(4*x + 7)", "2*sqrt(4*x + 7)**3", "16*(x + 7/4)**1.5"),
    "asin(3*x)": ("x*(pi/2 - acos(3*x)) + sqrt(1 - 9*x**2)/3", "x*asin(3*x) + sqrt(1/9 - x**2)"),
    "3*atan(x)": (
        "3*x*atan(x) - 3*log(sqrt(x**2 + 1))",
        "3*x*atan(x) - 3*log(2*x**2 + 2)/2",
        "3*x*atan(x) - 3*log(Abs(x**2 + 1))/2",
    ),
    "2*log(x**2)": ("4*x*log(Abs(x)) - 4*x",),
    "(16*x + 4)*exp(4*x**2 + 2*x + 10)": ("2*exp(10)*exp(2*x)*exp(4*x**2)", "2*exp(2*x**2 + x + 5)**2"),
    "-16*sin(8*x - 5)*cos(8*x - 5)": ("-sin(8*x - 5)**2", "cos(16*x - 10)/2", "1/(1 + tan(8*x - 5)**2)"),
}
"""Forms that sympy does not come to by itself."""


def other_forms(formula: Any) -> set[str]:
    found = set()
    for form in FORMS:
        try:
            found.add(str(form(formula)))
        except (sympy.PolynomialError, NotImplementedError, ValueError):
            continue
    return found


@pytest.mark.slow
def test_right_antiderivatives_are_paid_in_the_forms_that_sympy_gives_them() -> None:
    cases = [(integrand, right, ALSO_RIGHT.get(integrand, ())) for integrand, right in INTEGRALS.items()]
    for name in ("simple_integration", "intermediate_integration"):
        dataset = create_dataset(name, seed=77, size=6)
        entries = [entry for entry in dataset if entry["metadata"]["variable"] == "x" and "Integral(" not in entry["answer"]]
        cases += [(entry["metadata"]["integrand"], entry["answer"].removesuffix(" + C"), ()) for entry in entries]
    refused, looked_at = [], 0
    for integrand, right, others in cases:
        for answer in (*other_forms(sympy.sympify(right)), *others):
            looked_at += 1
            if integral_reward("intermediate_integration", integrand, f"{right} + C", f"{answer} + C") != 1.0:
                refused.append((integrand, answer))
    assert looked_at > 40 and not refused


def math_scorer(reference: str) -> Callable[[str], float]:
    from shared.tasks.verify_math import verifier

    task: Any = SimpleNamespace(answer=reference, ref=SimpleNamespace(dataset="mine"))
    return verifier(Item(task, None, {}))


MATH: dict[str, tuple[str, ...]] = {
    "7": ("7+\\exp(-10^{9})", "7\\sinh(60)/\\cosh(60)", "7+\\exp(-999)"),
    "189*x**2 + 1281*x + 1638": (
        "189*x**2 + 1281*x + 1638 + exp(-10**60*(x-5)**2)",
        "189*x**2 + 1281*x + 1638 + 31337*sin(8388608*pi*x)",
        "(189*x**2 + 1281*x + 1638)*cos(16777216*pi*x)",
        "189*x**2 + 1281*x + 1638 + 31337*(sinh(999*x**2)/cosh(999*x**2)-1)",
        "189*x**2 + 1281*x + 1638 + exp(-exp(99/x**2))",
        "(189*x**2 + 1281*x + 1638)*(1 + exp(-999))",
        "(189*x**2 + 1281*x + 1638)**(1 + exp(-999))",
    ),
    "$\\sin(x)$": ("\\sin(x)+\\exp(-9999)", "\\sin(x)\\sinh(99)/\\cosh(99)", "\\sin(x + \\exp(-9999))", "\\sin(x)+\\exp(-9999x^2)"),
    "$x \\le 3$": ("x \\le 3+10^{-20}",),
}


@pytest.mark.slow
@pytest.mark.parametrize("reference", MATH)
def test_the_verifier_math_pays_no_formula_with_a_part_that_values_do_not_show(reference: str) -> None:
    score = math_scorer(reference)
    assert score(reference) == 1.0
    assert {answer: score(answer) for answer in MATH[reference]} == dict.fromkeys(MATH[reference], 0.0)


MATH_RIGHT = (
    "x**2*exp(-x**2)*sin(3*x)",
    "1/(x**2+1)",
    "exp(-40*x)",
    "sqrt(2)/2",
    "10**12*exp(x)",
    "12*x**5 - 7*x + 1/9",
)


@pytest.mark.slow
@pytest.mark.parametrize("reference", MATH_RIGHT)
def test_the_verifier_math_pays_sympys_forms_of_the_reference(reference: str) -> None:
    score, formula = math_scorer(reference), sympy.sympify(reference)
    answers = {str(sympy.expand(formula)), str(formula)}
    if not formula.has(sympy.exp):
        # Of exponentials, sympy prints forms whose digits or length are not those of an answer.
        answers |= other_forms(formula) | {sympy.latex(formula)}
    assert {answer: score(answer) for answer in answers} == dict.fromkeys(answers, 1.0)
