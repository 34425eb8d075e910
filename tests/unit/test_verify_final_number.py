"""What `final_number` takes for a statement of the reference number, and what it does not."""

from __future__ import annotations

import time

import pytest

from shared.contracts.messages import TaskRef
from shared.tasks.derive import Item, TaskError
from shared.tasks.prompt import text_task
from shared.tasks.verify_final_number import MAX_END_CHARS, verifier


def reward(answer: str, reference: str = "8") -> float:
    ref = TaskRef(dataset="sums", config="{}", seed=1, index=0)
    task = text_task(ref, "What is 3 + 5?", reference)
    return float(verifier(Item(task=task, entry={}, dataset=None))(answer))


@pytest.mark.parametrize(
    "answer",
    [
        "8",
        "8.",
        "**8**",
        "= 8",
        "3 + 5 = 8",
        "x=8",
        "x == 8",
        "x := 8",
        "3 + 5 = 7 + 1 = 8",
        "4! / 3 = 8",
        "8! / 7! = 8",
        "Great! = 8",
        "**Sum** = 8",
        "<b>3 + 5</b> = 8",
        "Is 8",
        "The answer IS **8**.",
        "Equals 8",
        "not 7: it is 8",
        "Answer: 8",
        "Answer:8",
        "3 + 5: 8",
        "**3 + 5:** 8",
        "**3 + 5**: 8",
        "Question 3:\n8",
        "so:\n8",
        "3 + 5\n8",
        "**3 + 5**\n8",
        "*3 + 5*\n8",
        "3 + 5\n---\n8",
        "3 + 5\n***\n8",
        "3 + 5 =\n8",
        "Answer:**\n8",
        "The number that I look for:\n\n8",
        "<think>3 and 5 more</think>\n8",
        "The answer —\n8",
        "x" * 500 + "\n8",
        "The answer –\n8",
        "How many times:\n8",
        "She met them four times = 8",
        "A total of:\n8",
        "surplus: 8",
        "Positive: 8",
        "Correct: 8",
        "**" + "x" * 500 + "**\n8",
        "The answer is ٨",
        "8 apples",
        "The answer is 8 apples.",
        "total = 8 clips",
        "The answer is: **8** apples.",
        "**Total:** 8 clips.",
        r"$8\text{ clips}$",
        r"x = 8\text{cm}",
        "$8 dollars",
        "It's 8",
        "That’s **8**.",
        "Therefore, 8.",
        "So 8 apples",
        "8 = 8",
        "x is not 7, so x = 8",
        "There are not enough, so the total is 8",
        "She doesn't keep 3, but the answer is 8",
    ],
)
def test_a_plain_statement_is_paid(answer: str) -> None:
    assert reward(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "x != 8",
        "x !== 8",
        "x ! = 8",
        "x =/= 8",
        "x >= 8",
        "x > = 8",
        "x>=8",
        "x >=\n8",
        "x >\n8",
        "x <\n8",
        "x <= 8",
        "x ≥= 8",
        "x ≠\n8",
        "x ~= 8",
        "x += 8",
        "x -= 8",
        "x /= 8",
        "± = 8",
        "4 =\\= 8",
        "$x \\ne: 8$",
        "x \\neq\n8",
        "\\ne: 8",
        "x \\le = 8",
    ],
)
def test_a_comparison_other_than_equality_is_not_paid(answer: str) -> None:
    assert reward(answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "not: 8",
        "The answer is ٤٨",
        "The answer is not: **8**",
        "NOT = 8",
        r"x \not= 8",
        "It is not\n8",
        "It isn't: 8",
        "It isn’t = 8",
        "x does not equal: 8",
        "It is not equal to: 8",
        "not equals 8",
        "It cannot be 7 or: 8",
        "7 or\n8",
        "x is greater than or equals 8",
        "x is less than: 8",
        "at least: 8",
        "negative: 8",
        "**Negative:** 8",
        "anything except: 8",
        "anything but\n8",
        "everything except for: 8",
        "incorrect: 8",
        "wrong\n8",
        "false: 8",
        "instead of\n8",
        "neither 7 nor\n8",
        "The answer is not x = 8",
        "It is not equal to x = 8",
        "It is not true that x = 8",
        "It is not true: 8",
        "The answer is no longer: 8",
        "It never was x = 8",
        "The total isn't = 8 apples",
        "the wrong answer is 8",
        "It would be false that it is 8",
        "unless it is 8",
        "the opposite of it = 8",
        "7 = 8",
        "so 43 is 8",
        "x = 3: 7 = 8 apples",
    ],
)
def test_a_negation_an_alternative_or_a_bound_in_words_is_not_paid(answer: str) -> None:
    assert reward(answer) == 0.0


