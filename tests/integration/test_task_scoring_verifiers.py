"""Verifiers by name, in the sandbox's real worker: built-in ones, and one of a user's own from
docs/tasks.md.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.registry import VERIFIERS
from shared.rewards import Mark
from shared.tasks.derive import TaskConfigError, derive_task
from shared.tasks.sandbox import ScorerPool, ScoringJob
from shared.tasks.specs import check_specs
from shared.tasks.verifiers import VerifierChoice
from tests.integration.installed_verifier import install

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"
LEAVE_THE_NETWORK = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) != 0)"


def can_leave_the_network() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return subprocess.run([sys.executable, "-c", LEAVE_THE_NETWORK], timeout=180).returncode == 0


@pytest.fixture(autouse=True)
def _forget_entry_points() -> object:
    yield
    VERIFIERS.look_again()


def pool(*specs: TaskSpec) -> ScorerPool:
    return ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=2048, tasks=specs)


async def test_exact_wants_the_reference_answer_and_forgives_spacing_and_case() -> None:
    spec = TaskSpec(dataset="ab", verifier="exact")
    ref = TaskRef(dataset="ab", seed=1, index=0)
    answer = str(derive_task(ref).answer)
    texts = [answer, f"<answer> {answer.lower().replace(' ', '  ')}</answer>", answer + " #", f"so {answer}", ""]
    async with pool(spec) as scorers:
        (result,) = await scorers.run([ScoringJob(ref=ref, texts=texts)])
    assert result.rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


async def test_final_number_pays_a_stated_number_at_the_end_and_no_other() -> None:
    config = '{"max_digits":1,"max_terms":2,"min_digits":1,"min_terms":2}'
    ref = TaskRef(dataset="products", config=config, seed=1, index=0)
    number = str(derive_task(ref).answer)
    right = [
        number,
        f"{number}.",
        f"2 * 3 = {number}",
        f"The answer is **{number}**.",
        f"so:\n{number}",
        "x" * 500 + f" is {number}",
    ]
    wrong = [
        f"of 3 and {number}",
        f"she has {number} apples",
        f"-{number}",
        f"9{number}",
        f"0.{number}",
        "x" * 500 + f" {number}",
        f"is{number}",
        "",
    ]
    async with pool(TaskSpec(dataset="products", verifier="final_number")) as scorers:
        (result,) = await scorers.run([ScoringJob(ref=ref, texts=[*right, *wrong])])
    assert result.rewards == [1.0] * len(right) + [0.0] * len(wrong)
    with pytest.raises(TaskConfigError, match="needs a number as reference answer.*keep only the number"):
        check_specs([TaskSpec(dataset="ab", verifier="final_number")])


async def test_math_compares_formulas_and_no_hostile_answer_runs(tmp_path: Path) -> None:
    from tests.integration.hostile_answers import hostile_answers

    mark = tmp_path / "mark"
    specs = [TaskSpec(dataset=name, verifier="math") for name in ("decimal_arithmetic", "polynomial_multiplication")]
    number = TaskRef(dataset="decimal_arithmetic", seed=1, index=3)
    polynomial = TaskRef(dataset="polynomial_multiplication", seed=1, index=0)
    async with pool(*specs) as scorers:
        # In the sandbox: only there is the hash seed the one that these polynomials depend on.
        derived = await scorers.run([ScoringJob(ref=ref, texts=["?"], want_task=True) for ref in (polynomial, number)])
        asked, value = derived[0].task, str(derived[1].task.answer)
        right = [f"${asked.answer}$", f"({asked.answer})*1", f"<answer>{asked.answer} + 0</answer>"]
        wrong = [f"{asked.answer} + 1", "?"]
        jobs = [
            ScoringJob(ref=number, texts=[value, f"$\\frac{{{value}}}{{1}}$", f"{value} + 0", f"2*{value}", "none"]),
            ScoringJob(ref=polynomial, texts=[text.replace("**", "^") for text in right + wrong]),
            ScoringJob(ref=number, texts=hostile_answers(mark)),
        ]
        numbers, polynomials, hostile = await scorers.run(jobs)
    assert numbers.rewards == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert polynomials.rewards == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert hostile.reason is None
    assert hostile.timeouts == 0
    assert set(hostile.rewards) <= {0.0, 1.0}
    assert not mark.exists()


def test_our_own_sources_choose_the_verifier_also_for_others_configs() -> None:
    choice = VerifierChoice(
        [
            TaskSpec(dataset="gcd", verifier="exact"),
            TaskSpec(dataset="gcd", verifier="math", config={"max_value": 9}),
            TaskSpec(dataset="lcm"),
        ]
    )
    names = [
        choice.name_for(TaskRef(dataset=dataset, config=config, seed=1, index=0))
        for dataset, config in (("gcd", "{}"), ("gcd", '{"max_value":9}'), ("gcd", '{"max_value":10}'), ("lcm", "{}"), ("ab", "{}"))
    ]
    assert names == ["exact", "math", "exact", "reasoning_gym", "reasoning_gym"]
    assert choice.names == ["exact", "math", "reasoning_gym"]


def test_a_source_with_a_verifier_that_is_not_there_or_does_not_fit_is_refused_at_the_start() -> None:
    for spec, said in (
        (TaskSpec(dataset="gcd", verifier="exakt"), "did you mean exact"),
        (TaskSpec(dataset="rush_hour", verifier="exact"), "needs a reference answer"),
    ):
        with pytest.raises(TaskConfigError, match=said):
            check_specs([spec])


CONNECTS = """
import socket

def connects(item):
    def score(answer):
        with socket.create_connection(("127.0.0.1", int(answer)), timeout=3):
            return 1.0
    return score
"""


async def test_a_worker_reaches_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_leave_the_network():
        pytest.skip("this platform does not let a process leave the network")
    install(tmp_path, monkeypatch, "connects", CONNECTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=3).close()
        async with pool(TaskSpec(dataset="gcd", verifier="connects")) as scorers:
            (result,) = await scorers.run([ScoringJob(ref=TaskRef(dataset="gcd", seed=1, index=0), texts=[str(port)])])
    assert (result.reason, result.rewards, result.marks) == (None, [None], [Mark.RAISED])
    assert "not permitted" in result.detail or "unreachable" in result.detail
