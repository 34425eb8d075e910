"""A reward of a user's own means in a run what its author wrote: through a real verifier on a real
server, in the real sandbox.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from shared.config import NodeConfig
from shared.config.task_sections import TaskSpec, _scorer_id
from shared.contracts import subjects
from shared.contracts.codec import decode, unpacked
from shared.contracts.control import RewardValues
from shared.contracts.messages import RolloutGroup, ScoredGroup, SignedRollouts, Task
from shared.reward_files import verifier_words
from shared.run_records import read_jsonl, unknown_file
from shared.runtime.exits import EXIT_CONFIG, FILE_VARIABLE, FatalError
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.evaluation import NO_PASS
from shared.tasks.file_source import with_row_name
from shared.tasks.verifiers import load_verifier
from swarm_cli.app import app
from swarm_cli.observe.run_files import read_steps
from swarm_cli.observe.verdict import run_verdicts
from tests.integration.installed_verifier import install
from tests.integration.local_swarm import Swarm
from tests.integration.running_verifier import MakeServer, configured, generate, group, queue_is_empty, scored, until, verifier

RIGHT, WELL_FORMED, WRONG = "right", "(wrong)", "wrong"
TASK = task_ref(dataset="gcd", seed=1, index=0)
SUMS = """
def mine(item):
    def score(answer):
        form = 0.5 if answer.startswith("(") else 0.0
        return 2.0 if answer == item.task.answer else form + form
    return score
"""
NEGATIVE = "def mine(item):\n    return lambda answer: -1.0 if answer != item.task.answer else 0.0"
RAISES = "def mine(item):\n    def score(answer):\n        return float(answer)\n    return score"
ALWAYS_RAISES = "def mine(item):\n    def score(answer):\n        raise RuntimeError('no such judge')\n    return score"
SLEEPS = "import time\ndef mine(item):\n    def score(answer):\n        time.sleep(600)\n    return score"
PENALTY = """
def mine(item):
    def score(answer):
        words = answer.split()
        return (1.0 if item.task.answer in words else 0.0) - 0.04 * (len(words) - 1)
    return score
"""
SAYS = "def mine(item):\n    return lambda answer: (0.02 if len(answer) < 9 else 2.5, answer == item.task.answer)"


def node(tmp_path: Path, url: str, name: str = "alpha", answer_timeout_s: float = 10.0, **task: object) -> NodeConfig:
    """On a busy machine an answer that is scored at once may wait for seconds."""
    return configured(
        name, url, tmp_path, None, [{"dataset": "gcd", "verifier": "mine", **task}], answer_timeout_s=answer_timeout_s
    )


def task() -> Task:
    return derive_task(TASK)


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    install(tmp_path, monkeypatch, "mine", code)
    load_verifier.cache_clear()


async def only_group(config: NodeConfig, texts: list[str]) -> ScoredGroup:
    """Return what the node's verifier makes of a local group with these answers."""
    async with verifier(config) as running:
        await generate(running.node, group("alpha", 0, texts, task=task()))
        await until(lambda: queue_is_empty(running.node, "alpha"))
        (found,) = await scored(running.node, "alpha")
    return found


@pytest.mark.parametrize(
    ("code", "texts", "rewards", "passed"),
    [
        (SUMS, ["{right}", "(no)", "no"], [2.0, 1.0, 0.0], None),
        (NEGATIVE, ["{right}", "no"], [0.0, -1.0], [True, False]),
        (PENALTY, ["{right} it is", "no", "{right}"], [0.92, 0.0, 1.0], None),
        (SAYS, ["{right}", "x" * 250], [0.02, 2.5], [True, False]),
    ],
)
async def test_a_reward_is_used_as_it_was_returned(
    nats_server: MakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    texts: list[str],
    rewards: list[float],
    passed: list[bool] | None,
) -> None:
    written(tmp_path, monkeypatch, code)
    right = str(task().answer)
    found = await only_group(node(tmp_path, nats_server().url), [text.format(right=right) for text in texts])
    assert found.rewards == pytest.approx(rewards)
    assert found.passed == passed, "two rewards have full marks by themselves, three have not"
    assert (found.unknown, found.failure) == ({}, None)


