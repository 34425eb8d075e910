"""What is remembered of refusals is bounded, and a flood pushes out nothing of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import structlog
from structlog.testing import capture_logs

from services.verifier.refused_messages import (
    FILES_KEPT,
    KNOWN_SENDERS,
    OF_A_SENDER,
    STRANGERS,
    RefusedMemory,
    RefusedRecord,
    excerpt_of,
)
from shared.run_records import RefusedGroup, refused_file, refused_files
from shared.runtime.writes import Writes
from shared.tasks.prompt import text_task
from tests.full_disk import no_file_above
from tests.unit.test_border import group


def refusal(sender: str, number: int = 0, reason: str = "too_old", **changes: Any) -> RefusedGroup:
    values: dict[str, Any] = {
        "time": float(number),
        "reason": reason,
        "detail": "",
        "sender": sender,
        "id": f"{number:064x}",
        "claimed_id": "",
        "swarm_seq": number,
        "stored_at": 1.0,
    }
    return RefusedGroup(**{**values, **changes})


def test_a_flood_of_names_and_of_one_name_leaves_the_others_what_they_had() -> None:
    memory = RefusedMemory()
    memory.note(refusal("beta", 1), known=True)
    memory.note(refusal("gamma", 2, "copied"), known=True)
    for number in range(3, 5000):
        memory.note(refusal(f"made-up-{number}", number), known=False)
        memory.note(refusal("gamma", number, "signature"), known=True)
    kept = [each for each, _ in memory.all()]
    assert [each.swarm_seq for each in kept if each.sender == "beta"] == [1]
    assert [each.reason for each in kept if each.sender == "gamma"].count("copied") == 1, "forgeries give way to each other"
    assert len([each for each in kept if each.sender == "gamma"]) == OF_A_SENDER
    assert len([each for each in kept if each.sender.startswith("made-up")]) == STRANGERS
    for number in range(200):
        memory.note(refusal(f"known-{number}", number), known=True)
    assert len({each.sender for each, _ in memory.all()}) == KNOWN_SENDERS + STRANGERS


def test_a_name_that_finds_its_key_keeps_what_was_known_of_it() -> None:
    memory = RefusedMemory()
    memory.note(refusal("beta", 1), known=False)
    memory.note(refusal("beta", 2), known=True)
    assert [(each.swarm_seq, known) for each, known in memory.all()] == [(1, True), (2, True)]


def test_the_largest_of_all_texts_stay_small() -> None:
    whole = group()
    for text in ("\U0001f600" * 5000, "\x00" * 5000, "a" * 5000):
        answers = [msgspec.structs.replace(whole.completions[0], text=text)] * 50
        task = text_task(whole.task.ref, text, "4")
        large = msgspec.structs.replace(whole, completions=answers, task=task)
        memory = RefusedMemory()
        memory.note(refusal("beta", detail=text, group=excerpt_of(large)), known=True)
        ((kept, _),) = memory.all()
        assert len(json.dumps(msgspec.to_builtins(kept))) < 3000


async def test_the_record_outlives_a_restart_a_torn_line_and_a_full_disk_and_forgets_old_replicas(tmp_path: Path) -> None:
    log = structlog.get_logger("verifier")
    record = RefusedRecord(tmp_path, "0", Writes("verifier", log=log))
    record.note(refusal("beta", 7, group=excerpt_of(group())), known=True)
    await record.write()
    file = refused_file(tmp_path, "0")
    with file.open("a") as torn:
        torn.write('{"time": 3, "reas')
    again = RefusedRecord(tmp_path, "0", Writes("verifier", log=log))
    again.note(refusal("", 8, id="", claimed_id="ab" * 8), known=False)
    with no_file_above(100), capture_logs() as said:
        await again.write()
    assert [line["event"] for line in said] == ["write_failed"]
    assert [json.loads(line)["swarm_seq"] for line in file.read_text().splitlines() if line.endswith("}")] == [7]
    again.note(refusal("gamma", 9), known=True)
    await again.write()
    assert [json.loads(line)["swarm_seq"] for line in file.read_text().splitlines()] == [7, 8, 9]
    assert [json.loads(line)["known"] for line in file.read_text().splitlines()] == [True, False, True]
    for number in range(20):
        refused_file(tmp_path, f"pod-{number}").write_text("")
    RefusedRecord(tmp_path, "1", Writes("verifier", log=log))
    assert len(refused_files(tmp_path)) <= FILES_KEPT
