"""`swarm new`: a folder in which `swarm up` trains, from a model and a file of questions."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shared.config import load_config
from swarm_cli.new import own_reward
from tests import forked
from tests.nats_server import free_port

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "models" / "base"
MOST_LINES, MOST_LINES_WITHOUT_COMMENTS = 20, 15


def _swarm(folder: Path, *arguments: str, timeout_s: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    where = {"PYTHONPATH": str(REPO), **environment}
    done = forked.run("swarm_cli", arguments, environment={**clean, **where}, cwd=folder, timeout=timeout_s)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def _questions(file: Path, answers: list[str]) -> Path:
    rows = [{"question": f"What is question {index}?", "answer": answer} for index, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _written(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "node.toml").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "verifier"),
    [
        ([f"{number} apples were sold, so it is\n#### {number}" for number in range(60)], "final_number"),
        ([f"\\frac{{{number}}}{{7}}" for number in range(1, 60)], "math"),
        ([f"the town of N{'o' * number}" for number in range(60)], "exact"),
    ],
    ids=["GSM8K", "expressions", "words"],
)
def test_what_is_written_passes_every_check_and_has_the_verifier_that_reads_the_answers(
    answers: list[str], verifier: str, tmp_path: Path
) -> None:
    data = _questions(tmp_path / "my questions.jsonl", answers)
    done = _swarm(tmp_path, "new", "mine", "--model", str(MODEL), "--data", data.name)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mine"
    written = _written(folder)
    assert written["tasks"] == [{"path": f"../{data.name}", "verifier": verifier}]
    assert 16 <= written["eval"]["tasks"] <= len(answers) // 2
    lines = [line for line in (folder / "node.toml").read_text().splitlines() if line]
    assert len(lines) <= MOST_LINES
    assert len([line for line in lines if not line.startswith("#")]) <= MOST_LINES_WITHOUT_COMMENTS
    config = load_config(folder / "node.toml")
    assert config.sampler.external == 0 and config.tasks[0].source == "file"
    checked = _swarm(folder, "config", "check")
    assert checked.returncode == 0, checked.stderr
    assert "OK: 1 task source" in checked.stdout + checked.stderr
    swap = (folder / "node.toml").read_text().replace(f'verifier = "{verifier}"', 'reward = "rewards.py:accuracy"')
    (folder / "node.toml").write_text(swap)
    tried = _swarm(folder, "config", "check")
    assert tried.returncode == 0 and "warning" not in tried.stdout + tried.stderr, "the reward beside it pays the references"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere", "--data", "rows.jsonl"), "there is no folder nowhere"),
        (("--model", str(MODEL), "--data", "nothing.jsonl"), "there is no nothing.jsonl"),
        (("--model", "some/name", "--data", "rows.jsonl"), "needs --revision"),
        (("--model", str(MODEL), "--data", "broken.jsonl"), "broken.jsonl: line 1"),
    ],
    ids=["no model", "no data", "no revision", "broken rows"],
)
def test_what_cannot_be_used_is_told_and_leaves_no_folder(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    _questions(tmp_path / "rows.jsonl", [str(number) for number in range(40)])
    (tmp_path / "broken.jsonl").write_text("{\n")
    done = _swarm(tmp_path, "new", "mine", *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("file", ["node.toml", "rewards.py"])
def test_a_folder_that_has_what_would_be_written_is_left_as_it_is(file: str, tmp_path: Path) -> None:
    data = _questions(tmp_path / "rows.jsonl", ["1"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text("mine")
    done = _swarm(tmp_path, "new", "mine", "--model", str(MODEL), "--data", str(data))
    assert done.returncode != 0 and f"mine has a {file}" in done.stderr
    assert [each.name for each in (tmp_path / "mine").iterdir()] == [file]
    assert (tmp_path / "mine" / file).read_text() == "mine"


PLAIN = "def score(answer, reference):\n    return float(answer == reference)\n"
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""
TRL = """
from __future__ import annotations

