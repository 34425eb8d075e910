"""Rewards in a Python file beside the configuration: called as TRL, verl or a plain function, in
the sandbox that a run uses, and told by name when they cannot be used.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import random
import re
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from shared.config import ConfigError, load_config
from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.reward_files import _held, reward_problems
from shared.rewards import Mark
from shared.runtime.exits import EXIT_CONFIG
from shared.tasks.evaluation import PassRules
from shared.tasks.file_formats import FileSourceError
from shared.tasks.file_source import load_rows, with_row_name
from shared.tasks.reference_checks import Trial, try_rewards
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.invitation import OfferedTask

TRL = '''
import asyncio, re

def accuracy(completions, answer, **kwargs):
    """As in TRL's documentation: columns are lists with an entry for each completion."""
    found = [re.findall(r"-?\\d+", completion) for completion in completions]
    return [None if not numbers else 1.0 if numbers[-1] == str(wanted) else 0.0 for numbers, wanted in zip(found, answer)]

def short(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]

async def polite(prompts, completions, log_metric=None, **kwargs):
    async def one(prompt, completion):
        await asyncio.sleep(0)
        return None if len(completion) % 3 else float("please" in completion) - 0.25
    return await asyncio.gather(*(one(*each) for each in zip(prompts, completions)))
'''
COUNTDOWN = """
import re

def solves(completions, nums, target, **kwargs):
    found = []
    for completion, mine, wanted in zip(completions, nums, target):
        mine.sort()
        used = sorted(map(int, re.findall(r"\\d+", completion)))
        right = float(sum(used) == wanted and set(used) <= set(mine)) + 0.1 * isinstance(wanted, float)
        found.append(right if used else None)
    return found

def easier(completions, meta, note=None, **kwargs):
    return [None if each["hard"] else each["tries"][0] + len(text or "") for each, text in zip(meta, note)]

def form(prompts, completions, **kwargs):
    return [len(prompt) + len(each[0]["content"]) / 4 for prompt, each in zip(prompts, completions)]

def told(completions, **columns):
    names = sorted(set(columns) - {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric", "question", "answer"})
    return [None if "no" in text else len("".join(names)) / 8 + max(columns["nums"][0]) for text in completions]
"""
FORMS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 2.0 if solution_str.endswith(str(ground_truth)) else -1.0, "acc": 1}

def number_only(solution_str, ground_truth):
    return float(solution_str == str(ground_truth))

def by_place(answer, reference, /):
    return float(answer == reference)
def plain(answer, reference):
    return 0.5 if reference in answer else 0.0

def passes(answer, reference):
    return 0.5, reference in answer

def messages(completions, answer, prompts):
    assert prompts[0][-1]["role"] == "user"
    return [float(completion[0]["content"] == str(wanted)) for completion, wanted in zip(completions, answer)]

def counts(completions):
    return [float(len(completions))] * len(completions)

def longest(completions):
    return [float(len(each) == max(map(len, completions))) for each in completions]

class Judge:
    def __call__(self, completions, answer):
        return [float(completion == str(wanted)) for completion, wanted in zip(completions, answer)]

made = Judge()
"""
WRONG = """
import asyncio, concurrent.futures, time, socket, os

def raises(completions):
    raise ValueError("no such judge")

def few(completions):
    return [1.0] * (len(completions) - 1)

def first_only(completions, **kwargs):
    return [float(len(completions[0]))]

def misses_module(completions):
    import no_such_package
    return [1.0] * len(completions)

def raises_once(completions, answer):
    return [float(int(completion) / (int(completion) - 1)) for completion in completions]

def text(completions):
    return "1.0"

def not_finite(completions):
    return [1.0, float("nan"), "yes", None][: len(completions)]

def hangs(completions):
    while "hang" in completions:
        time.sleep(1)
    return [1.0] * len(completions)

def ends(completions):
    os._exit(3)

def network(answer, reference):
    socket.create_connection(("127.0.0.1", 80), 1)
    return 1.0

def writes(answer, reference):
    open(__file__ + ".out", "w").write(answer)
    return 1.0

def one(answer, reference):
    while answer == "hang":
        time.sleep(1)
    return float(answer == reference)

def other(completion, gold):
    return 1.0

def runs(completions):
    return asyncio.run(slow(completions))
async def slow(completions): return [1.0] * len(completions)
def threads(completions):
    return [*concurrent.futures.ThreadPoolExecutor().map(len, completions)]
hidden = lambda function: lambda *given, **named: function(*given, **named)
@hidden
def decorated(completions, answer):
    return [1.0] * len(completions)
class Reward:
    __call__ = one

def ids(completions, completion_ids):
    return [1.0] * len(completions)
def needs(completions, answr):
    return [1.0] * len(completions)
def defaults(completions, completion_ids=None, trainer_state=None, tests=None):
    return [1.0] * len(completions)

always = 3
"""
MODEL = Path(__file__).parents[2] / "models" / "base"
QUESTIONS = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(40)]


@pytest.fixture(autouse=True)
def read_anew() -> None:
    _held.clear()  # as at a restart


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, code in (("trl", TRL), ("forms", FORMS), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(code)
    return tmp_path


def source(folder: Path, *uses: tuple[str, float]) -> TaskSpec:
    rewards = [{"use": f"{folder}/{use}" if ".py" in use else use, "weight": weight} for use, weight in uses]
    return with_row_name(TaskSpec(path=str(folder / "q.jsonl"), rewards=rewards))


def scored(spec: TaskSpec, groups: dict[int, list[str]], timeout_s: float = 20.0) -> list[JobResult]:
    """The groups of completions, by row, as the sandbox scores them."""
    jobs = [ScoringJob(ref=TaskRef(dataset=spec.dataset, seed=1, index=index), texts=texts) for index, texts in groups.items()]

    async def run() -> list[JobResult]:
        async with ScorerPool(workers=1, answer_timeout_s=timeout_s, memory_mb=4096, tasks=[spec]) as pool:
            return await pool.run(jobs)

    return asyncio.run(run())


def one_group(spec: TaskSpec, texts: list[str], timeout_s: float = 20.0) -> JobResult:
    (result,) = scored(spec, {3: texts}, timeout_s)
    return result


def as_trl_calls(file: Path, weights: dict[str, float], row: dict[str, Any], completions: list[Any]) -> list[float | None]:
    """What TRL's own trainer makes of a group: `_calculate_rewards` of the installed `trl`,
    unmodified, and then its `nansum` of the weighted rewards, without those of which none applies.
    """
    torch = pytest.importorskip("torch", reason="the comparison with TRL needs trl installed")
    trl_import_utils = pytest.importorskip("trl.import_utils", reason="the comparison with TRL needs trl installed")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(trl_import_utils, "is_vllm_available", lambda *_args, **_options: False)
        from accelerate import PartialState
        from trl.trainer.grpo_trainer import GRPOTrainer

        PartialState(cpu=True)  # which its warnings need
    found = importlib.util.spec_from_file_location("by_trl", file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever)
    running.start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
        reward_funcs=[getattr(module, name) for name in weights],
        reward_processing_classes=[None] * len(weights),
        reward_func_names=[*weights],
    )
    inputs = [copy.deepcopy(row) for _ in completions]
    try:
        table = GRPOTrainer._calculate_rewards(trainer, inputs, [row["prompt"]] * len(completions), completions, None)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        running.join()
        loop.close()
    sums = (table * torch.tensor([*weights.values()])).nansum(dim=1).tolist()
    return [None if bool(none) else value for none, value in zip(torch.isnan(table).all(dim=1), sums, strict=True)]


@pytest.mark.slow
def test_a_reward_file_for_trl_gives_the_numbers_that_trl_computes(folder: Path) -> None:
    choose, weights = random.Random(5), {"solves": 1.0, "easier": 0.3, "polite": 0.25, "told": 1.0}
    (folder / "countdown.py").write_text(COUNTDOWN + TRL)
    rows = [
        {
            "prompt": f"Use {[index, 2, 7]} to make {index + 2}.",
            "nums": [7, 2, index],
            "target": index + 2 if index % 3 else float(index + 2),
            "meta": {"hard": not index % 4, "tries": [0.5, index]},
            "note": None if index % 5 else f"n{index}",
        }
        for index in range(40)
    ]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["{} + 2", "{}", "please, {} + 7", "no idea", "<think>{} + 2</think> please", "", "So 2 + {}"]
    groups = {index: [choose.choice(texts).format(index + choose.randint(0, 1)) for _ in range(25)] for index in range(40)}
    rewards = [{"use": f"{folder}/countdown.py:{name}", "weight": weight} for name, weight in weights.items()]
    spec = with_row_name(TaskSpec(path=str(folder / "c.jsonl"), answer="target", rewards=rewards))
    results = scored(spec, groups)
    assert sum(len(result.rewards) for result in results) == 1000
    seen: set[float | None] = set()
    for (index, completions), result in zip(groups.items(), results, strict=True):
        wanted = as_trl_calls(folder / "countdown.py", weights, rows[index], completions)
        assert result.rewards == pytest.approx(wanted), index
        assert [mark is Mark.NOT_APPLICABLE for mark in result.marks] == [reward is None for reward in wanted]
        seen.update(wanted)
    assert None in seen and len(seen) > 20
    for turns in ([("user", "one?")], [("system", "be brief"), ("user", "two?")]):
        row = {"prompt": [{"role": role, "content": text} for role, text in turns], "answer": "4"}
        (folder / "m.jsonl").write_text(json.dumps(row) + "\n")
        spec = with_row_name(TaskSpec(path=str(folder / "m.jsonl"), reward=f"{folder}/countdown.py:form"))
        (result,) = scored(spec, {0: texts})
        as_messages = [[{"role": "assistant", "content": text}] for text in texts]
        assert result.rewards == as_trl_calls(folder / "countdown.py", {"form": 1.0}, row, as_messages)


@pytest.mark.slow
def test_each_form_of_a_reward_is_called_in_its_own_way(folder: Path) -> None:
    paid = {
        "compute_score": [2.0, -1.0],
        "number_only": [0.0, 0.0],
        "by_place": [0.0, 0.0],
        "plain": [0.5, 0.0],
        "messages": [0.0, 0.0],
        "counts": [2.0, 2.0],
        "made": [0.0, 0.0],
    }
    for name, rewards in paid.items():
        assert one_group(source(folder, (f"forms.py:{name}", 1.0)), ["so 4", "5"]).rewards == rewards, name
    whole = one_group(source(folder, ("forms.py:number_only", 1.0)), ["4", "<think>4</think>4"])
    assert whole.rewards == [1.0, 0.0], "a reward gets the thought too"
    assert one_group(source(folder, ("forms.py:passes", 1.0)), ["4", "5"]).marks == [Mark.PASSED, Mark.FAILED]
    assert one_group(source(folder, ("forms.py:messages", 1.0)), ["4", "5"]).rewards == [1.0, 0.0]
    assert one_group(source(folder, ("forms.py:made", 1.0)), ["4", "5"]).rewards == [1.0, 0.0]
    mixed = one_group(source(folder, ("exact", 2.0), ("forms.py:plain", -1.0)), ["<answer>4</answer>", "4 or 5"])
    assert mixed.rewards == [1.5, -0.5]
    assert "wrong.py:few returned" in one_group(source(folder, ("exact", 2.0), ("wrong.py:few", 1.0)), ["4"]).detail


CONTENT = """
import json
from beside import contents

def of_json(completions, answer):
    return [float(json.loads(text)["content"] == str(right)) for text, right in zip(completions, answer)]

def of_column(completions, meta, answer):
    return [float(text == str(right) and each["content"] == "m") for text, each, right in zip(completions, meta, answer)]

def by_get(completions, answer):
    return [float(each[0].get("content") == str(right)) for each, right in zip(completions, answer)]

def by_helper(completions, answer):
    return [float(text == str(right)) for text, right in zip(contents(completions), answer)]

def first_letter(completions, answer):
    return [float(text[0] == str(right)) for text, right in zip(completions, answer)]

def kind(completions, prompts):
    return [isinstance(each, list) + 2.0 * isinstance(prompt, list) for each, prompt in zip(completions, prompts)]
"""


@pytest.mark.slow
def test_the_row_decides_whether_a_reward_gets_texts_or_messages(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text('def contents(completions):\n    return [each[0]["content"] for each in completions]\n')
    (tmp_path / "content.py").write_text(CONTENT)
    for form, prompt in (("text", "3 + 1?"), ("messages", [{"role": "user", "content": "3 + 1?"}])):
        (tmp_path / f"{form}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 4, "meta": {"content": "m"}}) + "\n")

    def result(form: str, name: str, texts: list[str]) -> JobResult:
        spec = with_row_name(TaskSpec(path=str(tmp_path / f"{form}.jsonl"), reward=f"{tmp_path}/content.py:{name}"))
        (found,) = scored(spec, {0: texts})
        return found

    assert result("text", "of_json", ['{"content": "4"}', '{"content": "5"}']).rewards == [1.0, 0.0]
    assert result("text", "of_column", ["4", "5"]).rewards == [1.0, 0.0]
    for form in ("text", "messages"):
        for name in ("by_get", "by_helper"):
            assert result(form, name, ["", "4", "5"]).rewards == [0.0, 1.0, 0.0], (form, name)
        assert result(form, "kind", ["4"]).rewards == [0.0 if form == "text" else 3.0]
    assert result("text", "first_letter", ["", "4"]).marks == [Mark.RAISED] * 2, "texts that fail are no messages"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("raises", [Mark.RAISED] * 3),
        ("few", [Mark.NOT_A_NUMBER] * 3),
        ("text", [Mark.NOT_A_NUMBER] * 3),
        ("not_finite", [Mark.UNSAID, Mark.NOT_A_NUMBER, Mark.NOT_A_NUMBER]),
        ("hangs", [Mark.TIMEOUT] * 3),
        ("ends", [Mark.KILLED, Mark.KILLED, Mark.KILLED]),
        ("network", [Mark.RAISED] * 3),
        ("writes", [Mark.RAISED] * 3),
        ("one", [Mark.UNSAID, Mark.TIMEOUT, Mark.UNSAID]),
    ],
)
def test_what_goes_wrong_in_a_reward_costs_answers_and_never_counts_as_0(folder: Path, name: str, marks: list[Mark]) -> None:
    result = one_group(source(folder, (f"wrong.py:{name}", 1.0)), ["4", "hang", "6"], timeout_s=1.0)
    assert result.reason is None
    assert result.marks == marks
    assert [reward is None for reward in result.rewards] == [bool(mark.cause) for mark in marks]
    assert not list(folder.glob("*.out"))


@pytest.mark.slow
def test_a_file_that_changes_affects_neither_a_running_node_nor_its_later_scorers(folder: Path) -> None:
    (folder / "beside.py").write_text("def paid():\n    return 1.0\n")
    (folder / "mine.py").write_text("from beside import paid\ndef score(answer, reference):\n    return paid()\n")
    spec = source(folder, ("mine.py:score", 1.0))
    before = spec.model_copy().scorer_id
    assert one_group(spec, ["4"]).rewards == [1.0]
    (folder / "beside.py").write_text("def paid():\n    return 2.0\n")
    assert one_group(spec, ["4"]).rewards == [1.0]
    assert spec.scorer_id == before
    _held.clear()  # as at a restart
    assert one_group(spec, ["4"]).rewards == [2.0]
    assert spec.scorer_id != before, "also another module beside it is another scorer"


@pytest.mark.slow
def test_the_rewards_in_the_documentation_work_as_they_are_printed(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    page = page[page.index("## A reward of your own") :]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (folder / "rewards.py").write_text(code)
    (lines,) = re.findall(r"```toml\n(\[\[tasks\]\]\npath = [^`]*rewards = [^`]*)```", page)
    (folder / "node.toml").write_text(lines.replace("questions.jsonl", str(folder / "q.jsonl")))
    (spec,) = load_config(folder / "node.toml", environment={}).tasks
    result = one_group(with_row_name(spec), ["So it is 4", "4 or 5" + 994 * " "])
    assert result.rewards == pytest.approx([1.198, 0.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use", "local"), [("forms.py:counts", True), ("forms.py:messages", False), ("trl.py:short", False), ("forms.py:longest", True)]
)
def test_a_reward_that_depends_on_the_other_answers_is_local_only(folder: Path, use: str, local: bool) -> None:
    spec = source(folder, (use, 1.0))

    async def tried() -> list[Trial]:
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec]) as pool:
            return await try_rewards(pool, [spec], PassRules([spec]))

    (trial,) = asyncio.run(tried())
    assert trial.local_only is local


@pytest.mark.slow
@pytest.mark.parametrize(("use", "several"), [("graded.py:graded", True), ("forms.py:plain", False)])
def test_that_no_pass_is_defined_holds_from_the_trial_on_however_few_rewards_an_evaluation_sees(
    folder: Path, use: str, several: bool
) -> None:
    graded = "    return 1.0 if answer == reference else 0.5 if reference in answer else 0.0\n"
    (folder / "graded.py").write_text(f"def graded(answer, reference):\n{graded}")
    spec = source(folder, (use, 1.0))
    rules, ref = PassRules([spec]), TaskRef(dataset=spec.dataset, seed=1, index=0)

    async def tried() -> list[Trial]:
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec]) as pool:
            return await try_rewards(pool, [spec], rules)

    (trial,) = asyncio.run(tried())
    assert trial.awaits_pass is several
    seen = (1.0 if several else 0.5, 0.0)
    assert rules.passed(ref, seen, [Mark.UNSAID, Mark.UNSAID]) == (None if several else [True, False])


@pytest.mark.slow
def test_columns_have_the_names_of_the_file(folder: Path) -> None:
    rows = [{"problem": f"{number} + 1?", "solution": number + 1} for number in range(8)]
    (folder / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "named.py").write_text(
        "def same(completions, solution, problem):\n"
        "    return [float(c == str(s) and p == '3 + 1?') for c, s, p in zip(completions, solution, problem)]\n"
    )
    spec = with_row_name(TaskSpec(path=str(folder / "s.jsonl"), reward=f"{folder}/named.py:same"))
    assert one_group(spec, ["4", "5"]).rewards == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_reward_gets_the_columns_that_it_names_and_the_rows_are_named_after_these(folder: Path, ending: str) -> None:
    rows = [
        {
            "data_source": f"d{number}",
            "prompt": [{"role": "user", "content": f"{number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": number + 1},
            "extra_info": {"split": "train", "index": number},
            "other": number,
        }
        for number in range(8)
    ]

    def written(rows: list[dict[str, Any]]) -> Path:
        file = folder / f"verl.{ending}"
        if ending == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
            parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `data`")
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file

    (folder / "verl.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return ground_truth + extra_info['index'] / 10 if data_source == 'd3' and extra_info['split'] == 'train' else 0\n"
        "def named(completions, other, extra_info, **kwargs):\n"
        "    return [each + info['index'] for each, info in zip(other, extra_info)]\n"
    )

    def name(file: Path, function: str = "compute_score") -> str:
        return with_row_name(TaskSpec(path=str(file), reward=f"{folder}/verl.py:{function}")).dataset

    spec = with_row_name(TaskSpec(path=str(written(rows)), reward=f"{folder}/verl.py:compute_score"))
    assert one_group(spec, ["a", "b"]).rewards == [4.3, 4.3]
    named = with_row_name(TaskSpec(path=spec.path, reward=f"{folder}/verl.py:named"))
    assert one_group(named, ["a"]).rewards == [6.0]
    assert len({spec.dataset, named.dataset, with_row_name(TaskSpec(path=spec.path)).dataset}) == 3
    unused = written([{**row, "other": 0} for row in rows])
    assert name(unused) == spec.dataset, "a column that the reward does not get does not count"
    used = written([{**row, "extra_info": {"split": "test", "index": number}} for number, row in enumerate(rows)])
    assert name(used) != spec.dataset
    same = folder / "again.jsonl"
    same.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert name(same) == spec.dataset, "whatever the format"


def test_columns_that_a_reward_cannot_get_are_mistakes_of_their_rows(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def long(completions, story):\n    return [0.0] * len(completions)\n")
    rows: list[dict[str, Any]] = [{"question": f"{place}?", "answer": "1", "story": "s"} for place in range(3)]
    rows[1]["story"] = "s" * 300_000
    rows[2]["story"] = ["\ud800"]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(FileSourceError) as caught:
        load_rows(TaskSpec(path=str(tmp_path / "q.jsonl"), reward=f"{tmp_path}/r.py:long"))
    too_long, broken = str(caught.value).splitlines()
    assert "line 2" in too_long and "262,144" in too_long
    assert "line 3" in broken and "'story'" in broken
    assert len(load_rows(TaskSpec(path=str(tmp_path / "q.jsonl")))) == 3, "which no reward gets"


MISTAKES = {
    "wron.py:one": "did you mean wrong.py?",
    "wrong.py:on": "did you mean one?",
    "wrong.py:other": "(completion, gold)",
    "wrong.py:ids": "completion_ids",
    "torn.py:one": "line 1",
    "wrong.py": "FILE.py:FUNCTION",
    "import.py:one": "No module named 'no_such_package'",
    "wrong.py:always": "no function",
    "wrong.py:needs": "did you mean answer?",
    "wrong.py:first_only": "returned 1 reward for 6 completions (wrong.py line ",
    "wrong.py:few": "returned 0 rewards for 1 completion (wrong.py line ",
    "wrong.py:raises": "no such judge (wrong.py line ",
    "wrong.py:misses_module": "install the module in the environment that runs the node",
    "wrong.py:network": "sandbox = false",
    "wrong.py:writes": "sandbox = false",
    "wrong.py:runs": "`async def`",
    "wrong.py:threads": "without threads",
    "wrong.py:decorated": "functools.wraps",
    "wrong.py:Reward": "is a class",
    "gpu.py:one": "sandbox = false",
}


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "said"), MISTAKES.items())
def test_config_check_and_task_score_say_what_is_wrong_with_a_reward_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reward: str, said: str
) -> None:
    (folder / "torn.py").write_text("def one(answer, reference:\n")
    (folder / "gpu.py").write_text("def one(answer, reference):\n    raise RuntimeError('No CUDA GPUs are available')\n")
    (folder / "import.py").write_text("import no_such_package\ndef one(answer, reference):\n    return 1.0\n")
    (folder / "node.toml").write_text(f'eval.tasks = 4\n[[tasks]]\npath = "q.jsonl"\nreward = "{reward}"\n')
    monkeypatch.chdir(folder)
    checked = CliRunner().invoke(app, ["config", "check", "--config", "node.toml"])
    assert isinstance(checked.exception, CommandError)
    assert checked.exception.exit_code == EXIT_CONFIG
    told = str(checked.exception)
    assert said in told and told.count("in the sandbox") <= 1
    assert ("sandbox = false" in told) == (said in ("sandbox = false", "`async def`", "without threads")), (
        "its remedy is for what the sandbox refuses"
    )
    asked = CliRunner().invoke(app, ["task", "score", "q.jsonl", "--reward", reward, "--answer", "4"])
    assert isinstance(asked.exception, CommandError)
    assert asked.exception.exit_code == EXIT_CONFIG
    assert said in f"{asked.exception} {asked.output}"
    assert "this answer earns" not in asked.output


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "said"), [("one", "all answers of its group leave"), ("1", "all answers of its group leave")])
def test_task_score_says_that_a_call_that_fails_costs_a_list_reward_its_whole_group(folder: Path, answer: str, said: str) -> None:
    reward = f"{folder}/wrong.py:raises_once"
    asked = CliRunner().invoke(app, ["task", "score", f"{folder}/q.jsonl", "--reward", reward, "--answer", answer])
    assert asked.exit_code == 0 and said in asked.stderr
    none = CliRunner().invoke(
        app, ["task", "score", f"{folder}/q.jsonl", "--reward", f"{folder}/trl.py:accuracy", "--answer", "no"]
    )
    assert "not_applicable" in none.stdout and "this answer leaves its group" in none.stderr


@pytest.mark.slow
def test_what_a_reward_prints_is_shown_by_task_score(folder: Path) -> None:
    (folder / "says.py").write_text(
        "import sys\nprint('loaded')\n"
        "def one(answer, reference):\n    print('read', answer)\n    print('no', file=sys.stderr)\n    return 1.0\n"
    )
    reward = f"{folder}/says.py:one"
    asked = CliRunner().invoke(app, ["task", "score", f"{folder}/q.jsonl", "--reward", reward, "--answer", "seven"])
    assert asked.exit_code == 0 and asked.stdout == "1\n"
    assert "it prints:\nread seven\n  no\n" in asked.stderr


@pytest.mark.slow
def test_a_slow_reward_is_tried_under_the_limit_of_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import time\ndef one(answer, reference):\n    time.sleep(0.4)\n    return float(answer == reference)\n"
    (folder / "slow.py").write_text(slow)
    monkeypatch.chdir(folder)
    for limit_s, code in ((0.2, EXIT_CONFIG), (5.0, 0)):
        (folder / "node.toml").write_text(
            f'model.path = "{MODEL}"\neval.tasks = 4\nverifier.answer_timeout_s = {limit_s}\n'
            '[[tasks]]\npath = "q.jsonl"\nreward = "slow.py:one"\n'
        )
        checked = CliRunner().invoke(app, ["config", "check"])
        assert getattr(checked.exception, "exit_code", 0) == code, checked.output
        asked = CliRunner().invoke(app, ["task", "score", "q.jsonl", "--reward", "slow.py:one", "--answer", "1"])
        assert ("raise verifier.answer_timeout_s" in f"{checked.exception}") == bool(code) == ("timeout" in asked.stdout)


@pytest.mark.slow
def test_a_reward_that_is_always_none_is_told_before_anything_starts(folder: Path) -> None:
    (folder / "none.py").write_text("def one(answer, reference):\n    answer == reference\n")
    (folder / "node.toml").write_text(f'eval.tasks = 4\n[[tasks]]\npath = "{folder}/q.jsonl"\nreward = "none.py:one"\n')
    checked = CliRunner().invoke(app, ["config", "check", "--config", str(folder / "node.toml")])
    assert checked.exit_code == 0 and "nothing can be learnt from it" in checked.output


def test_a_reward_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        (problem,) = reward_problems(f"{tmp_path}/{name}.py:score")
        assert "not a regular file" in problem


@pytest.mark.slow
def test_config_check_tries_a_reward_file_and_warns_of_one_that_pays_everything(folder: Path) -> None:
    (folder / "node.toml").write_text(f'eval.tasks = 4\n[[tasks]]\npath = "{folder}/q.jsonl"\nreward = "wrong.py:defaults"\n')
    checked = CliRunner().invoke(app, ["config", "check", "--config", str(folder / "node.toml")])
    assert "wrong.py:defaults gives 1 to the right answer (" in checked.output
    reward = f"{folder}/wrong.py:defaults"
    asked = CliRunner().invoke(app, ["task", "score", f"{folder}/q.jsonl", "--reward", reward, "--answer", "4"])
    for said in (checked.output, asked.stderr):
        assert said.count("takes completion_ids") == said.count("takes trainer_state") == 1


@pytest.mark.slow
@pytest.mark.parametrize("pass_at", ["", "pass_at = 1\n"])
def test_a_reward_that_wants_a_form_is_tried_in_the_usual_ones_before_it_is_doubted(folder: Path, pass_at: str) -> None:
    (folder / "wants.py").write_text(
        "def boxed(answer, reference):\n    return float('\\\\boxed{' + reference + '}' in answer)\n"
        "def other(answer, reference):\n    return float(answer == 'ANSWER=' + reference)\n"
    )
    for name, works in (("boxed", True), ("other", False)):
        entry = f'[[tasks]]\npath = "{folder}/q.jsonl"\nreward = "wants.py:{name}"\n{pass_at}'
        (folder / "node.toml").write_text(f'model.path = "{MODEL}"\neval.tasks = 4\n{entry}')
        checked = CliRunner().invoke(app, ["config", "check", "--config", str(folder / "node.toml")])
        assert checked.exit_code == 0, checked.output
        told = " ".join(checked.output.split())
        assert (r"given as \boxed{1}, earns 1" in told) == works
        assert ("swarm task score --answer" in told) == (not works)
        assert ("gives 0 to the right answer ('1'), as to every other text tried" in told) == (not works)
        assert "lower pass_at" not in told


@pytest.mark.slow
def test_a_reward_file_whose_calls_fail_for_some_references_only_is_a_warning(folder: Path) -> None:
    (folder / "node.toml").write_text(f'eval.tasks = 4\n[[tasks]]\npath = "{folder}/q.jsonl"\nreward = "wrong.py:raises_once"\n')
    checked = CliRunner().invoke(app, ["config", "check", "--config", str(folder / "node.toml")])
    assert checked.exit_code == 0, checked.output
    assert "ZeroDivisionError" in checked.output and "warning" in checked.output


def test_a_reward_is_found_beside_the_configuration_and_excludes_a_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    node = tmp_path / "there" / "node.toml"
    node.write_text('[[tasks]]\npath = "q.jsonl"\nrewards = [{use = "r.py:a"}, {use = "exact", weight = 0.2}]\n')
    monkeypatch.chdir(tmp_path)
    (spec,) = load_config(Path("there/node.toml"), environment={}).tasks
    assert [each.use for each in spec.rewards] == [f"{tmp_path}/there/r.py:a", "exact"]
    assert TaskSpec.model_validate(spec.model_dump(mode="json")) == spec
    for keys, said in (
        ('reward = "r.py:a"\nverifier = "math"', "keep one"),
        ('reward = "r.py:a"\nrewards = [{use = "r.py:a"}]', "keep one"),
        ('rewards = [{use = "r.py:a", wight = 2}]', "weight"),
        ("rewards = []", "names no reward"),
    ):
        node.write_text(f'[[tasks]]\npath = "q.jsonl"\n{keys}\n')
        with pytest.raises(ConfigError, match=said):
            load_config(node, environment={})


def test_no_invitation_carries_a_reward_file(tmp_path: Path) -> None:
    offered: dict[str, Any] = {"dataset": "gcd", "config": "{}", "weight": 1.0, "verifier": f"{tmp_path}/r.py:a"}
    with pytest.raises(msgspec.ValidationError, match="verifier"):
        msgspec.convert(offered, OfferedTask)
    with_reward = msgspec.convert({**offered, "verifier": "exact", "reward": f"{tmp_path}/r.py:a"}, OfferedTask)
    assert not hasattr(with_reward, "reward"), "what it does not name is ignored"