async def test_with_pass_at_a_right_answer_with_a_length_penalty_passes(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, PENALTY)
    right = task().answer
    found = await only_group(node(tmp_path, nats_server().url, pass_at=0.9), [f"{right} it is", "no", f"{right}"])
    assert found.rewards == pytest.approx([0.92, 0.0, 1.0])
    assert found.passed == [True, False, True]


async def test_an_answer_whose_reward_is_unknown_leaves_its_group_and_is_told_once(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, RAISES)
    config = node(tmp_path, nats_server().url)
    config = config.model_copy(update={"nats": config.nats.model_copy(update={"swarm_url": config.nats.node_url})})
    with capture_logs() as logs:
        async with verifier(config) as running:
            assert running.swarm is not None
            groups = [group("alpha", draw, ["3", "three", "4", "inf"], task=task()) for draw in range(2)]
            await generate(running.node, *groups)
            await until(lambda: running.status.get("shared") == 2)
            found = await scored(running.node, "alpha")
            (shared, _) = await running.swarm.read(subjects.SWARM_ROLLOUTS, 1, 10)
            envelope = decode(await running.swarm.payload(shared), SignedRollouts)
            sent = decode(unpacked(envelope.body, envelope.encoding, 2**20), RolloutGroup)
            text = generate_latest(running.registry).decode()
            assert running.status.get("unknown_rewards_raised") == 2
            assert running.status.get("unknown_rewards_not_a_number") == 2
    assert [[each.text for each in one.group.completions] for one in found] == [["<answer>3</answer>", "<answer>4</answer>"]] * 2
    assert [one.rewards for one in found] == [[3.0, 4.0]] * 2
    assert found[0].unknown == {"raised": 1, "not_a_number": 1}
    assert [each.text for each in sent.completions] == ["<answer>3</answer>", "<answer>4</answer>"], (
        "other nodes see no answer that was not scored"
    )
    assert 'swarm_verify_jobs_total{origin="local",result="raised"} 2.0' in text
    assert 'swarm_verify_jobs_total{origin="local",result="scored"} 4.0' in text
    told = [line for line in logs if line["event"] == "reward_unknown"]
    assert sorted(line["cause"] for line in told) == ["not_a_number", "raised"], "once for each cause"
    assert all(line["remedy"] and line["log_level"] == "warning" for line in told)
    assert "ValueError" in next(line["detail"] for line in told if line["cause"] == "raised")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "cause"), [(ALWAYS_RAISES, "raised"), (SLEEPS, "timeout")])
async def test_a_group_without_any_reward_is_dropped_and_counted_and_is_no_dead_letter(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str
) -> None:
    written(tmp_path, monkeypatch, code)
    config = node(tmp_path, nats_server().url, answer_timeout_s=0.5)
    async with verifier(config) as running:
        await generate(running.node, group("alpha", 0, ["1", "2"], task=task()))
        await until(lambda: queue_is_empty(running.node, "alpha"), 60)
        (found,) = await scored(running.node, "alpha")
        assert await running.node.read(subjects.node_dead_letters_stream("alpha"), 1, 10) == []
        assert running.status.get("failed_local") == 1
        assert running.status.get(f"unknown_rewards_{cause}") == 2
        assert running.status.get("shared") == 0
    assert (found.rewards, found.unknown) == ([], {cause: 2})
    assert found.failure is not None, "so that the sampler gives the draw's place back"
    (line,) = read_jsonl(unknown_file(config.node.run_dir, config.node.replica))
    assert line == {"dataset": "gcd", "cause": cause, "answers": 2}
    end = "\n".join(run_verdicts(config.node.run_dir.parent, ["alpha"]))
    assert f"2 of gcd ({cause})" in end and "no step was trained" in end


