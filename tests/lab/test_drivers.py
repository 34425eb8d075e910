"""Both drivers are one experiment: the same scored groups become the same batches, and a short run
the same learning curve.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lab.arms import plan_run
from lab.records import RecordWriter, read_records
from lab.runs import run_folder
from lab.simulate import START_S, Simulation
from shared.contracts.codec import encode
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_scored, node_scored_stream
from shared.transport.connect import connect
from swarm_cli.experiment_services import make_services_runs
from swarm_cli.local.procfile import node_name
from tests.integration.sampler_node import Node
from tests.lab.tiny_swarm import tiny_qwen3, tiny_spec

ROUNDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


async def test_what_a_simulated_node_was_told_becomes_the_same_batches_in_the_service(
    folder: Path, tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(
        folder,
        rounds=ROUNDS,
        sampler={"strategy": "learnability", "max_external_age_s": 100.0, "shortage_wait_s": 0.0, "replay": 2},
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

    for node in simulation.nodes:
        transport = await connect(nats_url, name=node.name)
        await ensure_node_streams(transport, node.name)
        clock = [0.0]
        service = Node(transport, node.config, lambda clock=clock: clock[0])
        published = 0
        for number in range(1, ROUNDS + 1):
            clock[0] = START_S + number * spec.round_s + 1.0
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
            assert [item.replayed for item in batch.items] == [item.replayed for item in expected.items]
        await transport.close()
    items = [item for batches in chosen.values() for batch in batches if batch for item in batch.items]
    assert any(item.scored.origin == "external" for item in items) and any(item.replayed for item in items)


@pytest.mark.long
def test_a_short_run_of_real_services_learns_as_the_simulation_does(folder: Path, tmp_path: Path) -> None:
    spec = tiny_spec(
        folder,
        nodes=2,
        rounds=16,
        tasks=[{"dataset": "gcd", "config": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30}}],
        generator={"groups_per_call": 2, "threads": 1},
        eval={"tasks": 40, "every_versions": 100},
        sampler={"local": 3, "external": 1, "max_external_age_s": 600.0, "shortage_wait_s": 2.0},
        trainer={"learning_rate": 3e-3, "threads": 1, "checkpoint_every": 16},
    )
    early, late, base_rates = [], [], set()
    for seed in range(1, 7):
        torch.set_num_threads(1)
        writer = RecordWriter(tmp_path / "simulated.gz")
        Simulation(plan_run(spec, "base", seed, node_name)).run(writer)
        writer.close()
        early.append(reward(tmp_path / "simulated.gz", 1, 4))
        late.append(reward(tmp_path / "simulated.gz", 9, 16))
        base_rates.add(base_rate(tmp_path / "simulated.gz"))
    real = run_folder(tmp_path, "base", 1)
    make_services_runs(spec, [real])
    assert real.done
    steps = [line for line in read_records(real.records) if line["kind"] == "step"]
    assert [(line["node"], line["round"]) for line in steps] == [(n, r) for n in ("alpha", "beta") for r in range(1, 17)]
    assert base_rates == {base_rate(real.records)}
    # The drivers sample with different random numbers, so only distributions can agree: the real
    # run ends within four standard deviations of six simulated ones, and above where all of them
    # began.
    deviation = statistics.stdev(late)
    assert reward(real.records, 9, 16) == pytest.approx(statistics.fmean(late), abs=4 * deviation)
    assert reward(real.records, 9, 16) > statistics.fmean(early) < statistics.fmean(late) - 2 * deviation


@pytest.mark.long
def test_real_services_replay_as_many_groups_as_a_simulation_and_count_what_they_generate(folder: Path, tmp_path: Path) -> None:
    """A node alone, so that a comparison of sharing with own old groups can be made on real
    processes.
    """
    spec = tiny_spec(
        folder,
        nodes=1,
        rounds=6,
        tasks=[{"dataset": "gcd", "config": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30}}],
        generator={"groups_per_call": 2, "threads": 1},
        eval={"tasks": 10, "every_versions": 100},
        sampler={"local": 3, "external": 0, "max_staleness": 0, "replay": 2},
        trainer={"learning_rate": 3e-3, "threads": 1, "checkpoint_every": 6},
    )
    real = run_folder(tmp_path, "base", 1)
    make_services_runs(spec, [real])
    steps = [line for line in read_records(real.records) if line["kind"] == "step"]
    assert [line["round"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all((line["groups_local"], line["generated"], line["staleness"]) == (3, 3 * 16, 0) for line in steps)
    again = [line.get("groups_replayed", 0) for line in steps]
    assert again[0] == 0 and again[-1] == 2 and again == sorted(again)
    assert all(0 < line["replayed_reward"] < 1 for line in steps if line.get("groups_replayed"))


def reward(file: Path, first: int, last: int) -> float:
    """Mean local reward over nodes and rounds."""
    lines = [line for line in read_records(file) if line["kind"] == "step" and first <= line["round"] <= last]
    return statistics.fmean(line["local_reward"] for line in lines)


def base_rate(file: Path) -> float:
    return next(line["pass_rate"] for line in read_records(file) if line["kind"] == "eval" and line["round"] == 0)
