"""A server's store that somebody else made is opened only if no stream in it starts anything by
itself: messages that go round in circles fill the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.contracts.streams import node_streams, swarm_streams
from shared.transport.blobs import companion_name
from swarm_cli.errors import CommandError
from swarm_cli.local.control import holding_run
from swarm_cli.local.untrusted_run import is_swarm_stream
from swarm_cli.runs import RunNote, StartOptions, write_note

NAME = "NODE_ALPHA_SCORED"
PULL = b'{"name":"verifier","ack_policy":"explicit","metadata":{"_nats.req.level":"0"}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "gift"
    (folder / "alpha").mkdir(parents=True)
    stream(folder, NAME)
    return folder


def stream(folder: Path, name: str, settings: bytes = b"", consumer: bytes = PULL) -> None:
    made = folder / "jetstream" / "$G" / "streams" / name
    (made / "obs" / "verifier").mkdir(parents=True, exist_ok=True)
    (made / "msgs").mkdir(exist_ok=True)
    (made / "meta.inf").write_bytes(settings or json.dumps({"name": name, "subjects": ["a"]}).encode())
    (made / "obs" / "verifier" / "meta.inf").write_bytes(consumer)


def with_setting(text: str) -> Callable[[Path], None]:
    return lambda folder: stream(folder, NAME, f'{{"name":"{NAME}",{text}}}'.encode())


def pushed(text: str) -> Callable[[Path], None]:
    return lambda folder: stream(folder, NAME, consumer=f'{{"name":"c",{text}}}'.encode())


MOVING = {
    "republish": with_setting('"republish":{"src":">","dest":"b.>"}'),
    "mirror": with_setting('"mirror":{"name":"B"}'),
    "sources": with_setting('"sources":[{"name":"B"}]'),
    "in other letters": with_setting('"ſourceS":[{"name":"B"}]'),
    "twice": with_setting('"sources":[{"name":"B"}],"sources":null'),
    "transform": with_setting('"subject_transform":{"src":"a","dest":"b"}'),
    "schedules": with_setting('"allow_msg_schedules":true'),
    "unreadable": with_setting('"description":"\\'),
    "another name": with_setting('"Name":"NODE_ALPHA_DEAD"'),
    "endless": lambda folder: stream(folder, NAME, b" " * 2**21),
    "push": pushed('"deliver_subject":"b"'),
    "push in other letters": pushed('"Deliver_Subject":"b"'),
    "push twice": pushed('"deliver_subject":"b","deliver_subject":null'),
    "unreadable push": lambda folder: stream(folder, NAME, consumer=b'{"deliver_subject":"b","description":"\xff"}'),
}


@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING.keys())
def test_a_store_whose_streams_start_something_is_not_started(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder)
    with pytest.raises(CommandError, match=rf"{NAME}.*copied here.*if you trust the run"), holding_run(folder):
        pass
    assert not (folder / "up.lock").exists()


def test_a_copied_run_with_other_streams_than_a_swarms_is_not_started(folder: Path) -> None:
    stream(folder, "NODE_ALPHA_OTHER")
    with (
        pytest.raises(CommandError, match=r"NODE_ALPHA_OTHER is no stream of a swarm.*remove.*another name with --run"),
        holding_run(folder),
    ):
        pass


def test_a_copied_run_with_more_than_streams_in_its_store_is_not_started(folder: Path) -> None:
    (folder / "jetstream" / "$G" / "templates" / "t").mkdir(parents=True)
    with pytest.raises(CommandError, match="templates"), holding_run(folder):
        pass


def test_a_copied_run_as_a_swarm_leaves_it_and_ones_own_run_are_started(folder: Path) -> None:
    with holding_run(folder):
        write_note(folder, RunNote("nats://127.0.0.1:1", "none", StartOptions()))
    stream(folder, "MINE", consumer=b'{"deliver_subject":"b"}')
    with holding_run(folder):
        pass


def test_a_copied_run_with_files_of_holes_is_not_started(folder: Path) -> None:
    weights = folder / "alpha" / "weights.safetensors"
    with weights.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CommandError, match=r"weights\.safetensors has 1,048,576 MiB.*holes"), holding_run(folder):
        pass
    weights.unlink()
    with (folder / "jetstream" / "$G" / "streams" / NAME / "msgs" / "1.blk").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CommandError, match=r"1\.blk has 1,048,576 MiB"), holding_run(folder):
        pass


def test_every_stream_of_a_swarm_is_known_by_its_name() -> None:
    made = [spec.name for spec in (*node_streams("my-node2"), *swarm_streams())]
    made += [companion_name(name) for name in made]
    assert all(map(is_swarm_stream, [*made, "NODE_A_POLICIES", "KV_swarm_nodes", "KV_node_my-node2"]))
    others = (
        "A",
        "",
        "NODE__SCORED",
        "NODE_a_SCORED",
        "NODE_A_B_SCORED",
        "KV_other",
        "KV_node_A",
        "SWARM_OTHER",
        "NODE_A_SCORED_BLOBS_BLOBS",
    )
    assert not any(map(is_swarm_stream, others))
