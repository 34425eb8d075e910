"""The verifier `math` pays one formula of the right value, however it is written, and decides
quickly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shared.tasks.derive import Item
from tests.unit.task_answers import PAYLOAD, QUICK_S


@pytest.mark.slow
def test_the_verifier_math_wants_one_formula_and_is_quick() -> None:
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    from shared.tasks.verify_math import verifier

    def scorer(answer: str) -> Any:
        task: Any = SimpleNamespace(answer=answer, ref=SimpleNamespace(dataset="mine"))
        return verifier(Item(task, None, {}))

    half, polynomial, interval = scorer("1/2"), scorer("$x^2+y$"), scorer("$(-\\infty, 3]$")
    for answer in ("1/2", "0.5", "$\\frac{2}{4}$", "\\boxed{\\frac12}", "$\\boxed{0.5}$", "x = 1/2", "$1/2$.", "\\(1/2\\)"):
        assert half(answer) == 1.0, answer
    for answer in ("y + x**2", "$x \\cdot x + y$", "(x+y)*1 + x^2 - x"):
        assert polynomial(answer) == 1.0, answer
    assert interval("(-\\infty,3]") == 1.0
    for answer in (
        f"$1/2$ {PAYLOAD}",
        f"{PAYLOAD}: $1/2$",
        "1/2 \\text{evil}",
        "1/2 + 0*b*u*y",
        "$1/3$ or $1/2$",
        "1/2, 3",
        "",
        "nan",
    ):
        assert half(answer) == 0.0, answer
    started_s = time.process_time()
    for answer in (
        "(x+y+z)^{999}",
        "(x+y+x)^{999}",
        "(x+y)^{20}",
        "\\exp(\\exp(\\exp(99)))",
        "\\frac{1}{x+" * 30 + "x" + "}" * 30,
        "(" * 40 + "x" + ")" * 40,
    ):
        assert polynomial(answer) == half(answer) == 0.0, answer
    assert time.process_time() - started_s < 2 * QUICK_S


def math_scorer(answer: str) -> Callable[[str], float]:
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    from shared.tasks.verify_math import verifier

    task: Any = SimpleNamespace(answer=answer, ref=SimpleNamespace(dataset="mine"))
    return verifier(Item(task, None, {}))


PRODUCT = "21*x**4 - 44*x**2 + 3*x - 5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        (
            "1",
            ("99=1", "1=99", "77\n1", "1\n77", "1&77", "1_7", "1\\in\\alpha", "1\\%", "1%", "1\\degree", "1\\pm 0", "1+0\\alpha")
            + ("\\alpha=1", "1+10**-7", "1+10^{-7}", "[1]", "\\{1\\}", "\\begin{a}1", "1\\quad 77", "|1|", "1\\cup 7", "1<2", "1;1")
            + (
                "1.0000001",
                "1.00000000000000000000000000001",
                "\\lfloor 1.77\\rfloor",
                "1\\displaystyle 7",
                "\\alpha=1\\beta\\gamma=77",
            ),
        ),
        (
            "214",
            (
                "214+0*72101108108111",
                "214+721011-721011",
                "0+" * 30 + "214",
                "214+10**-7",
                "214/1.0000001",
                "214+\\frac{1}{100000001234567}",
                "214.0000001234567",
                "21400\\%7",
                "2,14",
            ),
        ),
        (
            "$244/607$",
            ("0.40197693574958815" + "1234567890" * 2, "0.401977" + "1234567", "0.401976935749581381234567890123", "0.402"),
        ),
        ("$\\sqrt{2}$", ("1.41421356237309504880168872", "1.4142", "\\sqrt{2}+10^{-20}", "\\sqrt{2.0000001}")),
        (
            PRODUCT,
            (
                f"{PRODUCT} + 99*(x-0.3719)*(x-1.7351)*(x-2.4379)",
                f"7={PRODUCT}",
                f"{PRODUCT}=7",
                f"{PRODUCT} + 10**-14*x*1234567",
                f"{PRODUCT} + 10^{{-99}}*x",
            ),
        ),
        ("$x$", ("\\sqrt{x^2}", "(x^2)^{1/2}", "|x|")),
        ("$(-\\infty, 3]$", ("(-\\infty, 3.0000001]", "(-\\infty, 3)", "3")),
    ],
)
def test_the_verifier_math_pays_one_formula_of_the_right_value(reference: str, wrong: tuple[str, ...]) -> None:
    score = math_scorer(reference)
    assert score(reference) == 1.0
    assert {answer: score(answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("1000", ("1,000", "1000.0", "10^3", "\\frac{2000}{2}", "$\\boxed{1000}$", "n = 1000", "100000\\%", "\\displaystyle 1000")),
        ("$244/607$", ("0.401977", "0.4019769357", "\\dfrac{488}{1214}", "\\left(\\frac{244}{607}\\right)")),
        ("50\\%", ("1/2", "0.5", "50\\%", "50%")),
        ("$30^\\circ$", ("30", "30^\\circ", "30\\degree")),
        ("$\\sqrt{2}/2$", ("\\frac{1}{\\sqrt{2}}", "1/sqrt(2)", "0.707107", "\\cos(\\pi/4)")),
        (PRODUCT, (PRODUCT.replace("**", "^"), "x*(21*x**3 - 44*x + 3) - 5", "$3x - 5 - 44x^{2} + 21x^{4}$")),
        ("$2\\ln(x)$", ("\\ln(x^2)", "ln(x) + ln(x)")),
        ("$\\alpha + 1$", ("1 + \\alpha",)),
        ("$\\{1, 2\\}$", ("\\{2,1\\}", "\\left\\{1, 2\\right\\}")),
        ("$x \\le 3$", ("x \\leq 3",)),
        ("$\\sqrt{-x^2-1}$", ("\\sqrt{-1-x^2}",)),
    ],
)
def test_the_verifier_math_pays_the_same_value_written_otherwise(reference: str, others: tuple[str, ...]) -> None:
    score = math_scorer(reference)
    assert {answer: score(answer) for answer in others} == dict.fromkeys(others, 1.0)
