"""The trainer's log of groups that steps leave out: few lines, and no alarm about what is usual."""

from __future__ import annotations

from services.trainer.selection.left_out import TOLD_EVERY_S, LeftOutReport, LeftOutSummary

STEP_S = 0.7


def told(news: LeftOutReport, steps: int, absurd: int, *, every: int = 1, first_s: float = 0.0) -> list[LeftOutSummary]:
    """The lines of `steps` steps with 20 answers of beta, of which each `every`-th step leaves a
    group with `absurd` answers out.
    """
    lines = []
    for number in range(steps):
        left = number % every == 0
        found = news.note(
            {"absurd": 1} if left else {},
            {"beta": absurd} if left else {},
            {"beta": 20 - absurd if left else 20},
            first_s + number * STEP_S,
        )
        lines += [found] if found else []
    return lines


def test_a_few_absurd_groups_of_an_honest_node_are_one_calm_line_in_ten_minutes_and_no_ban_is_suggested() -> None:
    steps = int(3600 / STEP_S)
    lines = told(LeftOutReport(0.0), steps, absurd=4, every=20)  # a group in 14 s, 1 % of the answers
    assert len(lines) == 3600 / TOLD_EVERY_S - 1
    assert all(line.usual and not line.absurd_ratio for line in lines)
    assert "ban" not in lines[0].remedy["absurd"] and lines[0].remedy["absurd"].startswith("none needed")
    assert 40 <= lines[0].groups["absurd"] <= 44 and 855 <= lines[0].steps <= 860


def test_a_sender_of_much_absurd_text_is_named_and_a_ban_is_suggested_once_it_goes_on() -> None:
    first, second = told(LeftOutReport(0.0), int(2.1 * TOLD_EVERY_S / STEP_S), absurd=8)
    assert not first.usual and first.absurd_ratio == {"beta": 0.4}
    assert "ban" not in first.remedy["absurd"]
    assert second.absurd_ratio == {"beta": 0.4} and "swarm ban" in second.remedy["absurd"]


def test_a_new_reason_is_told_at_once_and_again_only_with_the_next_line() -> None:
    news = LeftOutReport(0.0)
    first = news.note({"too_long": 2, "absurd": 1}, {"beta": 1}, {"beta": 9}, 5.0)
    assert first is not None and not first.usual and first.groups == {"too_long": 2, "absurd": 1}
    assert "model.max_length" in first.remedy["too_long"]
    assert news.note({"too_long": 1}, {}, {}, 6.0) is None
    later = news.note({"too_long": 1}, {}, {}, TOLD_EVERY_S)
    assert later is not None and (later.groups, later.steps) == ({"too_long": 2}, 2)


def test_nothing_left_out_is_no_line() -> None:
    news = LeftOutReport(0.0)
    assert [news.note({"absurd": 0}, {}, {"beta": 9}, number * TOLD_EVERY_S) for number in range(4)] == [None] * 4