@pytest.mark.slow
def test_a_run_with_steps_whose_rewards_are_all_unknown_ends_with_its_cause_and_exit_code_78(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, ALWAYS_RAISES)
    config = tmp_path / "node.toml"
    config.write_text(
        '[[tasks]]\ndataset = "gcd"\nverifier = "mine"\nconfig = { min_numbers = 2, max_numbers = 2, max_value = 20 }\n'
    )
    swarm = Swarm(tmp_path, SWARM_CONFIG=str(config), SWARM_SAMPLER__EXTERNAL="0")
    run = swarm.up_to_the_end("--nodes", "1", "--steps", "3")
    assert run.returncode == EXIT_CONFIG, (run.stdout[-3000:], run.stderr[-3000:])
    assert "no such judge" in run.stdout + run.stderr and "alpha-verifier" in run.stdout + run.stderr
    assert read_steps(swarm.node_dir("alpha")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "cause"),
    [("return [1.0]", "returned 1 reward for 6 completions"), ("import no_such_package", "No module named 'no_such_package'")],
)
async def test_a_verifier_does_not_start_with_a_reward_file_that_fails_at_every_group(
    nats_server: MakeServer, tmp_path: Path, body: str, cause: str
) -> None:
    (tmp_path / "r.py").write_text(f"def score(completions, **kwargs):\n    {body}\n")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(40)))
    tasks = [{"path": str(tmp_path / "q.jsonl"), "reward": f"{tmp_path}/r.py:score"}]
    with pytest.raises(FatalError, match=cause):
        async with verifier(configured("alpha", nats_server().url, tmp_path, None, tasks)):
            pass


PARTS_OF_TWO = """
def right(completions, answer, **kwargs):
    return [float(str(wanted) in text) if text else None for text, wanted in zip(completions, answer)]

def tone(answer, reference):
    if "boom" in answer:
        raise ValueError(answer)
    return -0.5 if "!" in answer else 0.25 if "please" in answer else None
"""


@pytest.mark.slow
async def test_each_of_several_rewards_is_told_by_name(nats_server: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(PARTS_OF_TWO)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(40)))
    rewards = [{"use": f"{tmp_path}/r.py:right"}, {"use": f"{tmp_path}/r.py:tone", "weight": 2.0}]
    spec = with_row_name(TaskSpec.model_validate({"path": str(tmp_path / "q.jsonl"), "rewards": rewards}))
    asked = derive_task(task_ref(spec.dataset, seed=1, index=7))
    with capture_logs() as logs:
        async with verifier(configured("alpha", nats_server().url, tmp_path, None, [spec.model_dump()])) as running:
            await generate(running.node, group("alpha", 0, ["7", "7!", "please", "boom"], task=asked))
            await until(lambda: queue_is_empty(running.node, "alpha"))
            (found,) = await scored(running.node, "alpha")
            text = generate_latest(running.registry).decode()
    assert found.rewards == [1.0, 0.0, 0.5]
    assert found.parts == {"r.py:right": [1.0, 1.0, 0.0], "r.py:tone": [None, -0.5, 0.25]}, "without the answer that left"
    (line,) = [line for line in logs if line["event"] == "rollouts_scored"]
    assert line["mean_rewards"] == {"r.py:right": 0.6667, "r.py:tone": -0.125}
    assert re.search(r'swarm_reward_part_mean\{reward="r.py:tone",task="[^"]+"\} -0.125', text)