@pytest.mark.parametrize("answer", ["4:8", "at 12:08", "4 : 8", "4 :8", "**4**:8", "$4:8$", "1:2:8"])
def test_a_ratio_and_a_time_of_day_are_not_paid(answer: str) -> None:
    assert reward(answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "-\n8",
        "= -\n8",
        "3 -\n8",
        "3 −\n8",
        "3 - \r\n8",
        "10/\n8",
        "10/\n(8)",
        "10/(\n8",
        "10 /\n\n8",
        "10 ÷\n8",
        "3 +\n8",
        "2 *\n8",
        "2*\n8",
        "2 **\n8",
        "2 ×\n8",
        "2^\n8",
        "2 ^{\n8",
        "10/" + "\n" * MAX_END_CHARS + "8",
        "7 –\n8",
        "= –\n8",
        "x – \n8",
        "minus\n8",
        "divided by\n8",
        "16 multiplied by: 8",
        "4 times\n8",
        "four times\n8",
        "4 times: 8",
        "4 over\n8",
        "twice\n8",
        "7 plus\n8",
        "square root of\n8",
        "2 to the power of\n8",
        "half of: 8",
        "4 \\times\n8",
        "\\sqrt{\n8}",
    ],
)
def test_a_number_that_an_operator_leads_to_is_not_the_answer(answer: str) -> None:
    assert reward(answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "paid"),
    [
        ("= .8", "0.8", 1.0),
        (".8", "0.8", 1.0),
        ("-.8", "-0.8", 1.0),
        ("1 .8", "0.8", 0.0),
        ("= ..8", "0.8", 0.0),
        ("= .8", "8", 0.0),
        ("−8", "-8", 1.0),
        ("3 - 11 = −8", "-8", 1.0),
        ("3 - 11 = −8", "8", 0.0),
        ("3 − 8", "-8", 0.0),
        ("= −−8", "8", 0.0),
        ("-(8)", "-8", 1.0),
        ("= -(8)", "-8", 1.0),
        ("= −(8).", "-8", 1.0),
        ("$-(8)$", "-8", 1.0),
        ("8", "-(8)", 0.0),
        ("-8", "-(8)", 1.0),
        ("-(8)", "8", 0.0),
        ("-(-8)", "-8", 0.0),
        ("–8", "-8", 1.0),
        ("= –8", "-8", 1.0),
        ("–8", "8", 0.0),
        ("-8", "–8", 1.0),
        ("3 – 8", "-8", 0.0),
        ("= -–8", "-8", 0.0),
        ("+(8)", "8", 1.0),
    ],
)
def test_a_number_may_begin_with_its_point_and_have_a_typographic_minus(answer: str, reference: str, paid: float) -> None:
    assert reward(answer, reference) == paid


@pytest.mark.parametrize(
    "answer",
    [
        "she has 8 apples",
        "of 8 apples",
        "apples 8",
        "Anna's 8",
        "is8",
        "= 8 + 1",
        "7, 8",
        "7 or 8",
        "= 8%",
        "> 8",
        "≠ 8",
        "is not 8",
        "this 8",
        "",
    ],
)
def test_what_states_no_number_at_its_end_is_not_paid(answer: str) -> None:
    assert reward(answer) == 0.0


WORDS = (
    "hundred million dozen percent squared cubed half thirds tenths point pi plus minus times or and not less more off twenty seven"
)


@pytest.mark.parametrize("end", [*WORDS.split(), "or 9", "and a half", "red apples", "point five", "x", "%", "-", "apples 9", "^2"])
def test_what_follows_a_number_and_is_no_unit_makes_it_another_statement(end: str) -> None:
    assert reward(f"The answer is 8 {end}") == reward(f"8 {end}") == 0.0
    assert reward(rf"= 8\text{{ {end}}}") == 0.0


def test_thousands_of_formulas_are_read() -> None:
    for text in ("1{,}250", r"1\,250", r"= 1,\!250", "$1{,}250$"):
        assert reward(text, "1250") == reward(text, "1,250") == 1.0
    assert reward("1250", "1{,}250") == 1.0


@pytest.mark.parametrize("number", ["0,125", "0 125", "00,125", "0.125,000", "-0,5", "0,125,000", "0_125", "0,000"])
def test_a_number_whose_first_thousands_are_zero_is_no_reference_and_not_paid(number: str) -> None:
    for reference in ("125", "0.125", "-5", "-0.5", "125000", "0"):
        assert reward(f"= {number}", reference) == reward(number, reference) == 0.0
    with pytest.raises(TaskError, match="needs a number as reference"):
        reward("8", number)


def test_a_line_break_separates_no_thousands() -> None:
    for text in ("3\n456", "3\r\n456", "= 3\t456", "= 3\u2028456"):
        assert reward(text, "3456") == 0.0


def test_a_word_that_the_end_cuts_in_two_states_nothing() -> None:
    for dots in range(60, 100):
        assert reward("th" + "is 8" + "." * dots) == 0.0


@pytest.mark.parametrize("word", ["not", "negative", "divided by", "to the power of", "anything except"])
def test_a_negation_or_operation_that_the_end_cuts_in_two_is_not_paid(word: str) -> None:
    for spaces in range(50, MAX_END_CHARS + 5):
        assert reward(f"It is {word}:" + " " * spaces + "8") == 0.0, spaces


def test_a_long_answer_takes_no_longer() -> None:
    started = time.process_time()
    for piece in ("= ", "!= ", "> ", "- \n", "not ", "*\n", "< <", "8:", "\n"):
        reward(piece * 100_000 + "8")
    assert time.process_time() - started < 10.0
