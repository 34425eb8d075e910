"""Both drivers are one experiment: the same scored groups become the same batches, and a short run the same learning curve."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lab.arms import plan_run
from lab.records import RecordWriter, read_records
from lab.runs import run_folder
from lab.simulate import START_S, Simulation
from lab.statistics import estimate
from shared.messages import Batch, ScoredGroup, encode
from shared.streams import ensure_node_streams
from shared.subjects import node_scored, node_scored_stream
from shared.transport.connect import connect
from swarm_cli.experiment_services import make_services_runs
from swarm_cli.procfile import node_name
from tests.integration.test_sampler_service import Node
from tests.lab.tiny_swarm import tiny_qwen3, tiny_spec

ROUNDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


async def test_what_a_simulated_node_was_told_becomes_the_same_batches_in_the_service(
    folder: Path, tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(
        folder, rounds=ROUNDS, sampler={"strategy": "learnability", "max_external_age_s": 100.0, "shortage_wait_s": 0.0}
    )
    torch.set_num_threads(1)
    simulation = Simulation(plan_run(spec, "base", 5, lambda place: f"lab-{node_name(place)}"))
    told: dict[str, list[ScoredGroup]] = defaultdict(list)
    for node in simulation.nodes:
        observe = node._observe
        monkeypatch.setattr(node, "_observe", lambda scored, n=node, o=observe: (told[n.name].append(scored), o(scored)))
    chosen: dict[str, list[Batch | None]] = defaultdict(list)
    upto: dict[str, list[int]] = defaultdict(list)
    writer = RecordWriter(tmp_path / "r.gz")
    for number in range(1, ROUNDS + 1):
        simulation.round(number, writer)
        for node in simulation.nodes:
            chosen[node.name].append(simulation.batches[node.name])
            upto[node.name].append(len(told[node.name]))
    writer.close()

    now = 0.0
    for node in simulation.nodes:
        transport = await connect(nats_url, name=node.name)
        await ensure_node_streams(transport, node.name)
        service = Node(transport, node.config, lambda: now)
        published = 0
        for number in range(1, ROUNDS + 1):
            now = START_S + number * spec.round_s + 1.0
            for scored in told[node.name][published : upto[node.name][number - 1]]:
                payload = encode(scored)
                await transport.publish(
                    node_scored(node.name), payload, stream=node_scored_stream(node.name), message_id=scored.group_id
                )
            published = upto[node.name][number - 1]
            await service.train_to(number - 1)
            service.start()
            batch = (await service.batches(number))[number - 1]
            await service.stop()
            expected = chosen[node.name][number - 1]
            assert expected is not None
            assert [item.scored.group_id for item in batch.items] == [item.scored.group_id for item in expected.items]
            assert (batch.seed, batch.strategy, batch.state) == (expected.seed, expected.strategy, expected.state)
            assert [item.weight for item in batch.items] == [item.weight for item in expected.items]
        await transport.close()
    assert sum(
        item.scored.origin == "external" for batches in chosen.values() for batch in batches if batch for item in batch.items
    )


def test_a_short_run_of_real_services_learns_as_the_simulation_does(folder: Path, tmp_path: Path) -> None:
    spec = tiny_spec(
        folder,
        nodes=2,
        rounds=16,
        generator={"groups_per_call": 2, "threads": 1},
        eval={"tasks": 40, "every_versions": 100},
        sampler={"local": 3, "external": 1, "max_external_age_s": 600.0, "shortage_wait_s": 2.0},
        trainer={"learning_rate": 3e-3, "threads": 1, "checkpoint_every": 16},
    )
    simulated = []
    base_rates = set()
    for seed in range(1, 7):
        torch.set_num_threads(1)
        writer = RecordWriter(tmp_path / "simulated.gz")
        Simulation(plan_run(spec, "base", seed, node_name)).run(writer)
        writer.close()
        simulated.append(late_reward(tmp_path / "simulated.gz"))
        base_rates.add(base_rate(tmp_path / "simulated.gz"))
    real = run_folder(tmp_path, "base", 1)
    make_services_runs(spec, [real])
    assert real.done
    steps = [line for line in read_records(real.records) if line["kind"] == "step"]
    assert [(line["node"], line["round"]) for line in steps] == [(n, r) for n in ("alpha", "beta") for r in range(1, 17)]
    assert base_rates == {base_rate(real.records)}
    # The drivers sample with different random numbers, so only distributions can agree: one real run lies within four standard
    # deviations of six simulated ones, and both have learned.
    mean = estimate(simulated).mean
    deviation = (sum((value - mean) ** 2 for value in simulated) / (len(simulated) - 1)) ** 0.5
    assert late_reward(real.records) == pytest.approx(mean, abs=4 * deviation + 0.01)


def late_reward(file: Path) -> float:
    rewards = [line["local_reward"] for line in read_records(file) if line["kind"] == "step" and line["round"] > 8]
    return sum(rewards) / len(rewards)


def base_rate(file: Path) -> float:
    return next(line["pass_rate"] for line in read_records(file) if line["kind"] == "eval" and line["round"] == 0)