@pytest.mark.slow
async def test_foreign_groups_are_scored_with_the_columns_of_the_own_rows_if_these_are_the_same(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    url, nodes = nats_server().url, {}
    (tmp_path / "r.py").write_text(
        "def level(completions, answer, level):\n"
        "    return [each * (str(right) in text) for text, right, each in zip(completions, answer, level)]\n"
    )
    for name, level in (("alpha", 2), ("beta", 2), ("gamma", 3)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"question": f"{n}?", "answer": n, "level": level}) + "\n" for n in range(40)))
        spec = with_row_name(TaskSpec(path=str(file), reward=f"{tmp_path}/r.py:level"))
        config = configured(name, url, tmp_path, None, [spec.model_dump()])
        nodes[name] = config.model_copy(update={"nats": config.nats.model_copy(update={"swarm_url": url})}), spec.dataset
    assert nodes["alpha"][1] == nodes["beta"][1] != nodes["gamma"][1]
    async with verifier(nodes["alpha"][0]) as alpha, verifier(nodes["beta"][0]) as beta, verifier(nodes["gamma"][0]) as gamma:
        for draw, (name, running) in enumerate((("gamma", gamma), ("beta", beta))):
            asked = derive_task(task_ref(nodes[name][1], seed=1, index=7 + draw))
            await generate(running.node, group(name, draw, [str(7 + draw), "no"], task=asked))
            await until(lambda running=running: running.status.get("shared") == 1)
        await until(lambda: alpha.status.get("accepted") == 1)
        (found,) = [each for each in await scored(alpha.node, "alpha") if each.origin == "external"]
        assert alpha.status.get("senders_quarantined") == 0
    assert (found.group.node, found.rewards, found.parts) == ("beta", [2.0, 0.0], {})


KNOWS_FEW = "def mine(item):\n    return lambda answer: float(answer)"


