"""People's answers: from the terminal through a verifier to another node's."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.control import DrawLease, TaskLedger
from shared.contracts.streams import prepare_node_streams
from shared.runtime.planes import connect_node_plane
from shared.tasks.derive import derive_task, task_ref
from swarm_cli import answer
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.local.control import holding_run
from swarm_cli.runs import RunNote, StartOptions, write_note
from tests.integration.running_verifier import MakeServer, RunningVerifier, configured, scored, until, verifier
from tests.nats_server import NatsServer

CONFIG = """
[node]
id = "people"
roles = "verifier"
var_dir = "{var}"
[nats]
node_url = "{url}"
swarm_url = "{url}"
[eval]
tasks = 10
[[tasks]]
dataset = "gcd"
"""


async def answered(config: Path, text: str, *options: str) -> Result:
    """`swarm answer` with this input, in a thread of its own."""
    arguments = ["answer", "--config", str(config), *options]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, input=text)


async def ledger(people: RunningVerifier) -> TaskLedger:
    entry = await people.node.kv.get(subjects.node_bucket("people"), subjects.LEDGER_KEY)
    assert entry is not None
    return decode(entry.value, TaskLedger)


async def test_a_persons_answers_are_scored_signed_and_taken_in_by_another_node(nats_server: MakeServer, tmp_path: Path) -> None:
    url = nats_server().url
    file = tmp_path / "people.toml"
    file.write_text(CONFIG.format(url=url, var=tmp_path))
    people_config = configured("people", url, tmp_path, tasks=[{"dataset": "gcd"}], share="all")
    people_config = people_config.model_copy(update={"node": people_config.node.model_copy(update={"roles": "verifier"})})
    learner = configured("beta", url, tmp_path, tasks=[{"dataset": "gcd"}])
    refused = await answered(file, "")
    assert refused.exit_code == 1 and "no verifier of people" in str(refused.exception)
    async with verifier(people_config) as people, verifier(learner) as beta:
        await people.status.report_once(people.node)
        await beta.status.report_once(beta.node)
        said = await answered(file, "one line\nand another\n\nno idea\n\n\n\n<answer>3</answer>\n")
        assert said.exit_code == 0, said.output
        assert "1 question answered" in said.output, "the third question was left in the middle"
        (group,) = [each for each in await scored(people.node, "people") if each.origin == "local"]
        assert [each.text for each in group.group.completions] == ["one line\nand another", "no idea"]
        assert group.group.task == derive_task(group.group.task.ref) and group.rewards == [0.0, 0.0]
        assert "add a wrong or a right answer" in said.output
        reward = re.findall(r"^rewards: (.*)$", said.output, re.MULTILINE)
        assert reward == ["0, wrong; 0, wrong; all alike, so a policy learns nothing from them: add a wrong or a right answer"]
        await until(lambda: beta.status.get("accepted") == 1)
        (taken,) = [each for each in await scored(beta.node, "beta") if each.origin == "external"]
        assert taken.group.model.name == "a person" and taken.group.completions[0].token_ids is None
        left = await ledger(people)
        assert left.next_draw == 3 and [(each.first, each.count) for each in left.leases] == [(2, 1)]
        again = await answered(file, "7\n\n8")
        assert again.exit_code == 0 and not (await ledger(people)).leases, "what is finished is shared at the end of the input"
        draws = [each.group.draw for each in await scored(people.node, "people") if each.origin == "local"]
        assert draws == [0, 2], "the question that was left is asked again, and the one passed over is not"
        trains = await answered(file, "", "--node", "beta")
        assert trains.exit_code == 1 and "trains a policy" in str(trains.exception)


async def prepared(server: NatsServer, tmp_path: Path) -> Path:
    """A configuration file. The server has its node's streams, and no verifier runs."""
    config = configured("people", server.url, tmp_path, tasks=[{"dataset": "gcd"}])
    node = await connect_node_plane(config, "verifier")
    await prepare_node_streams(node, "people", create=True)
    await node.close()
    file = tmp_path / "people.toml"
    file.write_text(CONFIG.format(url=server.url, var=tmp_path))
    return file


def claims(file: Path, url: str) -> tuple[answer.AnswerDesk, DrawLease]:
    desk = answer.AnswerDesk(load_config(file), url)
    return desk, desk.claim()


