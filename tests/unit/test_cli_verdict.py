"""The verdict on a run: learning that fails is said, learning that goes well is not called failing,
and chance is called chance.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.run_records import FILE_NAMES_FILE, unknown_file
from swarm_cli.observe.plot import draw_curves
from swarm_cli.observe.remedies import next_commands
from swarm_cli.observe.run_files import (
    Evaluation,
    alike_of_steps,
    alike_words,
    bonus_of_steps,
    bonus_words,
    read_evaluations,
    read_steps,
)
from swarm_cli.observe.verdict import _RUNBOOKS, Outcome, node_verdict, run_verdicts, verdict

REPO = Path(__file__).parents[2]
RECORDED = sorted(path for path in (REPO / "experiments/results/smollm2-demo").glob("seed*/*") if (path / "eval.jsonl").is_file())


def steps(count: int = 40, **values: Any) -> list[dict[str, Any]]:
    """A healthy run; a list of two numbers goes in a line from the first to the second."""
    told = {"entropy": [0.8, 0.2], "kl_behaviour": 0.004, "grad_norm": 2.0, "reward_local": [0.1, 0.6], "updated": True} | values

    def at(value: Any, part: float) -> Any:
        return value[0] + part * (value[1] - value[0]) if isinstance(value, list) else value

    return [{"step": n + 1, **{name: at(value, n / max(1, count - 1)) for name, value in told.items()}} for n in range(count)]


def rates(*pass_rates: float, n: int = 200) -> list[Evaluation]:
    return [Evaluation(25 * number, rate, n) for number, rate in enumerate(pass_rates)]


def test_a_rising_held_out_rate_is_learning_and_says_by_how_much() -> None:
    assert verdict(steps(), rates(0.09, 0.4, 0.655)).lines() == ["learned: held-out 0.655, +0.565 over the base policy"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"held_out": "d" * 64}, "other held-out questions"),
        ({"scorer": "d" * 64}, "another reward"),
        ({"pass_rule": "d" * 64}, "another rule of what passes"),
        ({"scorer": None, "held_out": "d" * 64}, "another version"),
        ({"max_new_tokens": 64}, "up to 256 tokens .* up to 64"),
    ],
)
def test_a_base_policy_that_was_judged_otherwise_is_compared_with_nothing(changed: dict[str, Any], words: str) -> None:
    """As after a verifier that was replaced and a resume: 0.050 by one, 0.500 by the other."""
    ids: dict[str, Any] = {"held_out": "a" * 64, "scorer": "b" * 64, "pass_rule": "c" * 64, "max_new_tokens": 256}
    before = [Evaluation(0, 0.05, 200, **ids), Evaluation(10, 0.05, 200, **ids)]
    assert verdict(steps(), [*before, Evaluation(20, 0.5, 200, **ids)]).outcome is Outcome.LEARNED
    found = verdict(steps(), [*before, Evaluation(20, 0.5, 200, **{**ids, **changed})])
    assert (found.outcome, len(found.reasons)) == (Outcome.UNKNOWN, 1)
    assert re.search(words, found.reasons[0]) and "0.5" not in found.reasons[0] and "+" not in found.reasons[0]


def test_rewards_of_two_rewards_are_not_compared_either() -> None:
    """The new reward gives a tenth of the former one for the same answers."""
    ids = {"held_out": "a" * 64, "scorer": "b" * 64}
    other = {**ids, "scorer": "c" * 64}
    ran = [*steps(20, reward_local=0.9), *({**step, "step": 20 + step["step"]} for step in steps(20, reward_local=0.09))]
    same = [Evaluation(version, 0.5, 200, **ids) for version in (0, 20, 40)]
    assert verdict(ran, same).outcome is Outcome.FAILED
    found = verdict(ran, [*same[:2], Evaluation(40, 0.05, 200, **other)])
    assert (found.outcome, len(found.reasons)) == (Outcome.UNKNOWN, 1)


def test_a_reward_that_only_the_verifier_read_is_told_at_the_end_and_its_steps_are_not_compared_with_the_others() -> None:
    ids = {"held_out": "a" * 64, "scorer": "b" * 64}
    before, since = steps(20, reward_local=0.9, scorer="c" * 64), steps(20, reward_local=0.09, scorer="d" * 64)
    ran = [*before, *({**step, "step": 20 + step["step"]} for step in since)]
    found = verdict(ran, [Evaluation(version, 0.5, 200, **ids) for version in (0, 20, 40)])
    _, told = found.reasons
    assert found.outcome is Outcome.UNCLEAR and "before step 21" in told and "generator did not read the change" in told
    _, told = verdict(ran, []).reasons
    assert "before step 21" in told and "generator" not in told


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reward_local": 0.01}, "reward of local groups fell"),
        ({"entropy": 0.001}, "entropy collapsed"),
        ({"entropy": 6.6}, "answers at random"),
        ({"kl_behaviour": 5.0}, "away from the one that sampled (KL)"),
        ({"grad_norm": 400.0}, "gradient's norm rose"),
    ],
)
def test_each_way_of_failing_is_named_with_its_figures(values: dict[str, Any], words: str) -> None:
    healthy = steps(20, reward_local=0.3)
    found = verdict([*healthy, *steps(**{"reward_local": 0.3, **values})], rates(0.09, 0.1))
    assert found.outcome is Outcome.FAILED
    (told,) = found.reasons[1:]
    assert words in told
    assert "remedy" in found.lines()[-1]
    assert verdict(steps(), rates(0.09, 0.1)).outcome is Outcome.UNCLEAR


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("count", [8, 30, 60])
@pytest.mark.parametrize("groups", [2, 4])
def test_rewards_that_only_vary_by_chance_are_hardly_ever_called_failing(groups: int, count: int, mean: float) -> None:
    random, runs, failed = Random(1000 * groups + count), 400, 0
    for _ in range(runs):
        record = [{"reward_local": chance_reward(random, groups, mean), "updated": True} for _ in range(count)]
        failed += verdict(record, []).outcome is Outcome.FAILED
    assert failed <= 0.05 * runs


def chance_reward(random: Random, groups: int, mean: float) -> float:
    """Of groups of eight answers to tasks whose difficulty differs widely."""
    rates = [random.betavariate(mean, 1 - mean) for _ in range(groups)]
    return fmean(random.random() < rate for rate in rates for _ in range(8))


@pytest.mark.parametrize("means", [(0.5, 0.05), (0.1, 0.5, 0.5, 0.05)])
@pytest.mark.parametrize("count", [30, 60])
def test_a_collapse_of_the_reward_is_found_in_nearly_every_run(count: int, means: tuple[float, ...]) -> None:
    random, found = Random(count), 0
    for _ in range(100):
        rewards = [chance_reward(random, 4, means[at * len(means) // count]) for at in range(count)]
        found += verdict([{"reward_local": reward} for reward in rewards], []).outcome is Outcome.FAILED
    assert found >= 90


def test_groups_that_are_all_right_or_all_wrong_are_a_note_and_not_a_failure() -> None:
    told = verdict(steps(reward_local=0.3, updated=False), rates(0.3, 0.31))
    assert told.outcome is Outcome.UNCLEAR and "40 of 40 steps did not change the weights" in told.reasons[1]


@pytest.mark.parametrize(("count", "words"), [(1, "1 of 1 step did"), (3, "3 of 3 steps did"), (40, "40 of 40 steps did")])
def test_a_run_of_any_length_of_which_no_step_changed_the_weights_says_that_nothing_was_trained(count: int, words: str) -> None:
    told = verdict(steps(count, reward_local=0.95, updated=False), []).reasons
    assert any(words in reason and "nothing was trained" in reason for reason in told)
    one_changed = [*steps(1), *steps(count, reward_local=0.95, updated=False)]
    assert not any("nothing was trained" in reason for reason in verdict(one_changed, []).reasons)


def test_held_out_answers_that_are_too_few_for_want_of_a_reward_are_not_blamed_on_eval_tasks() -> None:
    found = verdict([], [Evaluation(0, 0.5, 16), Evaluation(25, 0.5, 7, unknown=9)])
    assert found.outcome is Outcome.UNKNOWN and "eval.tasks" not in found.reasons[0]
    assert "only 7 of 16 held-out answers have a known reward" in found.reasons[0] and "verifier.log" in found.reasons[0]
    few = verdict([], [Evaluation(0, 0.5, 8), Evaluation(25, 0.5, 7, unknown=1)])
    assert "8 held-out tasks are too few: set eval.tasks to 16 or more" in few.reasons[0]


@pytest.mark.parametrize(
    ("alike", "cut_off", "words"),
    [
        ({"wrong": 3}, 0.0, "24 all wrong.*--wrong"),
        ({"wrong": 3}, 0.9, "24 all wrong; 90% of the answers were cut off.*max_new_tokens"),
        ({"right": 4}, 0.0, "32 all right.*harder"),
        ({"alike": 2, "wrong": 1}, 0.1, "8 all wrong, 16 of equal rewards, .*the same"),
        ({"wrong": 2}, 0.1, None),
        ({}, 0.0, None),
    ],
)
def test_why_the_reward_stays_flat_is_told_of_the_last_groups_with_what_to_change(
    alike: dict[str, int], cut_off: float, words: str | None
) -> None:
    lines = steps(20, groups_local=4, alike_of=alike, cut_off_share=cut_off)
    told = alike_words(alike_of_steps(lines), "alpha")
    assert told == "" if words is None else re.search(rf"of the last 32 groups, {words}", told), told


def test_answers_that_are_mostly_cut_off_are_told_where_groups_differ_too() -> None:
    lines = steps(20, groups_local=4, alike_of={"wrong": 2}, cut_off_share=0.97)
    assert re.search(
        "97% of the last 32 groups.* cut off: raise generator.max_new_tokens", alike_words(alike_of_steps(lines), "alpha")
    )


def test_where_every_answer_is_cut_off_and_earns_all_the_same_that_is_not_called_the_cause() -> None:
    told = alike_words(alike_of_steps(steps(20, groups_local=4, alike_of={"wrong": 2}, cut_off_share=1.0)), "alpha")
    assert "every answer of the last 32 groups ran to the limit" in told and "does not stop by itself" in told
    assert "cut off" not in told and "shorter" not in told


@pytest.mark.parametrize(
    ("bonus", "names"),
    [({"short": 3}, "only short differed: it"), ({"form": 1, "short": 2}, "only form, short differed: they"), ({}, None)],
)
def test_a_bonus_that_alone_was_learned_is_named_with_what_to_change(bonus: dict[str, int], names: str | None) -> None:
    lines = steps(20, groups_local=4, alike_of={}, cut_off_share=0.0, bonus_of=bonus)
    told = bonus_words(alike_of_steps(lines), bonus_of_steps(lines))
    assert told == "" if names is None else told.startswith(f"24 of the last 32 groups had no right answer, and there {names}"), (
        told
    )
    assert len(told) <= 300, "the page shows no more"


def test_a_bonus_in_few_of_the_groups_that_taught_is_not_told() -> None:
    lines = steps(20, groups_local=4, alike_of={}, cut_off_share=0.0, bonus_of={"short": 1})
    assert bonus_words(alike_of_steps(lines), bonus_of_steps(lines)) == ""


def test_a_held_out_score_that_fell_is_followed_by_its_cause(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    lines = steps(8, groups_local=4, alike_of={}, cut_off_share=0.0, bonus_of={"short": 4}, entropy=0.1)
    (tmp_path / "alpha" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = [{"policy_version": version, "pass_rate": rate, "n": 18} for version, rate in ((0, 3 / 18), (8, 0.0))]
    (tmp_path / "alpha" / "eval.jsonl").write_text("".join(json.dumps(score) + "\n" for score in scores))
    judgement, cause, *_ = node_verdict(tmp_path / "alpha", ended=True)
    assert "-0.167" in judgement and "only short differed" in cause


def test_a_few_groups_or_steps_of_an_earlier_version_are_not_judged() -> None:
    assert alike_words(alike_of_steps(steps(3, groups_local=4, alike_of={"wrong": 4}, cut_off_share=0.0)), "alpha") == ""
    assert alike_words(alike_of_steps(steps(20, groups_local=4)), "alpha") == ""


@pytest.mark.parametrize(
    "odd", [{"groups_local": "4"}, {"alike_of": {"wrong": "4"}}, {"alike_of": "wrong"}, {"cut_off_share": "all"}]
)
def test_a_record_that_holds_something_else_says_nothing_of_its_groups(odd: dict[str, Any]) -> None:
    """It may have been copied here from anywhere."""
    lines = steps(20, **{"groups_local": 4, "alike_of": {"wrong": 4}, "cut_off_share": 0.0} | odd)
    assert alike_words(alike_of_steps(lines), "alpha") == ""


def test_a_policy_that_was_sure_before_it_was_trained_has_not_collapsed() -> None:
    assert verdict(steps(entropy=0.01), rates(0.3, 0.31)).outcome is Outcome.UNCLEAR


def test_a_pass_rate_below_the_base_policys_is_failing_and_one_within_chance_is_not() -> None:
    assert verdict([], rates(0.09, 0.0)).outcome is Outcome.FAILED
    assert "from 0.090 to 0.000" in verdict([], rates(0.09, 0.0)).reasons[0]
    assert verdict([], rates(0.09, 0.07)).outcome is Outcome.UNCLEAR
    few = verdict([], rates(1.0, 0.0, n=15))
    assert few.outcome is Outcome.UNKNOWN and "15 held-out tasks are too few" in few.reasons[0]
    assert verdict([], rates(1.0, 0.0, n=16)).outcome is Outcome.FAILED


def test_a_fall_from_the_best_is_told_though_there_is_a_gain_left() -> None:
    (told,) = verdict(steps(), rates(0.09, 0.7, 0.4)).lines()
    assert told == ("learned, and fell from its best: held-out fell from its best, 0.700 at version 25, to 0.400 (base 0.090)")
    assert verdict(steps(), rates(0.09, 0.7, 0.1)).outcome is Outcome.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("n", [16, 50, 200])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("count", [2, 10, 60])
def test_an_unchanged_policy_is_hardly_ever_called_failing_however_often_it_is_evaluated(count: int, rate: float, n: int) -> None:
    random, runs, failed = Random(count), 200, 0
    for _ in range(runs):
        drawn = [sum(random.random() < rate for _ in range(n)) / n for _ in range(count)]
        failed += verdict([], rates(*drawn, n=n)).outcome is Outcome.FAILED
    assert failed <= 0.05 * runs


def test_of_graded_answers_of_which_none_passes_the_mean_reward_is_told() -> None:
    graded = [Evaluation(0, 0.0, 200, mean_reward=0.2), Evaluation(25, 0.0, 200, mean_reward=0.7)]
    found = verdict(steps(), graded)
    assert found.outcome is Outcome.UNKNOWN
    assert found.reasons[0].endswith("mean held-out reward 0.700, of the base policy 0.200")
    assert verdict(steps(), [Evaluation(0, 0.0, 200), Evaluation(25, 0.0, 200)]).outcome is Outcome.UNCLEAR


def test_a_policy_that_is_right_nearly_always_may_be_sure_of_it_and_rest() -> None:
    solved = [*steps(1, reward_local=0.99), *steps(entropy=0.001, reward_local=0.99, updated=False)]
    assert verdict(solved, rates(0.5, 0.98)).lines() == ["learned: held-out 0.980, +0.480 over the base policy"]


def test_without_evaluations_that_is_said_instead_of_a_verdict() -> None:
    found = verdict(steps(), [])
    assert found.outcome is Outcome.UNKNOWN and "eval.tasks" in found.reasons[0]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_recorded_runs_of_a_real_model_that_learned_are_called_so(folder: Path) -> None:
    assert RECORDED
    assert verdict(read_steps(folder), read_evaluations(folder)) == verdict([], read_evaluations(folder))
    assert verdict(read_steps(folder), read_evaluations(folder)).outcome is Outcome.LEARNED


_FIELD = st.one_of(st.none(), st.booleans(), st.floats(allow_nan=True), st.text(max_size=3))


@given(
    st.lists(st.fixed_dictionaries({name: _FIELD for name in ("entropy", "kl_behaviour", "grad_norm", "reward_local", "updated")})),
    st.lists(st.builds(Evaluation, st.integers(0, 9), st.floats(0, 1), st.integers(0, 300)), max_size=4),
)
def test_whatever_the_files_hold_there_is_a_verdict(record: list[dict[str, Any]], evaluations: list[Evaluation]) -> None:
    assert verdict(record, evaluations).lines()


def test_a_nodes_files_are_read_and_a_node_without_any_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    lines = [
        {"policy_version": 50 * number, "pass_rate": rate, "n": 200, "per_task": {"gcd": {"n": 100, "pass_rate": rate / 2}, "x": 3}}
        for number, rate in enumerate((0.09, 0.0))
    ]
    (tmp_path / "alpha" / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (told, remedy) = run_verdicts(tmp_path, ["alpha", "beta"])
    assert told.startswith("alpha: LEARNING FAILS: held-out fell below") and "remedy" in remedy
    assert [each.per_task["gcd"].score for each in read_evaluations(tmp_path / "alpha")] == [0.045, 0.0]


def test_the_end_names_a_file_by_its_name_and_not_by_its_rows(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    dataset = "file_" + "ab" * 20
    (tmp_path / "alpha" / FILE_NAMES_FILE).write_text(json.dumps({"dataset": dataset, "file": "mine.jsonl"}) + "\n")
    unknown_file(tmp_path / "alpha", "0").write_text(json.dumps({"dataset": dataset, "cause": "raised", "answers": 3}) + "\n")
    told = "\n".join(run_verdicts(tmp_path, ["alpha"]))
    assert "3 of mine.jsonl (abababab) (raised)" in told and dataset not in told
    assert told.startswith("alpha: no step was trained\n")


def test_the_end_says_that_a_reward_that_was_always_none_taught_nothing(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    unknown_file(tmp_path / "alpha", "0").write_text(
        json.dumps({"dataset": "gcd", "cause": "not_applicable", "answers": 32}) + "\n"
    )
    unscored = {"policy_version": 0, "pass_rate": None, "mean_reward": None, "n": 0, "unknown": 16}
    (tmp_path / "alpha" / "eval.jsonl").write_text(json.dumps(unscored) + "\n")
    told = run_verdicts(tmp_path, ["alpha"])
    assert any("nothing can be learnt: the reward returned None for all 32 answers" in line for line in told), told


@pytest.mark.slow
def test_each_dataset_of_the_held_out_tasks_gets_a_diagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture's titles cannot be read back, so they are taken where it would be saved."""
    from matplotlib.figure import Figure

    titles: list[str] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: titles.extend(axis.get_title() for axis in figure.axes))
    (tmp_path / "alpha").mkdir()
    score = {"n": 100, "pass_rate": 0.5, "mean_reward": 0.5}
    line = {"policy_version": 0, "pass_rate": 0.5, "n": 200, "per_task": {"gcd": score, "leg_counting": score, "a": score}}
    (tmp_path / "alpha" / "eval.jsonl").write_text(json.dumps(line) + "\n")
    draw_curves("run", [tmp_path / "alpha"], tmp_path / "out.png")
    assert {"Held-out: gcd", "Held-out: leg_counting", "Held-out: a"} <= set(titles)


