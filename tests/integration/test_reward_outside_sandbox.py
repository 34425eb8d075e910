"""A reward with `sandbox = false` has network, files and environment, for local groups only; it is
killed when it hangs, and every page says that its source is local only.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from shared.config import ConfigError, load_config
from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.rewards import LocalOnly, Mark
from shared.runtime.exits import EXIT_CONFIG
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.file_source import with_row_name
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from shared.tasks.verifiers import VerifierChoice
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.observe.run_files import local_only_words
from tests.integration.running_verifier import MakeServer, configured, generate, group, scored, until, verifier

REWARDS = """
import asyncio, os, subprocess, sys, time, urllib.request
from pathlib import Path

def judged(completions, answer):
    judge = os.environ["JUDGE"]
    return [float(urllib.request.urlopen(f"{judge}/{each}/{right}").read()) for each, right in zip(completions, answer)]

async def asked(completions, answer):
    async def one(each, right):
        return await asyncio.to_thread(lambda: judged([each], [right])[0])
    return await asyncio.gather(*(one(*pair) for pair in zip(completions, answer)))

def noted(answer, reference):
    (Path(__file__).parent / "noted").write_text(f"{os.getcwd()} {os.getpid()}")
    return float(answer == reference)

def hangs(completions, answer):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(__file__).parent / "child").write_text(str(child.pid))
    while "hang" in completions:
        time.sleep(1)
    return [float(each == str(right)) for each, right in zip(completions, answer)]
