"""A simulated node and the services are one experiment: the same scored groups become the same
batches.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lab.arms import plan_run
from lab.records import RecordWriter
from lab.simulate import START_S, Simulation
from shared.contracts.codec import encode
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_scored, node_scored_stream
from shared.transport.connect import connect
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
