"""Rows as they are published, with the reward that people use for them, as written: a right answer
earns full marks and a wrong one does not, in the usual endings of an instruct model.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from tests.unit.test_file_shapes import as_lines, as_parquet

REWARDS = r"""
import re

# GSM8K, as verl scores it, without verl's preparation of the rows.
def gsm8k(completions, answer, **kwargs):
    def number(text):
        found = re.findall(r"#### (\-?[0-9\.\,]+)", text)
        return found[-1].replace(",", "") if found else None
    return [float(number(text) == number(right)) for text, right in zip(completions, answer)]

def gsm8k_flexible(completions, answer, **kwargs):
    def number(text):
        found = [each for each in re.findall(r"(\-?[0-9\.\,]+)", text) if each not in ("", ".")]
        return found[-1].replace(",", "").rstrip(".") if found else None
    return [float(number(text) == number(right)) for text, right in zip(completions, answer)]

# MATH, as its authors' last_boxed_only_string.
def boxed(text):
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, place = 0, start + len("\\boxed")
    for end in range(place, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[place + 1 : end].replace(" ", "").replace("\\dfrac", "\\frac")
    return None

def hendrycks(completions, solution, **kwargs):
    return [float(boxed(text) is not None and boxed(text) == boxed(right)) for text, right in zip(completions, solution)]

# DeepScaleR: the answer column against the box.
def deepscaler(completions, answer, **kwargs):
    return [float(boxed(text) == str(right).replace(" ", "")) for text, right in zip(completions, answer)]

# Open-R1's accuracy_reward: messages, the column `solution`, None where the reference has no box.
def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [None if boxed(right) is None else float(boxed(text) == boxed(right)) for text, right in zip(contents, solution)]

def format_reward(completions, **kwargs):
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"], re.DOTALL | re.MULTILINE) else 0.0 for completion in completions]

# DAPO's, of verl's math_dapo.py: a dict with the score, -1 for a wrong answer.
def math_dapo(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None):
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str[-300:])
    prediction = found[-1].strip().strip("$") if found else "[INVALID]"
    right = prediction == str(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}

# TRL's documentation.
def reward_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == str(right) else 0.0 for content, right in zip(contents, ground_truth)]

# verl's default_compute_score.
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    extra_info.get("index")
    if data_source == "openai/gsm8k":
        found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
        return float(bool(found) and found[-1].replace(",", "") == ground_truth)
    raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
