"""People's answers: from the terminal through a verifier to another node's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.control import TaskLedger
from shared.tasks.derive import derive_task
from swarm_cli.app import app
from tests.integration.running_verifier import MakeServer, RunningVerifier, configured, scored, until, verifier

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
    people_config = configured("people", url, tmp_path, tasks=[{"dataset": "gcd"}])
    people_config = people_config.model_copy(update={"node": people_config.node.model_copy(update={"roles": "verifier"})})
    learner = configured("beta", url, tmp_path, tasks=[{"dataset": "gcd"}])
    refused = await answered(file, "")
    assert refused.exit_code == 1 and "no verifier of people" in str(refused.exception)
    async with verifier(people_config) as people, verifier(learner) as beta:
        await people.status.report_once(people.node)
        await beta.status.report_once(beta.node)
        said = await answered(file, "one line\nand another\n\nno idea\n\n\n\n<answer>3</answer>\n\n")
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
        again = await answered(file, "7\n\n\n", "--questions", "1")
        assert again.exit_code == 0 and not (await ledger(people)).leases
        draws = [each.group.draw for each in await scored(people.node, "people") if each.origin == "local"]
        assert draws == [0, 2], "the question that was left is asked again, and the one passed over is not"
        trains = await answered(file, "", "--node", "beta")
        assert trains.exit_code == 1 and "trains a policy" in str(trains.exception)