def test_a_dozen_steps_whose_reward_wanders_are_not_failing() -> None:
    """The demo's, which went on to learn."""
    rewards = (0.125, 0.219, 0.188, 0.177, 0.115, 0.200, 0.208, 0.200, 0.141, 0.063, 0.094, 0.100)
    found = verdict([{"reward_local": reward, "updated": True} for reward in rewards], rates(0.09, 0.115))
    assert found.outcome is Outcome.UNCLEAR and len(found.reasons) == 1


@pytest.mark.parametrize(
    ("record", "held_out", "page"),
    [
        ([0.3] * 20 + [0.01] * 20, (0.09, 0.1), "SwarmRewardFalling"),
        ([0.3] * 20 + [0.01] * 20, (0.5, 0.1), "SwarmHeldOutBelowBase"),
    ],
)
def test_the_remedy_is_the_page_about_what_is_wrong(record: list[float], held_out: tuple[float, float], page: str) -> None:
    found = verdict([{"reward_local": reward} for reward in record], rates(*held_out))
    *_, remedy = found.lines()
    assert found.outcome is Outcome.FAILED and f"/{page}.md" in remedy
    assert all((Path(__file__).parents[2] / "docs" / "runbooks" / f"{name}.md").is_file() for _, name in _RUNBOOKS)