"""
WHY = "They sell 48 in April and half as many, 24, in May: 48 + 24 = 72."
R1 = f"<think>\n{WHY}\n</think>\n<answer>\n$\\boxed{{72}}$\n</answer>"
GSM8K = {
    "question": "How many clips in both months?",
    "answer": "24 clips in May: 48/2 = <<48/2=24>>24.\nSo <<48+24=72>>72.\n#### 72",
}
MATH = {"problem": "Find $8 \\cdot 9$.", "level": "Level 1", "type": "Algebra", "solution": "It is $8\\cdot 9=\\boxed{72}$."}
OPENR1 = {
    "problem": "Find 8 times 9.",
    "solution": "It is $\\boxed{72}$.",
    "answer": "72",
    "problem_type": "Algebra",
    "uuid": "u",
    "generations": ["a"],
    "correctness_math_verify": [True],
    "correctness_count": 1,
    "messages": [{"content": "p", "role": "user"}, {"content": "a", "role": "assistant"}],
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve 8 * 9. The last line of your response should be of the form Answer: $Answer", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "72", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many clips in both months?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
WITHOUT_EXTRA = {name: value for name, value in VERL.items() if name != "extra_info"}
BOXED, MARKED, SAID, BOLD = (
    f"{WHY} So $\\boxed{{72}}$.",
    f"{WHY}\n#### 72",
    f"{WHY} The answer is 72.",
    f"{WHY}\n\nThe answer is **72**.",
)
SHAPES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "GSM8K": (GSM8K, "gsm8k", [MARKED]),
    "GSM8K, flexible": (GSM8K, "gsm8k_flexible", [MARKED, SAID, "72"]),
    "MATH": (MATH, "hendrycks", [BOXED]),
    "DeepScaleR": ({"problem": "Find 8 times 9.", "answer": "72", "solution": "It is \\boxed{72}."}, "deepscaler", [BOXED]),
    "Open-R1": (OPENR1, "accuracy_reward", [BOXED, R1]),
    "DAPO": (DAPO, "math_dapo", [f"{WHY}\nAnswer: 72", f"{WHY}\n\nAnswer: $72$"]),
    "TRL": ({"prompt": "Find 9 times 8.", "ground_truth": "72"}, "reward_func", [BOXED]),
    "verl": (VERL, "compute_score", [MARKED]),
    "verl without extra_info": (WITHOUT_EXTRA, "compute_score", [MARKED]),
}


def scored(spec: TaskSpec, texts: list[str]) -> JobResult:
    async def run() -> list[JobResult]:
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec]) as pool:
            return await pool.run([ScoringJob(ref=TaskRef(dataset=spec.dataset, seed=1, index=0), texts=texts)])

    (result,) = asyncio.run(run())
    assert result.reason is None, result.detail
    return result


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_the_usual_reward_of_published_rows_pays_right_answers_and_no_wrong_ones(tmp_path: Path, shape: str, write: Any) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    row, function, right = SHAPES[shape]
    spec = with_row_name(TaskSpec(path=str(write(tmp_path, [row])), reward=f"{tmp_path}/r.py:{function}"))
    wrong = [text.replace("72", "73") for text in right]
    result = scored(spec, [*right, *wrong])
    assert result.rewards == [1.0] * len(right) + [-1.0 if shape == "DAPO" else 0.0] * len(wrong), result.detail


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["GSM8K", "MATH", "DeepScaleR", "Open-R1", "DAPO", "TRL", "verl"])
@pytest.mark.parametrize("verifier", ["final_number", "math"])
def test_a_built_in_verifier_pays_the_usual_endings_of_right_answers_to_published_rows(
    tmp_path: Path, shape: str, verifier: str
) -> None:
    spec = with_row_name(TaskSpec(path=str(as_lines(tmp_path, [SHAPES[shape][0]])), verifier=verifier))
    right = [BOXED, MARKED, R1, "72", "**72**", "\\boxed{72}"]
    if verifier == "final_number":  # `math` reads all of a text or nothing
        right += [SAID, BOLD]
    wrong = [text.replace("72", "73") for text in right]
    assert scored(spec, [*right, *wrong]).rewards == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.slow
def test_times_of_a_parquet_file_reach_a_reward_as_text_and_numbers_of_a_csv_are_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    from datetime import date, datetime, timedelta

    from pyarrow import parquet

    when, day, long = datetime(2026, 1, 2, 3, 4, 5), date(2026, 1, 2), timedelta(seconds=1.5)
    row = {"question": "q", "answer": 1, "when": when, "day": day, "long": long, "deep": {"day": day, "price": 1.5}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "q.parquet")
    (tmp_path / "q.csv").write_text("question,answer,price\nq,1,1.5\n")
    (tmp_path / "r.py").write_text(
        "import json\n"
        "def told(completions, **columns):\n"
        "    def of(text):\n"
        "        return {name: columns[name][0] for name in json.loads(text)}\n"
        "    return [float(of(text) == json.loads(text)) for text in completions]\n"
    )
    wanted = {"day": "2026-01-02", "deep": {"day": "2026-01-02", "price": 1.5}, "long": 1.5, "when": "2026-01-02T03:04:05"}
    for file, columns in (("q.parquet", wanted), ("q.csv", {"price": "1.5"})):
        spec = with_row_name(TaskSpec(path=str(tmp_path / file), reward=f"{tmp_path}/r.py:told"))
        assert scored(spec, [json.dumps(columns, sort_keys=True)]).rewards == [1.0], file