@pytest.mark.slow
async def test_a_verifier_that_knows_no_reward_of_its_first_groups_ends_with_the_cause_and_one_that_knew_some_slows_down(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run with a number of steps generates at full speed and never ends."""
    monkeypatch.setattr("services.verifier.rewards.NONE_KNOWN", 6)
    written(tmp_path, monkeypatch, KNOWS_FEW)
    config = node(tmp_path, nats_server().url)
    with pytest.raises(FatalError, match="raised"):
        async with verifier(config) as running:
            await generate(running.node, *(group("alpha", index, ["no", "none"], task=task()) for index in range(6)))
            await until(lambda: not any("VerifierService" in repr(each.get_coro()) for each in asyncio.all_tasks()))
    async with verifier(config) as running:
        await generate(running.node, group("alpha", 6, ["1", "none"], task=task()))
        await until(lambda: running.status.get("scored_local") == 1)
        started = time.monotonic()
        await generate(running.node, *(group("alpha", index, ["no", "none"], task=task()) for index in range(7, 15)))
        await until(lambda: running.status.get("failed_local") == 8)
        assert time.monotonic() - started > 3, "the last is held for 4 s"


async def test_foreign_groups_wait_until_a_pass_is_defined_and_nobody_is_blamed(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, PENALTY)
    url, right = nats_server().url, task().answer
    beta = node(tmp_path, url, "beta", pass_at=0.9)
    alpha = node(tmp_path, url)
    both = [each.model_copy(update={"nats": each.nats.model_copy(update={"swarm_url": url})}) for each in (alpha, beta)]
    with capture_logs() as logs:
        async with verifier(both[0]) as first, verifier(both[1]) as second:
            three = [f"{right} it is", "no", f"{right}"]
            await generate(first.node, group("alpha", 0, three, task=task()))
            await until(lambda: first.status.get("scored_local") == 1 and second.status.get("accepted") == 1)
            other = derive_task(task_ref(dataset="gcd", seed=1, index=1))
            await generate(
                second.node, *(group("beta", draw, [f"{other.answer} yes", f"no n{draw}"], task=other) for draw in (1, 2))
            )
            await until(lambda: first.status.get("refused_no_pass") == 2)
            taken = [each for each in await scored(second.node, "beta") if each.origin == "external"]
            assert first.status.get("accepted") == 0
            assert first.status.get("senders_quarantined") == 0
            entry = await first.node.kv.get(subjects.node_bucket("alpha"), subjects.REWARD_VALUES_KEY)
        assert taken[0].rewards == pytest.approx([0.92, 0.0, 1.0]) and taken[0].passed == [True, False, True]
        assert len([line for line in logs if line["event"] == "foreign_groups_wait"]) == 1
    assert entry is not None and len(decode(entry.value, RewardValues).sources["gcd"]) == 3
    async with verifier(both[0]) as again:
        await generate(again.node, group("alpha", 5, [f"{right}", "no"], task=task()))
        await until(lambda: queue_is_empty(again.node, "alpha"))
        *_, newest = await scored(again.node, "alpha")
        assert newest.passed is None, "a restart does not bring the pass back"


async def test_a_reward_that_was_edited_under_its_name_forgets_the_rewards_of_the_former(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three rewards there was no pass; the new reward has two."""
    url, right = nats_server().url, task().answer
    config = node(tmp_path, url)
    found: list[ScoredGroup] = []
    held: list[str | None] = []
    written(tmp_path, monkeypatch, PENALTY)
    with capture_logs() as logs:
        for draw, code in enumerate((PENALTY, NEGATIVE)):
            (tmp_path / "my_package_module.py").write_text(code)
            _scorer_id.cache_clear()
            async with verifier(config) as running:
                await generate(running.node, group("alpha", draw, [f"{right} it is", "no", f"{right}"], task=task()))
                await until(lambda: queue_is_empty(running.node, "alpha"))
                *_, newest = await scored(running.node, "alpha")
                found.append(newest)
                held.append(running.status.snapshot().scorer)
    before, after = found
    assert before.passed is None and after.passed == [False, False, True]
    assert before.scorer != after.scorer and None not in (before.scorer, after.scorer)
    assert None not in held and held[0] != held[1], "displays compare it with what the other processes hold"
    (told,) = [line for line in logs if line["event"] == "scorer_changed"]
    assert told["rewards"] == verifier_words(config.tasks[0].verifier)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (SUMS, None),
        (ALWAYS_RAISES, "no such judge"),
        (SLEEPS, "does not return in time"),
        ("def mine(item):\n    return lambda answer: 1.0", "as to every other text"),
        ("import socket\ndef mine(item):\n    return lambda answer: socket.create_connection(('127.0.0.1', 4222))", "raised"),
    ],
)
def test_config_check_tries_a_reward_where_a_run_would_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str | None
) -> None:
    written(tmp_path, monkeypatch, code)
    file = tmp_path / "node.toml"
    file.write_text('[model]\npath = "models/base"\n[[tasks]]\ndataset = "gcd"\nverifier = "mine"\n')
    told = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
    assert told.exit_code == 0, told.output
    warnings = [line for line in told.stdout.splitlines() if line.startswith("warning:") and "verifier mine" in line]
    assert ([words in line for line in warnings] == [True]) if words else warnings == []
    (figures,) = [line for line in told.stdout.splitlines() if line.startswith("reward: ")]
    assert ("the reference earns 2, " in figures and "the higher of two rewards passes" in figures) == (words is None)


PARTS = """
def mine(item):
    return lambda answer: 2.0 * (answer.strip() == item.task.answer) + 0.5 * (len(answer) < 9)
"""


