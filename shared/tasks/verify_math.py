r"""The verifier `math`: the answer says the same as the reference answer, as formulas.

Both are read as a whole by `formula_reading`, in LaTeX or plain like `2*x**2 + sin(x)`. Numbers are
compared exactly, formulas by their values (`formula_values`), because a symbolic comparison of
ordinary wrong answers takes seconds; what is made of several formulas (sets, tuples, intervals,
inequalities) part by part.
"""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from functools import lru_cache

from shared.tasks.answers import extract_answer
from shared.tasks.derive import Item, TaskError
from shared.tasks.formula_reading import Reading, is_about_as_long, read
from shared.tasks.formula_signs import COUNTED, LETTER_UNIT, Unreadable
from shared.tasks.formula_values import DIGITS, exact_value, same_values
from shared.tasks.numerals import rounds_from
from shared.tasks.verifiers import AnswerScorer

ROUNDED_PLACES = 6
"""A rounded number with at least this many decimal places counts as equal to the reference."""
MAX_NUMBER_CHARS = 40

_read = lru_cache(maxsize=64)(read)


def verifier(item: Item) -> AnswerScorer:
    """1 for equal values, else 0.

    Raises:
        TaskError: the dataset's reference answer cannot be read as a whole.
    """
    text = item.task.answer or ""
    try:
        reference = _read(extract_answer(text) or "", of_reference=True)
    except Unreadable as problem:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier math cannot read the reference answer {text[-80:]!r}: it {problem}; write it as a "
            "formula, or use exact for answers in words",
        ) from None

    has_letters = bool(reference.letters or reference.parts)

    def score(answer: str) -> float:
        try:
            # `5 m` may be a product, but not where the reference has no letters.
            given = _read(answer if has_letters else LETTER_UNIT.sub(r"\\text{\1}", answer))
        except Unreadable:
            return 0.0
        is_short = len(answer) <= MAX_NUMBER_CHARS and given.kind == "number"
        return float((is_short or is_about_as_long(answer, text)) and _says_the_same(reference, given))

    return score


def _says_the_same(reference: Reading, given: Reading) -> bool:
    """`5` may be given as `x = 5`, and `x = 5` as `5`; but not as `y = 5`."""
    if given.name and given.name != reference.name and (reference.name or not _may_be_named(reference, given.name)):
        return False
    return _is_same(reference, given)


def _may_be_named(reference: Reading, name: str) -> bool:
    """`y = 2x` and `f(x) = 2x` name the reference `2x`. `B = A` says that two names are the same,
    and `x = 2x` is an equation.
    """
    function, _, argument = name.partition("(")
    is_a_name_itself = reference.value is not None and getattr(reference.value, "is_Symbol", False)
    if not function or "_" in function or function in reference.letters or is_a_name_itself:
        return False
    return not argument or argument.removesuffix(")") in reference.letters


def _is_same(reference: Reading, given: Reading) -> bool:
    if reference.parts or given.parts:
        return _has_same_parts(reference, given)
    if not given.letters <= reference.letters | {"e", "i"}:
        return False
    # The reference may lack a unit, but not the word for what is counted: it could be any text.
    if given.mark != reference.mark and given.mark and (reference.mark or given.mark.startswith(COUNTED)):
        return False
    if reference.kind in ("sign", "base") or given.kind in ("sign", "base"):
        return (reference.kind, reference.value or reference.text) == (given.kind, given.value or given.text)
    if given.kind == "number":
        exact = _number(reference)
        return exact is not None and len(given.text) <= MAX_NUMBER_CHARS and rounds_from(given.text, exact, ROUNDED_PLACES)
    # A formula that is not real at most points may have too few values to agree with itself.
    return (
        bool(reference.value == given.value) or same_values(reference.value, given.value, f"{reference.text}={given.text}") is True
    )


def _has_same_parts(reference: Reading, given: Reading) -> bool:
    if reference.kind != given.kind or len(reference.parts) != len(given.parts):
        return False
    if not reference.is_unordered:
        return all(_is_same_named(one, other) for one, other in zip(reference.parts, given.parts, strict=True))
    left = list(given.parts)
    for part in reference.parts:
        found = next((place for place, other in enumerate(left) if _is_same_named(part, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _is_same_named(reference: Reading, given: Reading) -> bool:
    return reference.name == given.name and _is_same(reference, given)


def _number(reference: Reading) -> Fraction | None:
    # Exact if it is rational, else to more digits than an answer may have.
    value = reference.value
    if value.free_symbols:
        return None
    with suppress(ZeroDivisionError):
        exact = exact_value(value, {})
        if exact is not None:
            return exact
    value = value.evalf(DIGITS)
    return Fraction(str(value)) if value.is_Float and value.is_finite else None