"""


@pytest.fixture
def judge() -> Iterator[str]:
    """A server that earns 1 for `/ANSWER/REFERENCE` if they are equal, and 0 else."""

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, answer, right = self.path.split("/")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1" if answer == right else b"0")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path, judge: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUDGE", judge)
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(40)))
    return tmp_path


def source(folder: Path, function: str, *, sandbox: bool = False) -> TaskSpec:
    return with_row_name(TaskSpec(path=str(folder / "q.jsonl"), reward=f"{folder}/r.py:{function}", sandbox=sandbox))


def results(spec: TaskSpec, *groups: list[str], timeout_s: float = 20.0) -> list[JobResult]:
    jobs = [ScoringJob(ref=TaskRef(dataset=spec.dataset, seed=1, index=3), texts=texts) for texts in groups]

    async def run() -> list[JobResult]:
        async with ScorerPool(workers=1, answer_timeout_s=timeout_s, memory_mb=4096, tasks=[spec]) as pool:
            return await pool.run(jobs)

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("function", ["judged", "asked"])
def test_a_reward_reaches_the_network_only_outside_the_sandbox(folder: Path, function: str) -> None:
    (outside,) = results(source(folder, function), ["3", "4", "3"])
    assert (outside.rewards, outside.reason) == ([1.0, 0.0, 1.0], None)
    (inside,) = results(source(folder, function, sandbox=True), ["3", "4", "3"])
    assert inside.rewards == [None] * 3 and {*inside.marks} == {Mark.RAISED}


@pytest.mark.slow
def test_it_runs_in_a_process_of_its_own_in_the_folder_of_the_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (found,) = results(source(folder, "noted"), ["3", "4"])
    assert found.rewards == [1.0, 0.0]
    where, process = (folder / "noted").read_text().split()
    assert Path(where) == folder and int(process) != os.getpid()


@pytest.mark.slow
def test_a_call_that_hangs_is_killed_with_its_processes_and_costs_only_its_group(folder: Path) -> None:
    spec = source(folder, "hangs")
    started_s = time.monotonic()
    hung, other = results(spec, ["3", "hang"], ["3", "4"], timeout_s=2.0)
    assert time.monotonic() - started_s < 60
    assert hung.rewards == [None, None] and {*hung.marks} == {Mark.TIMEOUT}
    assert other.rewards == [1.0, 0.0]
    deadline_s = time.monotonic() + 10
    while _lives(int((folder / "child").read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _lives(int((folder / "child").read_text())), "with its pool the last process ends, and what it started"


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_no_group_of_another_node_reaches_it(folder: Path) -> None:
    spec = source(folder, "noted")
    assert VerifierChoice([spec]).local_only[spec.dataset] is LocalOnly.OUTSIDE_SANDBOX

    async def run() -> None:
        foreign = ScoringJob(ref=TaskRef(dataset=spec.dataset, seed=1, index=3), texts=["3"], sender="a key")
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=[spec], foreign_workers=1) as pool:
            with pytest.raises(ValueError, match="outside the sandbox"):
                await pool.run([foreign])

    asyncio.run(run())
    assert not (folder / "noted").exists()


@pytest.mark.slow
async def test_a_node_trains_on_local_groups_of_such_a_source_and_takes_none_of_others(
    nats_server: MakeServer, folder: Path, tmp_path: Path
) -> None:
    url, nodes = nats_server().url, {}
    gcd = {"dataset": "gcd"}
    for name, sandbox in (("alpha", False), ("beta", True)):
        reward = {"reward": f"{folder}/r.py:judged"} if name == "alpha" else {"verifier": "exact"}
        spec = with_row_name(TaskSpec.model_validate({"path": str(folder / "q.jsonl"), **reward, "sandbox": sandbox}))
        config = configured(name, url, tmp_path, None, [spec.model_dump(), gcd])  # type: ignore[list-item]
        nodes[name] = config.model_copy(update={"nats": config.nats.model_copy(update={"swarm_url": url})})
    asked = derive_task(task_ref(spec.dataset, seed=1, index=7))
    with capture_logs() as logs:
        async with verifier(nodes["alpha"]) as alpha, verifier(nodes["beta"]) as beta:
            await generate(beta.node, group("beta", 0, ["7", "no"], task=asked), group("beta", 1))
            await until(lambda: alpha.status.get("refused_task_not_allowed") == 1 and alpha.status.get("accepted") == 1)
            other = derive_task(task_ref(spec.dataset, seed=1, index=8))
            mine = group("alpha", 0, ["8", "no"], task=other)
            plain = [msgspec.structs.replace(each, text=text) for each, text in zip(mine.completions, ("8", "no"), strict=True)]
            await generate(alpha.node, msgspec.structs.replace(mine, completions=plain))
            await until(lambda: beta.status.get("accepted") == 1)
            (local,) = [each for each in await scored(alpha.node, "alpha") if each.origin == "local"]
            figures = {name: alpha.status.get(name) for name in ("local_only_outside_sandbox", "local_only_group_dependent")}
            assert not beta.status.get("local_only_outside_sandbox")
            assert alpha.status.get("senders_quarantined") == 0, "nobody is blamed"
            text = generate_latest(alpha.registry).decode()
    assert local.rewards == [1.0, 0.0]
    assert figures == {"local_only_outside_sandbox": 1, "local_only_group_dependent": 0}
    assert 'swarm_local_only_sources{why="outside_sandbox"} 1.0' in text
    assert len(local_only_words({"local_only_outside_sandbox": 1.0})) == 1
    (told,) = [line for line in logs if line["event"] == "source_local_only"]
    assert (told["task"], told["why"]) == (spec.dataset, "outside_sandbox")


def written(folder: Path, more: str = "", before: str = "", source: str = 'reward = "r.py:judged"\nsandbox = false') -> Path:
    (folder / "node.toml").write_text(f'{before}\n[[tasks]]\npath = "{folder}/q.jsonl"\n{source}\n{more}\n')
    return folder / "node.toml"


@pytest.mark.parametrize("accept", ["same", "dataset"])
def test_such_a_source_alone_together_with_foreign_groups_is_a_mistake(folder: Path, accept: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox = false.*sampler\.external = 0"):
        load_config(written(folder, before=f'[verifier]\naccept = "{accept}"'), environment={})
    load_config(written(folder, before="[sampler]\nexternal = 0"), environment={})
    load_config(written(folder, '[[tasks]]\ndataset = "gcd"'), environment={})


def test_the_sandbox_is_left_only_for_a_reward_of_ones_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="verifier exact"):
        load_config(written(folder, before="[sampler]\nexternal = 0", source='verifier = "exact"\nsandbox = false'), environment={})


@pytest.mark.slow
def test_config_check_tries_it_where_a_run_calls_it_and_says_that_it_is_local_only(folder: Path) -> None:
    file = written(folder, before='[sampler]\nexternal = 0\n[eval]\ntasks = 16\n[model]\npath = "models/base"')
    found = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
    assert "the reference earns 1" in found.output and "outside the sandbox" in found.output, found.output
    broken = written(folder, before="[sampler]\nexternal = 0\n[eval]\ntasks = 16", source='reward = "r.py:judged"')
    found = CliRunner().invoke(app, ["config", "check", "--config", str(broken)])
    assert isinstance(found.exception, CommandError) and found.exception.exit_code == EXIT_CONFIG
    assert "r.py:judged raised KeyError" in str(found.exception), "it sees no environment there"


@pytest.mark.slow
def test_task_score_tries_a_reward_outside_the_sandbox(folder: Path) -> None:
    asked = ["task", "score", str(folder / "q.jsonl"), "--index", "3", "--answer", "3", "--json"]
    found = CliRunner().invoke(app, [*asked, "--reward", f"{folder}/r.py:judged", "--no-sandbox"])
    assert found.exit_code == 0 and json.loads(found.stdout.splitlines()[-1])["reward"] == 1.0, found.output
    refused = CliRunner().invoke(app, [*asked, "--no-sandbox"])
    assert isinstance(refused.exception, CommandError) and "--reward" in str(refused.exception)