@pytest.mark.slow
def test_no_pass_is_said_alike_by_every_command_and_who_shares_is_told_that_foreign_groups_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, monkeypatch, PARTS)
    file = tmp_path / "node.toml"

    def checked(more: str = "", entry: str = "") -> tuple[list[str], str]:
        file.write_text(f'[model]\npath = "models/base"\n{more}[[tasks]]\ndataset = "gcd"\nverifier = "mine"\n{entry}')
        told = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
        assert told.exit_code == 0, told.output
        lines = told.stdout.splitlines()
        waits = [line for line in lines if line.startswith("warning: [[tasks]] 1: groups of other nodes are refused")]
        return waits, next(line for line in lines if line.startswith("reward: "))

    waits, figures = checked()
    assert len(waits) == 1 and NO_PASS in waits[0] and figures.count(NO_PASS) == 1
    assert checked("[sampler]\nexternal = 0\n")[0] == []
    assert checked("[verifier]\nforeign_partial_credit = true\n")[0] == []
    waits, figures = checked(entry="pass_at = 2\n")
    assert waits == [] and "the reference earns 2.5, passes" in figures and NO_PASS not in figures

    def score(*more: str) -> Any:
        scored = CliRunner().invoke(app, ["task", "score", "gcd", "--verifier", "mine", "--answer", "no", "--json", *more])
        return json.loads(scored.stdout.splitlines()[0])

    assert (score()["reward"], score()["passed"]) == (0.5, None)
    assert score("--pass-at", "0.5")["passed"] is True


@pytest.mark.slow
def test_a_built_in_verifier_that_pays_every_reference_alike_is_an_error(tmp_path: Path) -> None:
    rows, file = tmp_path / "rows.jsonl", tmp_path / "node.toml"
    source = f'[[tasks]]\nsource = "file"\npath = "{rows}"\nverifier = "final_number"\n'
    file.write_text(f'[model]\npath = "models/base"\n[eval]\ntasks = 2\n{source}')
    for answers, code in ((["80", "81", "82", "83", "84"], 0), (["80", "80.0", "80.00", "80.000", "80.0000"], EXIT_CONFIG)):
        rows.write_text("".join(json.dumps({"question": f"q{n}", "answer": each}) + "\n" for n, each in enumerate(answers)))
        told = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
        assert getattr(told.exception, "exit_code", 0) == code, told.output
        assert ("the right answers of 4 other tasks" in f"{told.output}{told.exception}") == bool(code)
        assert ("the reference earns 1, passes" in told.stdout) == (not code)


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "code"), [("mine", 0), ("exact", EXIT_CONFIG), ("reasoning_gym", EXIT_CONFIG)])
def test_a_pass_that_no_tried_reference_reaches_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifier: str, code: int
) -> None:
    written(tmp_path, monkeypatch, SUMS)
    file = tmp_path / "node.toml"
    file.write_text(f'[model]\npath = "models/base"\n[[tasks]]\ndataset = "gcd"\nverifier = "{verifier}"\npass_at = 3\n')
    told = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
    assert getattr(told.exception, "exit_code", 0) == code, told.output
    earned = 2 if verifier == "mine" else 1
    words = " ".join(f"{told.output}{told.exception}".split())
    assert f"a reference answer, earns {earned}" in words
    assert ("lower pass_at" in words) == (code == EXIT_CONFIG), "what is read in any form"
    assert ("swarm task score --answer" in words) == (code == 0), "a reward of one's own may want another form"


@pytest.mark.slow
def test_task_score_says_that_a_reward_is_unknown_and_what_references_earn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, monkeypatch, ALWAYS_RAISES)
    told = CliRunner().invoke(app, ["task", "score", "gcd", "--verifier", "mine", "--answer", "3", "--json"])
    assert told.exit_code == 0, told.output
    scored_answer = json.loads(told.stdout)
    assert (scored_answer["reward"], scored_answer["passed"], scored_answer["unknown"]) == (None, None, "raised")
    assert told.stderr.count("no such judge") == 1, "once, though the answer and the references have the same cause"
    assert "the reference earns unknown (raised)" in told.stderr


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [False, True])
async def test_what_a_command_said_of_a_reward_before_the_start_is_only_logged_after_it(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    written(tmp_path, monkeypatch, ALWAYS_RAISES)
    if supervised:
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "deaths"))
    with capture_logs() as logs:
        async with verifier(node(tmp_path, nats_server().url)):
            pass
    (tried,) = [line for line in logs if line["event"] == "reward_tried"]
    assert tried["log_level"] == ("info" if supervised else "warning")
