"""The main job end to end: real services in processes of their own, a real server, sharing,
learning steps, and what a kill leaves.

One swarm serves all tests of this file, because on two cores most of the time goes into starting a
dozen processes.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from monitoring.metrics_doc import full_name, role_families
from shared.contracts.codec import decode
from shared.contracts.messages import ScoredGroup
from shared.contracts.subjects import node_scored_stream
from shared.model.base_policy import BasePolicyRecipe, build_base_policy, load_demo_tasks
from shared.run_records import SAMPLES_FILE, read_jsonl
from shared.transport.connect import connect
from swarm_cli.installation import DEMO_CONFIG
from tests.e2e.processes import REPO, ROLES, NodeProcesses, wait_until
from tests.nats_server import NatsServer

CONFIG = """
[node]
seed = 7  # the same tasks in every run
[model]
threads = 1
[generator]
engine = "transformers"
completions = 8
groups_per_call = 4
max_new_tokens = 12
[eval]
tasks = 12
every_versions = 1000
[verifier]
foreign_partial_credit = true  # a policy that is seldom right gives too few groups with a right answer
[sampler]
local = 2
external = 2
adapt = "off"  # six steps are over before a halved J is raised again
shortage = "fill_local"
shortage_wait_s = 20
[trainer]
learning_rate = 1e-4
checkpoint_every = 2
max_steps = {steps}
"""
STEPS = 6
CONDITIONAL = {
    "swarm_trainer_delta_lost_ratio",
    "swarm_reward_part_mean",
    "swarm_certificate_expiry_timestamp_seconds",
}
"""Metrics that have a value only with a configuration that this swarm does not have."""
SOME_STEPS_ONLY = {"swarm_trainer_grad_norm_foreign": "grad_norm_foreign", "swarm_trainer_grad_norm_local": "grad_norm_local"}
"""Metrics that have a value only when the newest step had such groups, and their names in the
steps' records.
"""
START_S = 300.0


@dataclass
class Swarm:
    """Two nodes with one model, one with another model and tokenizer, and one node alone."""

    server: NatsServer
    alpha: NodeProcesses
    beta: NodeProcesses
    gamma: NodeProcesses
    hermit: NodeProcesses

    @property
    def nodes(self) -> tuple[NodeProcesses, ...]:
        return (self.alpha, self.beta, self.gamma, self.hermit)


def _build(folder: Path, seed: int, hidden_size: int, vocab_size: int) -> Path:
    tasks = load_demo_tasks(DEMO_CONFIG)
    recipe = BasePolicyRecipe(
        seed=seed,
        steps=3,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        vocab_size=vocab_size,
        attempts_per_task=50,
        held_out_count=12,
    )
    build_base_policy(folder, tasks, recipe, show_progress=False)
    return folder


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    var = tmp_path_factory.mktemp("var")
    demo = DEMO_CONFIG.read_text()
    config = var / "test.toml"
    config.write_text(CONFIG.format(steps=STEPS) + demo[demo.index("[[tasks]]") :])
    # The shipped policy is sometimes right, so its groups are worth sharing; the other one only
    # learns from them.
    shipped, other = REPO / "models" / "base", _build(var / "other", 2, 96, 400)
    server = NatsServer(var / "nats").start()
    common = {"SWARM_NATS__NODE_URL": server.url, "SWARM_NATS__SWARM_URL": server.url}

    def node(name: str, model: Path, **more: str) -> NodeProcesses:
        return NodeProcesses(name, "test", var, {**common, "SWARM_MODEL__PATH": str(model), **more}, config)

    alone = {"SWARM_NATS__SWARM_URL": "none", "SWARM_SAMPLER__EXTERNAL": "0"}
    made = Swarm(
        server,
        node("alpha", shipped).start(),
        node("beta", shipped).start(),
        node("gamma", other).start(),
        node("hermit", shipped, **alone).start(),
    )
    try:
        yield made
    finally:
        for each in made.nodes:
            each.kill_all()
        server.kill()


def test_every_node_trains_on_local_and_on_foreign_groups(swarm: Swarm) -> None:
    for node in swarm.nodes:
        wait_until(lambda node=node: node.steps(), *swarm.nodes, timeout_s=START_S, what=f"{node.node}'s first step")  # type: ignore[misc]
    for node in (swarm.alpha, swarm.beta, swarm.gamma):
        wait_until(
            lambda node=node: any(line["groups_external"] and line["groups_local"] for line in node.steps()),  # type: ignore[misc]
            *swarm.nodes,
            timeout_s=START_S,
            what=f"a step of {node.node} on own and foreign groups",
        )


def test_a_service_killed_at_any_role_comes_back_and_the_swarm_goes_on(swarm: Swarm) -> None:
    for role in ROLES:
        swarm.alpha.kill(role)
        swarm.alpha.start(role)
    wait_until(
        lambda: len(swarm.alpha.steps()) >= STEPS, *swarm.nodes, timeout_s=START_S, what="alpha's last step after four kills"
    )
    assert [line["step"] for line in swarm.alpha.steps()] == list(range(1, STEPS + 1))


def test_all_nodes_finish_and_say_whose_reward_is_whose(swarm: Swarm) -> None:
    for node in swarm.nodes:
        wait_until(lambda node=node: len(node.steps()) >= STEPS, *swarm.nodes, timeout_s=START_S, what=f"{node.node}'s last step")  # type: ignore[misc]
        for line in node.steps():
            assert 0.0 <= line["reward_local"] <= 1.0
            assert line["staleness_max"] <= 1


def test_a_node_with_another_tokenizer_trains_on_foreign_text_with_its_own_logprobs(swarm: Swarm) -> None:
    # What gamma takes in comes from another tokenizer. Alpha and beta share theirs, but nobody asks
    # for logprobs, and texts give their tokens.
    foreign = [line for line in swarm.gamma.steps() if line["groups_external"]]
    assert foreign
    assert all(line["reencoded_share"] > 0.0 for line in foreign if line["updated"])
    taken = [line for line in swarm.alpha.steps() + swarm.beta.steps() if line["groups_external"]]
    assert any(line["reencoded_share"] > 0.0 and line["behaviour_share"] < 1.0 for line in taken)


def test_a_node_alone_trains_on_local_groups_only(swarm: Swarm) -> None:
    assert all(line["groups_external"] == 0 and line["reward_external"] is None for line in swarm.hermit.steps())


def test_held_out_results_are_written_for_the_base_policy_and_the_last(swarm: Swarm) -> None:
    for node in swarm.nodes:
        wait_until(
            lambda node=node: STEPS in [line["policy_version"] for line in node.evaluations()],  # type: ignore[misc]
            *swarm.nodes,
            timeout_s=60.0,
            what=f"{node.node}'s evaluation of its last policy",
        )
        assert node.evaluations()[0]["policy_version"] == 0
        samples = read_jsonl(node.run_dir / SAMPLES_FILE)
        assert samples[0]["policy_version"] == 0
        asked = [[each["question"] for each in line["samples"]] for line in samples]
        assert asked[0] and asked.count(asked[0]) == len(asked), "the same questions each time"
        assert sum(task["n"] for task in node.evaluations()[-1]["per_task"].values()) == node.evaluations()[-1]["n"]


def test_status_shows_every_node_and_every_service(swarm: Swarm) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm_cli", "status", "--json", "--node-url", swarm.server.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr
    shown = json.dumps(json.loads(done.stdout))
    for node in swarm.nodes:
        assert node.node in shown
    for role in ROLES:
        assert role in shown


def test_one_rollout_id_leads_through_the_logs_of_all_four_services_and_of_another_node(swarm: Swarm) -> None:
    node = swarm.beta
    trained = {rollout_id: step for step in node.events("trainer", "step") for rollout_id in step["rollout_ids"]}
    batched = {rollout_id for batch in node.events("sampler", "batch") for rollout_id in batch["rollout_ids"]}
    own = {line["rollout_id"]: line for line in node.events("generator", "rollouts_published")}
    scored = {line["rollout_id"]: line for line in node.events("verifier", "rollouts_scored")}
    accepted = {line["rollout_id"]: line for line in node.events("verifier", "foreign_rollouts_accepted")}
    followed = trained.keys() & batched & own.keys() & scored.keys()
    assert len(followed) > STEPS, "most of a node's local groups can be followed from the generator to the trainer"
    for rollout_id in followed:
        first, second, last = own[rollout_id], scored[rollout_id], trained[rollout_id]
        assert first["node"] == second["node"] == last["node"] == node.node
        assert first["task"] == second["task"] and first["task"] in last["tasks"]
        assert first["policy_version"] == second["policy_version"] < last["step"], "a step makes the version of its number"
        assert first["stream_seq"] >= 1 and second["stream_seq"] >= 1 and last["stream_seq"] == last["batch"]
    shared = {line["shared_rollout_id"] for other in swarm.nodes for line in other.events("verifier", "rollouts_shared")}
    assert shared & accepted.keys() & trained.keys(), "another node's group can be followed into this one's trainer"
    assert max(len(json.dumps(line)) for line in trained.values()) < 1024


def test_every_metric_of_the_catalogue_is_exported_with_a_value(swarm: Swarm) -> None:
    for role in ROLES:
        shown = swarm.beta.metrics(role)
        with_value = {line.split("{")[0].split(" ")[0] for line in shown.splitlines() if not line.startswith("#")}
        for family in role_families(role):
            name = full_name(family)
            wanted = f"{name}_count" if family.type == "histogram" else name
            assert f"# TYPE {name} {family.type}" in shown, f"{role}: {name}"
            assert wanted in with_value or name in CONDITIONAL | SOME_STEPS_ONLY.keys(), f"{role}: {wanted}"
    for field in SOME_STEPS_ONLY.values():
        assert any(step[field] is not None for step in swarm.beta.steps()), field
    assert "swarm_trainer_steps_total 0.0" not in swarm.beta.metrics("trainer")
    assert 'swarm_nats_connected{plane="swarm"} 1.0' in swarm.beta.metrics("verifier")
    assert 'swarm_nats_connected{plane="swarm"}' not in swarm.hermit.metrics("verifier")


def test_no_log_holds_a_completion(swarm: Swarm) -> None:
    texts = asyncio.run(_completions(swarm.server.url, "alpha"))
    # The policy answers with numbers; only rows of them cannot stand in a line for another reason.
    telling = {text for text in texts if re.fullmatch(r"\d+( \d+){2,}", text)}
    assert len(telling) > 10
    logs = [file for node in swarm.nodes for file in node.run_dir.glob("*.log")]
    assert len(logs) == len(swarm.nodes) * len(ROLES)
    for log in [*(file.read_text() for file in logs), *(node.log(role) for node in swarm.nodes for role in ROLES)]:
        assert not [text for text in telling if text in log or json.dumps(text)[1:-1] in log]


async def _completions(url: str, node: str) -> list[str]:
    transport = await connect(url, name="test")
    try:
        messages = await transport.read(node_scored_stream(node), 1, 256)
        groups = [decode(await transport.payload(message), ScoredGroup) for message in messages]
    finally:
        await transport.close()
    return [completion.text for scored in groups for completion in scored.group.completions]


def test_every_service_ends_with_code_0_on_sigterm(swarm: Swarm) -> None:
    for node in swarm.nodes:
        for role in ROLES:  # one that an earlier test started again may still be importing
            wait_until(lambda n=node, r=role: _answers(n, r), node, timeout_s=START_S, what=f"{node.node} {role} up")  # type: ignore[misc]
    codes = {(node.node, role): node.stop(role) for node in swarm.nodes for role in ROLES}
    assert set(codes.values()) == {0}, codes


def _answers(node: NodeProcesses, role: str) -> bool:
    try:
        return bool(node.metrics(role))
    except (OSError, IndexError):
        return False