def test_a_run_that_is_not_judged_says_which_evaluation_is_missing() -> None:
    base = Evaluation(0, 0.25, 200)
    for evaluations, missing in (
        ([], "no held-out evaluation"),
        ([base], "nothing was evaluated after step 0"),
        ([replace(base, policy_version=6)], "base policy was not evaluated"),
    ):
        told = verdict([], evaluations).reasons[0]
        assert missing in told and ("swarm eval" in told) == (missing[0] == "n")


def test_what_a_run_offers_at_its_end_fits_its_evaluations_and_names_its_own_folder(tmp_path: Path) -> None:
    run, node = tmp_path / "ex", tmp_path / "ex" / "alpha"
    node.mkdir(parents=True)
    (node / "metrics.jsonl").write_text('{"step": 1}\n')
    for rates, best in (((), False), ((0.25,), False), ((0.25, 0.2), False), ((0.25, 0.25), False), ((0.25, 0.3, 0.2), True)):
        lines = [json.dumps({"policy_version": version, "pass_rate": rate, "n": 20}) for version, rate in enumerate(rates)]
        (node / "eval.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (command, what), *_ = [each for each in next_commands(run, "alpha", "") if "export" in each[0]]
        assert ("--best" in command) == ("best" in what) == best
        assert ("better than the base policy" in what) == (len(rates) == 2)
        told = run_verdicts(run, ["alpha"], ended=True)[0]
        assert (f"`swarm eval {node}`" in told) == (len(rates) < 2), told


def test_a_destroyed_record_of_evaluations_is_named_instead_of_the_settings(tmp_path: Path) -> None:
    for node, content in (("alpha", Random(1).randbytes(5000) + b"\n"), ("beta", b'{"policy_version": 0, "n": 2')):
        (tmp_path / node).mkdir()
        (tmp_path / node / "metrics.jsonl").write_text('{"step": 1}\n')
        (tmp_path / node / "eval.jsonl").write_bytes(content)
    alpha, beta = run_verdicts(tmp_path, ["alpha", "beta"])
    assert alpha.startswith("alpha: not judged: ") and str(tmp_path / "alpha" / "eval.jsonl") in alpha and "eval.tasks" not in alpha
    assert "eval.tasks" in beta, "a line that is still being written is not lost"
    lines = [json.dumps({"policy_version": at, "pass_rate": 0.5, "n": 200}) for at in (0, 6)]
    (tmp_path / "alpha" / "eval.jsonl").write_text("\n".join([lines[0], "torn{", lines[1], ""]))
    judged, note = run_verdicts(tmp_path, ["alpha"])
    assert "no clear gain" in judged and "1 line of" in note, "what else is known is judged"