async def test_who_leaves_in_a_container_takes_nobodys_question_and_a_second_answer_to_one_is_told_and_kept(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(answer, "SCORED_S", 0.3)
    server = nats_server()
    file = await prepared(server, tmp_path)
    task = derive_task(task_ref(dataset="gcd", seed=1, index=0))

    def story() -> None:
        (first, mine), (second, _) = claims(file, server.url), claims(file, server.url)
        second.give_back()
        third, other = claims(file, server.url)
        assert other.first != mine.first
        assert first.share(mine, task, ["1"])[0] and first.share(mine, task, ["1"])[0], "its own duplicate is its own"
        shared, words = third.share(mine, task, ["2"])
        (kept,) = (tmp_path / "answers").iterdir()
        assert not shared and str(kept) in words and kept.read_text() == "2\n\n"

    await asyncio.wait_for(asyncio.to_thread(story), 60)


async def test_answers_wait_in_a_file_while_the_server_is_away(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "SCORED_S", 0.3)
    monkeypatch.setattr(answer, "RETRY_S", 0.2)
    server = nats_server()
    file = await prepared(server, tmp_path)
    task = derive_task(task_ref(dataset="gcd", seed=1, index=0))
    kept = tmp_path / "answers"

    def story() -> None:
        desk, lease = claims(file, server.url)
        server.kill()
        shared: list[bool] = []
        waiting = threading.Thread(target=lambda: shared.append(desk.share(lease, task, ["1"])[0]), daemon=True)
        waiting.start()
        give_up_at = time.monotonic() + 30
        while not (kept.exists() and [each.read_text() for each in kept.iterdir()] == ["1\n\n"]):
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        server.restart()
        waiting.join(30)
        assert shared == [True] and not [*kept.iterdir()]

    await asyncio.wait_for(asyncio.to_thread(story), 90)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGHUP, signal.SIGTERM])
async def test_a_closed_terminal_gives_the_question_back_and_keeps_what_was_written(
    nats_server: MakeServer, tmp_path: Path, ends: signal.Signals
) -> None:
    url = nats_server().url
    file = tmp_path / "people.toml"
    file.write_text(CONFIG.format(url=url, var=tmp_path))
    config = configured("people", url, tmp_path, tasks=[{"dataset": "gcd"}])
    config = config.model_copy(update={"node": config.node.model_copy(update={"roles": "verifier"})})

    def story() -> None:
        command = [sys.executable, "-c", "from swarm_cli.app import app; app()", "answer", "--config", str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as person:
            assert person.stdin is not None and person.stdout is not None
            try:
                said = b""
                for awaited, typed in ((b"answer 1:", b"7\n\n"), (b"answer 2:", b"")):
                    while awaited not in said:
                        assert select.select([person.stdout], [], [], 60)[0], said
                        assert (part := os.read(person.stdout.fileno(), 65_536)), said
                        said += part
                    person.stdin.write(typed)
                    person.stdin.flush()
                person.send_signal(ends)
                assert person.wait(30) == 0
            finally:
                person.kill()

    async with verifier(config) as people:
        await people.status.report_once(people.node)
        await asyncio.wait_for(asyncio.to_thread(story), 120)
        (lease,) = (await ledger(people)).leases
        assert lease.expires_at <= time.time()
    (kept,) = (tmp_path / "answers").iterdir()
    assert kept.read_text() == "7\n\n"


def test_questions_are_those_of_the_run_s_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWARM_CONFIG", raising=False)
    url = "nats://127.0.0.1:9"
    for name, dataset in (("people", "gcd"), ("node", "chain_sum")):
        text = CONFIG.format(url=url, var=tmp_path / "var").replace('"gcd"', f'"{dataset}"')
        (tmp_path / f"{name}.toml").write_text(text)
    run, own = tmp_path / "var" / "runs" / "first", tmp_path / "people.toml"
    with holding_run(run):
        write_note(run, RunNote(url, url, StartOptions(config=str(own)), started_in=str(tmp_path)))
        for given in (None, own):
            assert [each.dataset for each in answer.config_of_run(given, "").tasks] == ["gcd"]
        with pytest.raises(CommandError, match=re.escape(str(own))):
            answer.config_of_run(tmp_path / "node.toml", "")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(CommandError, match=re.escape(f"cd {tmp_path}")):
            answer.config_of_run(own, "")
    monkeypatch.chdir(tmp_path)
    assert [each.dataset for each in answer.config_of_run(tmp_path / "node.toml", "").tasks] == ["chain_sum"], "no run is running"
