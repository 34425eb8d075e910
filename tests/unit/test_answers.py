"""Where the answer is in a completion: one rule for all verifiers."""

from __future__ import annotations

import time

import pytest

from shared.contracts.messages import TaskRef
from shared.tasks.answers import FREE_SPACE_CHARS, MAX_ANSWER_CHARS, extract_answer
from shared.tasks.derive import HASH_ORDERED, Item, TaskError, dataset_names, derive_item
from shared.tasks.prompt import text_task
from shared.tasks.scoring import score_texts
from tests.unit.task_answers import items


def rewards(verifier: str, reference: str, *texts: str) -> list[float | None]:
    """Of completions, as a row of a file is scored."""
    task = text_task(TaskRef(dataset="mine", config="{}", seed=1, index=0), "?", reference)
    return score_texts(Item(task=task, entry={}, dataset=None), verifier, list(texts))[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8", "8"),
        ("so <answer> 8 </answer>, I think", "8"),
        ("<answer>7</answer> no: <answer>8</answer>", "8"),
        ("<answer>8</answer> then <answer>cut", "8"),
        ("8</answer>", "8</answer>"),
        (r"The answer is \boxed{8}.", "8"),
        (r"\boxed{7}, or rather \boxed{8}", "8"),
        (r"\boxed{7}, or rather \boxed{8", "7"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}} are all", r"\{1,2\}"),
        (r"\fbox{8}", "8"),
        (r"\\boxed {8}", "8"),
        (r"<answer>$\boxed{8}$.</answer>", "8"),
        (r"<answer>it is \boxed{8}</answer>", r"it is \boxed{8}"),
        (r"\boxed{7} <answer>8</answer>", "8"),
        ("3 + 5 = 8\n#### 8", "8"),
        ("so #### 8\n", "8"),
        ("#### 7\nor not", "#### 7\nor not"),
        ("##### 8", "##### 8"),
        ("\\boxed{8}\n#### 7", "8"),
        ("</think> 8", "8"),
        ("<think>so 7</think> 8", "8"),
        ("3 + 5, open in the prompt</think>\n\n8", "8"),
        ("<think>a<think>b</think>c</think> 8", "8"),
        ("<think>maybe <answer>7</answer>?</think>\nThe final answer is 8", "The final answer is 8"),
        (r"<think>\boxed{7}</think> 8", "8"),
        ("<think>a</think> 8 <think>or <answer>7</answer>", "8"),
        ("[THINK]7[/THINK] 8", "8"),
        ("<reasoning>7</reasoning>\n<answer>8</answer>", "8"),
        ("<think>so 7", None),
        ("<think>so <answer>7</answer>", None),
        ("<think>so 7</think>\n", None),
        ("", ""),
        ("<answer></answer>", ""),
    ],
)
def test_the_answer_follows_the_last_thought_in_tags_a_box_or_after_the_heading(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("verifier", ["exact", "final_number", "math"])
def test_every_verifier_reads_the_endings_that_models_are_trained_to_give(verifier: str) -> None:
    right = [
        "80",
        r"The answer is \boxed{80}.",
        r"The answer is $\boxed{80}$.",
        r"\[\boxed{80}\]",
        "#### 80",
        "40 + 40 = 80\n#### 80",
        "</think> 80",
        "<think>so 7</think> 80",
        "**80**",
        "$80$",
        r"\(80\)",
        "<answer>80</answer>",
        r"<answer>\boxed{80}</answer>",
        "<think>7</think><answer> **80** </answer>",
    ]
    assert dict(zip(right, rewards(verifier, "80", *right), strict=True)) == dict.fromkeys(right, 1.0)
    wrong = [
        r"\boxed{81}",
        "#### 81",
        "<think>80</think> 81",
        "<think>80",
        "<think><answer>80</answer>",
        "80</think>",
        r"80 \boxed{81}",
    ]
    assert dict(zip(wrong, rewards(verifier, "80", *wrong), strict=True)) == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize("verifier", ["exact", "math"])
def test_what_is_strict_stays_strict_about_the_answer_that_was_found(verifier: str) -> None:
    wrong = [r"<answer>so \boxed{80}</answer>", r"\boxed{so 80}", "#### so 80", "</think> so 80", "<answer>80 or 81</answer>"]
    assert rewards(verifier, "80", *wrong) == [0.0] * len(wrong)


def test_white_space_in_an_answer_is_bounded() -> None:
    some, much = " \n" * (FREE_SPACE_CHARS // 2), " \t\n" * FREE_SPACE_CHARS
    assert extract_answer(f"<answer>{some}8</answer>") == extract_answer(f"{some}8") == "8"
    spread = "a" + "".join(" " * 50 + "b" for _ in range(60))
    for text in (
        f"<answer>{much}8</answer>",
        f"{much}8",
        f"8{much}",
        f"7{much}8",
        f"</think>{much}8",
        f"\\boxed{{{much}8}}",
        spread,
    ):
        assert extract_answer(text) is None, text[:30]
    assert extract_answer(f"{much}<answer>8</answer>") == "8", "what is before an answer in tags is no part of it"
    grid = "\n".join(" ".join("0123456789") for _ in range(60))
    assert extract_answer(grid) == grid


def test_an_answer_that_is_too_long_or_only_a_thought_earns_nothing_even_where_no_answer_is_right() -> None:
    (item,) = items("polynomial_equations", 1)
    no_roots = item._replace(entry={**item.entry, "answer": "", "metadata": {**item.entry["metadata"], "real_solutions": []}})
    texts = ["", "<think>none", "<think>none</think>", " " * 200]
    assert score_texts(no_roots, "reasoning_gym", texts)[0] == [1.0, 0.0, 0.0, 0.0]
    assert rewards("exact", "4", "4" * (MAX_ANSWER_CHARS + 1)) == [0.0]


def test_the_search_takes_linear_time_on_hostile_text() -> None:
    started_s = time.process_time()
    for part in (
        "<answer>",
        "</answer>",
        "\\boxed{",
        "\\fbox {",
        "\\boxed{}",
        "\\",
        "{",
        "}",
        "<think>",
        "</think>",
        "\n####",
        " ",
    ):
        extract_answer(part * 100_000)
        extract_answer("<answer>" + part * 100_000 + "</answer>")
        extract_answer("\\boxed{" + part * 100_000 + "8}")
    assert time.process_time() - started_s < 15.0


def derived(dataset: str, index: int) -> Item | None:
    try:
        return derive_item(TaskRef(dataset=dataset, seed=31, index=index))
    except TaskError:
        return None


@pytest.mark.slow
def test_reference_answers_of_all_datasets_are_read_whole_and_none_pays_for_hidden_white_space() -> None:
    """4 kB of white space before an answer, or in it, were free on 100 datasets."""
    looked_at = 0
    for name in set(dataset_names()) - HASH_ORDERED:
        for index in range(4):
            item = derived(name, index)
            reference = item.entry["answer"] if item else None
            if item is None or not isinstance(reference, str):
                continue
            looked_at += 1
            assert extract_answer(reference) == extract_answer(f"<answer>{reference}</answer>") == reference.strip(), (name, index)
            hidden = " \t" * 2000
            texts = [
                hidden + reference,
                reference + hidden,
                reference.replace(" ", " " + hidden, 1),
                reference.replace("\n", "\n" * 1000, 1),
            ]
            changed = [f"<answer>{text}</answer>" for text in texts if text != reference] + [texts[0]]
            found, _ = score_texts(item, "reasoning_gym", changed)
            assert all(reward is not None and reward < 0.99 for reward in found), (name, index)
    assert looked_at > 300