def form(completions, **kwargs):
    return [0.5 for _ in completions]

def accuracy(completions, answer, **kwargs):
    return [float(right in text) for text, right in zip(completions, answer)]

def judged(completions, opinion, **kwargs):
    return [0.0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"rewards.py": TRL, "other.py": VERL}, ("rewards.py", "accuracy", "TRL's form", ("form",))),
        ({"rewards.py": PLAIN}, ("rewards.py", "score", "the form f(answer, reference)", ())),
        ({"helper.py": PLAIN, "scoring.py": VERL}, ("scoring.py", "compute_score", "verl's form", ())),
        ({"train.py": TRL + "print(accuracy)\n", "helper.py": PLAIN, "broken.py": "def"}, None),
    ],
    ids=["TRL", "plain", "verl", "none"],
)
def test_a_reward_is_found_in_a_persons_files_without_running_them(
    files: dict[str, str], found: tuple[str, str, str, tuple[str, ...]] | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    own = own_reward([tmp_path / "rows.jsonl", tmp_path], {"question", "answer"})
    assert (own and (own.file.name, *own[1:])) == found, "`judged` needs a column that no row has"


@pytest.mark.slow
@pytest.mark.parametrize(("place", "path"), [(".", "../rewards.py"), ("mine", "rewards.py")])
def test_a_reward_beside_the_data_or_in_the_folder_is_used_and_not_overwritten(place: str, path: str, tmp_path: Path) -> None:
    data = _questions(tmp_path / "rows.jsonl", [str(number) for number in range(40)])
    (tmp_path / "mine").mkdir()
    (tmp_path / place / "rewards.py").write_text(TRL)
    done = _swarm(tmp_path, "new", "mine", "--model", str(MODEL), "--data", data.name)
    assert done.returncode == 0 and "accuracy of your" in done.stderr and "it also has form" in done.stderr, done.stderr
    assert _written(tmp_path / "mine")["tasks"][0]["reward"] == f"{path}:accuracy"
    assert [file.read_text() for file in tmp_path.rglob("rewards.py")] == [TRL]
    checked = _swarm(tmp_path / "mine", "config", "check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
def test_rows_in_the_folder_are_found_from_it_and_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    _questions(tmp_path / "mine" / "rows.jsonl", [str(number) for number in range(40)])
    done = _swarm(tmp_path, "new", "mine", "--model", str(MODEL), "--data", "mine/rows.jsonl")
    assert done.returncode == 0, done.stderr
    assert _written(tmp_path / "mine")["tasks"][0]["path"] == "rows.jsonl"
    for folder, file in ((tmp_path / "mine", "node.toml"), (tmp_path, "mine/node.toml")):
        checked = _swarm(folder, "config", "check", "--config", file)
        assert checked.returncode == 0, checked.stderr
    (tmp_path / "deep" / "disk").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "deep" / "disk")
    _questions(tmp_path / "beside.jsonl", [str(number) for number in range(40)])
    assert _swarm(tmp_path, "new", "linked", "--model", str(MODEL), "--data", "beside.jsonl").returncode == 0
    assert (tmp_path / "linked" / _written(tmp_path / "linked")["tasks"][0]["path"]).exists(), "through a link"


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_asked_in_a_form_and_its_answer_is_cut_off_where_it_asks_on(tmp_path: Path) -> None:
    data = _questions(tmp_path / "rows.jsonl", [str(number) for number in range(60)])
    base = tmp_path / "base"
    shutil.copytree(MODEL, base)
    (base / "chat_template.jinja").unlink()
    done = _swarm(tmp_path, "new", "mine", "--model", str(base), "--data", str(data))
    assert done.returncode == 0, done.stderr
    (task,) = _written(tmp_path / "mine")["tasks"]
    assert (task["question"], task["reward"]) == ("Question: {question}\nAnswer:", "rewards.py:accuracy")
    checked = _swarm(tmp_path / "mine", "config", "check")
    assert checked.returncode == 0, checked.stderr
    rows = {"answer": ["7", "7", "7"]}
    found = runpy.run_path(str(tmp_path / "mine" / "rewards.py"))["accuracy"]
    assert found([" 3 + 4 = 7\n\nQuestion: 8?", " 8\nQuestion: 7?", "Question: 7"], **rows) == [1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("talks", [True, False], ids=["chat model", "base model"])
def test_the_reward_fits_rows_of_messages(talks: bool, tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    rows = [
        {"messages": [*asked, {"role": "assistant", "content": "?"}, {"role": "user", "content": str(n)}], "answer": str(n)}
        for n in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    if not talks:
        (model / "chat_template.jinja").unlink()
    done = _swarm(tmp_path, "new", "mine", "--model", str(model), "--data", "rows.jsonl")
    assert done.returncode == 0, done.stderr
    written = _written(tmp_path / "mine")
    assert "system_prompt" not in written["model"], "the rows bring one"
    assert written["tasks"][0].get("question") == (None if talks else "Question: {messages}\nAnswer:")
    file = tmp_path / "mine" / "node.toml"
    file.write_text(file.read_text().replace('verifier = "final_number"', 'reward = "rewards.py:accuracy"'))
    checked = _swarm(tmp_path / "mine", "config", "check")
    assert checked.returncode == 0 and "raised" not in checked.stderr, checked.stderr


@pytest.mark.slow
def test_one_node_trains_in_the_folder_without_another_word(tmp_path: Path) -> None:
    data = _questions(tmp_path / "rows.jsonl", [str(number % 10) for number in range(40)])
    made = _swarm(tmp_path, "new", "mine", "--model", str(MODEL), "--data", str(data))
    assert made.returncode == 0, made.stderr
    shorter = {"SWARM_GENERATOR__MAX_NEW_TOKENS": "8", "SWARM_HTTP__BASE_PORT": "0"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    command = [sys.executable, "-m", "swarm_cli", "up", "--steps", "2", "--nats-port", str(free_port())]
    where = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **shorter}
    ended = subprocess.run(
        command, cwd=tmp_path / "mine", env={**clean, **where}, capture_output=True, text=True, timeout=400, check=False
    )
    said = ended.stdout + ended.stderr
    assert "all nodes have taken 2 steps" in said and "Traceback" not in said, said[-6000:]
    assert not [word for word in ("shared", "foreign", "sharing", "swarm plane") if word in said], (
        "one node has nobody to share with"
    )
    assert ended.returncode == 0
    (run,) = (tmp_path / "mine" / "var" / "runs").iterdir()
    assert (run / "alpha").is_dir() and not (run / "beta").exists()


@pytest.mark.slow
def test_several_answers_to_each_question_are_scored_and_greedy_ones_refused(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.toml"
    tasks.write_text('[[tasks]]\ndataset = "gcd"\nconfig = { min_value = 1, max_value = 20 }\n')
    few = ("eval", str(MODEL), "--tasks", str(tasks), "--n", "12", "--engine", "transformers", "--json", "--answers", "12")
    done = _swarm(tmp_path, *few, "--k", "4", timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    stages = ["held-out tasks", "loading the model", "trying the rewards", "12 of 12 questions"]
    assert (places := [done.stderr.find(each) for each in stages]) == sorted(places) and min(places) >= 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["k"], told["temperature"], told["n"], len(told["answers"])) == (4, 1.0, 48, 48)
    by_question: dict[str, list[bool]] = {}
    for each in told["answers"]:
        by_question.setdefault(each["question"], []).append(each["passed"])
    assert {len(passed) for passed in by_question.values()} == {4}
    assert told["pass_at_k"] == pytest.approx(sum(map(any, by_question.values())) / 12)
    assert told["pass_rate"] == pytest.approx(sum(map(sum, by_question.values())) / 48)
    assert 0 < told["pass_rate"] < told["pass_at_k"]
    refused = _swarm(tmp_path, *few, "--k", "4", "--temperature", "0")
    assert refused.returncode != 0 and "all the same" in refused.stderr
