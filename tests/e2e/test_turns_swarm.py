"""Answers of one turn, calls of the calculator and a game are shared by two nodes that train,
beside a teacher that only answers; a source with a judge stays at home.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.run_records import read_jsonl
from tests.e2e.processes import REPO, NodeProcesses, wait_until
from tests.engines.openai_server import Behaviour, openai_server
from tests.nats_server import NatsServer

CONFIG = """
[model]
threads = 1
[generator]
engine = "transformers"
completions = 4
groups_per_call = 4
max_new_tokens = 24
[eval]
tasks = 8
every_versions = 1000
[verifier]
share = "all"
foreign_partial_credit = true  # so that groups without a right answer are worth something too
[sampler]
local = 2
external = 2
adapt = "off"
strategy = "uniform"
shortage_wait_s = 20
[trainer]
"""
SINGLE = """
[[tasks]]
dataset = "chain_sum"
config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
"""
TURNS = """
[[tasks]]
dataset = "products"
tools = ["calculator"]
verifier = "final_number"
max_turns = 3
config = { max_terms = 2, min_digits = 2, max_digits = 2 }
[[tasks]]
dataset = "gcd"
environment = "game.py:Game"
max_turns = 3
"""
JUDGED = """
[[tasks]]
path = "questions.jsonl"
verifier = "judge"
pass_at = 0.7
judge = { url = "URL", model = "m" }
"""
GAME = '''
class Game:
    """Says whether the number is higher or lower, and pays for each turn."""

    def reply(self, task, turns):
        return None if turns[-1].strip() == task.task.answer else ["higher", "lower"][len(turns[-1]) % 2]

    def score(self, task, turns):
        return float(len(turns[-1]) % 3)
'''
SHARED = ("chain_sum", "products", "gcd")
START_S = 300.0


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_several_kinds_of_tasks_a_teacher_and_a_judge_work_in_one_swarm(nodes: tuple[NodeProcesses, ...]) -> None:
    alpha, beta, teacher = nodes

    def accepted(taker: NodeProcesses, sender: str) -> set[str]:
        return {line["task"] for line in taker.events("verifier", "foreign_rollouts_accepted") if line["sender"] == sender}

    for taker, sender in ((alpha, "beta"), (beta, "alpha")):
        wait_until(
            lambda taker=taker, sender=sender: accepted(taker, sender) == set(SHARED) and accepted(taker, "teacher"),  # type: ignore[misc]
            *nodes,
            timeout_s=START_S,
            what=f"{taker.node} takes groups of {', '.join(SHARED)} from {sender}, and some of the teacher",
        )
        assert accepted(taker, "teacher") == {"chain_sum"}
    for node in (alpha, beta):
        wait_until(
            lambda node=node: kinds(node) >= {"judged", "one turn", "local turns", "external turns"},  # type: ignore[misc]
            *nodes,
            timeout_s=START_S,
            what=f"{node.node} trains on all kinds",
        )
        refused = {line["reason"] for line in node.events("verifier", "foreign_rollouts_refused")}
        assert not refused & {"turns", "malformed", "task_mismatch"}, refused
    assert not teacher.steps() and {role for role in teacher.processes} == {"generator", "verifier"}


def kinds(node: NodeProcesses) -> set[str]:
    """What a node's batches had of its own and of other nodes' groups."""
    found = set()
    for line in read_jsonl(node.run_dir / "batches.jsonl"):
        for item in line["batch"]["items"]:
            scored = item["scored"]
            several = any(answer.get("turn_chars") for answer in scored["group"]["completions"])
            dataset = scored["group"]["task"]["ref"]["dataset"]
            found.add("judged" if dataset.startswith("file") else f"{scored['origin']} turns" if several else "one turn")
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[NodeProcesses, ...]]:
    (tmp_path / "game.py").write_text(GAME)
    rows = [{"question": f"Say something kind about {number}.", "answer": number} for number in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with openai_server(Behaviour(chat=lambda body: f"Grade: {len(str(body)) % 11}")) as judge:
        questions = JUDGED.replace("URL", judge).replace("questions.jsonl", str(tmp_path / "questions.jsonl"))
        (tmp_path / "whole.toml").write_text(CONFIG + SINGLE + TURNS + questions)
        (tmp_path / "single.toml").write_text(CONFIG + SINGLE)
        server = NatsServer(tmp_path / "nats").start()
        common = {"SWARM_NATS__NODE_URL": server.url, "SWARM_NATS__SWARM_URL": server.url}
        player = {**common, "SWARM_MODEL__PATH": str(REPO / "experiments/models/calculator")}
        teaches = {
            **common,
            "SWARM_MODEL__PATH": str(REPO / "models/base"),
            "SWARM_NODE__ROLES": "generator,verifier",
            "SWARM_GENERATOR__GROUPS_PER_MINUTE": "60",
        }
        made = (
            NodeProcesses("alpha", "test", tmp_path, player, tmp_path / "whole.toml").start(),
            NodeProcesses("beta", "test", tmp_path, player, tmp_path / "whole.toml").start(),
            NodeProcesses("teacher", "test", tmp_path, teaches, tmp_path / "single.toml").start("generator", "verifier"),
        )
        try:
            yield made
        finally:
            for each in made:
                each.kill_all()
            server.kill()
