"""A right answer with a term that values do not show is wrong: tiny, flat, zero at all points, a
step, or a bump between them.

A generator makes such terms from every function; its honest counterpart lets sympy write right
answers in other forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from reasoning_gym import create_dataset

from shared.tasks.derive import Item
from shared.tasks.guards import GUARDS
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
SAMPLES = 15
"""Made terms for each of them."""
NESTED = ("{f}({f}({u}))", "1/{f}({u})", "{f}({u})**2", "{f}({u})*exp(-{u}**2)", "{f}(exp({u}))", "x*{f}({u})", "exp(-{f}({u})**2)")
IDENTITIES = (
    *(
        "31337*(exp(x)*exp(-x) - 1)",
        "31*(sqrt(x**2) - x)",
        "31*(log(exp(x)) - x)",
        "31*(atan(tan(x)) - x)",
        "31*(asin(sin(x)) - x)",
    ),
    *("31*(atan(x) + atan(1/x))", "31*(atan(x) + acot(x))", "31*sqrt(x*x)/x", "31*(x*x)**(1/2)/x", "31*sqrt((4*x+7)**2)/(4*x+7)"),
    *("31*(sqrt((x-5)**2)/(x-5) - sqrt((x-6)**2)/(x-6))", "31*(sqrt((x+5)**2)/(x+5) - sqrt((x+6)**2)/(x+6))"),
    *("31*(log((x-5)**2) - 2*log(x-5) - log((x-6)**2) + 2*log(x-6))", "31*(log(-x) - log(x))", "31337*x**0", "31337*(x+1)/(x+1)"),
    *("31337*cos(2*10**30*pi*x)", "31*sin(2**70*pi*x)", "x/10**130", "7*x**10**-150", "x*(1/9**9)**15", "(x/10**6)**30", "10**-60"),
    *(
        "exp(-1/(10**60*x)**2)",
        "31337*(tanh(x) - tanh(x))",
        "31337*exp(-exp(exp(10/x**2)))",
        "10**40*10**-170*x",
        "31337*(sin(x)**2+cos(x)**2)",
    ),
)


def hidden_terms(count: int) -> Iterator[str]:
    """`IDENTITIES`, and a sample of c*f(a*(x-b)) and what is made of it, for tiny and huge a."""
    yield from IDENTITIES
    functions = ("tanh", "exp", "sin", "cos", "atan", "asinh", "tan", "sinh", "log", "sqrt", "asin", "Abs", "acoth")
    scales = ("10**60", "987654321012345", "10**-60", "10**-150", "(1/9**99)", "2**200")
    arguments = [
        f"{sign}{a}*{inner}" for sign, a, inner in product(("", "-"), scales, ("(x-5)", "(x-5)**2", "(x+10**14)", "(x-0.37)**8"))
    ]
    terms = [f"31*{f}({u})" for f, u in product(functions, arguments)]
    terms += [f"31*{form.format(f=f, u=u)}" for form, f, u in product(NESTED, functions, arguments)]
    yield from random.Random(7).sample(terms, count)


def integral_reward(dataset: str, integrand: str, reference: str, answer: str) -> float:
    entry = {"answer": reference, "metadata": {"variable": "x", "integrand": integrand}}
    if not GUARDS[dataset](answer, entry):
        return 0.0
    try:
        return SCORERS[dataset](answer, entry)
    except ValueError:
        return 0.0


@pytest.mark.slow
def test_the_derivative_hides_no_term_of_an_antiderivative() -> None:
    made = list(hidden_terms(SAMPLES * len(INTEGRALS)))
    paid = {}
    for place, (integrand, right) in enumerate(INTEGRALS.items()):
        reference = f"{right} + C"
        assert integral_reward("intermediate_integration", integrand, reference, f"{right} + 1") == 1.0
        sampled = made[len(IDENTITIES) :][place :: len(INTEGRALS)]
        answers = [f"{right} + {term}" for term in (*IDENTITIES, *sampled)] + [f"({right})*(1 + {term})" for term in sampled]
        paid[integrand] = [
            answer for answer in answers if integral_reward("intermediate_integration", integrand, reference, answer)
        ]
    assert not any(paid.values()), paid


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
    "7": ("7+\\exp(-10^{9})", "7+\\tanh(99999999)-1", "7\\tanh(9999999)", "7+\\exp(-999)", "7+\\tanh(10^{60}(7-5))*0"),
    "189*x**2 + 1281*x + 1638": (
        "189*x**2 + 1281*x + 1638 + exp(-10**60*(x-5)**2)",
        "189*x**2 + 1281*x + 1638 + 31337*sin(8388608*pi*x)",
        "(189*x**2 + 1281*x + 1638)*cos(16777216*pi*x)",
        "189*x**2 + 1281*x + 1638 + 31337*(tanh(999*x**2)-1)",
        "189*x**2 + 1281*x + 1638 + 31337*(tanh(9999*x**2)**2-1)",
        "189*x**2 + 1281*x + 1638 + exp(-exp(99/x**2))",
        "(189*x**2 + 1281*x + 1638)*(1 + exp(-999))",
        "(189*x**2 + 1281*x + 1638)**(1 + exp(-999))",
    ),
    "$\\sin(x)$": ("\\sin(x)+\\exp(-9999)", "\\sin(x)\\tanh(99999)", "\\sin(x + \\exp(-9999))", "\\sin(x)+\\exp(-9999x^2)"),
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
    "tanh(30*x)",
    "sqrt(2)/2",
    "10**12*exp(x)",
    "12*x**5 - 7*x + 1/9",
)


@pytest.mark.slow
@pytest.mark.parametrize("reference", MATH_RIGHT)
def test_the_verifier_math_pays_sympys_forms_of_the_reference(reference: str) -> None:
    score, formula = math_scorer(reference), sympy.sympify(reference)
    answers = {str(sympy.expand(formula)), str(formula)}
    if not formula.has(sympy.exp, sympy.tanh):
        # Of exponentials, sympy prints forms whose digits or length are not those of an answer.
        answers |= other_forms(formula) | {sympy.latex(formula)}
    assert {answer: score(answer) for answer in answers} == dict.fromkeys(answers, 1.0)
