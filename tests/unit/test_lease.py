"""A node's name is leased: who may take a lease, who may write, and what the server refuses."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.control import LeaseRecord
from shared.contracts.streams import prepare_node_streams
from shared.contracts.subjects import node_bucket
from shared.lease import folder
from shared.lease.folder import FolderLock, FolderTaken
from shared.lease.holder import Lease, LeaseLost, Newcomer, Term
from shared.lease.name import NameTaken, take_name
from shared.transport.base import KeyValue, KvEntry, NotConnected, StreamSpec
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from tests.nats_server import own_plane

LEASE_S = 10.0
BUCKET, KEY = node_bucket("alpha"), "lease.trainer"
_buckets = itertools.count()


def test_a_lease_that_is_renewed_is_held_and_one_that_is_not_may_be_taken_after_its_time() -> None:
    assert Newcomer().look(free=True, revision=0, now_s=0.0, lease_s=LEASE_S) == "take"
    renewed, silent = Newcomer(), Newcomer()
    assert renewed.look(free=False, revision=7, now_s=0.0, lease_s=LEASE_S) == "wait"
    assert renewed.look(free=False, revision=9, now_s=1.0, lease_s=LEASE_S) == "held"
    seen = [silent.look(free=False, revision=7, now_s=float(second), lease_s=LEASE_S) for second in range(11)]
    assert seen == ["wait"] * 10 + ["take"]


def test_time_in_which_the_server_did_not_answer_does_not_count_against_the_holder() -> None:
    newcomer = Newcomer()
    assert newcomer.look(free=False, revision=7, now_s=0.0, lease_s=LEASE_S) == "wait"
    assert newcomer.look(free=False, revision=7, now_s=60.0, lease_s=LEASE_S) == "wait", "the server was away for a minute"
    assert [newcomer.look(free=False, revision=7, now_s=60.0 + second, lease_s=LEASE_S) for second in range(1, 11)] == [
        "wait"
    ] * 9 + ["take"]


def test_an_answer_of_a_replica_that_lags_is_no_renewal() -> None:
    newcomer = Newcomer()
    newcomer.look(free=False, revision=7, now_s=0.0, lease_s=LEASE_S)
    assert newcomer.look(free=False, revision=5, now_s=1.0, lease_s=LEASE_S) == "wait"


@pytest.mark.slow
@given(renewals=st.lists(st.floats(0, 1000), max_size=20), asked=st.floats(0, 1100))
def test_a_holder_stops_before_anybody_can_have_taken_over(renewals: list[float], asked: float) -> None:
    term = Term(LEASE_S)
    for sent_s in renewals:
        term.renewed(sent_s)
    assert term.holds(asked) == any(asked < sent_s + 0.9 * LEASE_S for sent_s in renewals)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Lives:
    """Processes that want to be alpha's trainer, on one server, with one clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._born = 0
        self.bucket = f"{BUCKET}-{next(_buckets)}"

    async def open(self, url: str = "") -> Lives:
        self.plane = await connect(url, name="test") if url else await own_plane()
        await self.plane.kv.ensure(self.bucket, history=8)
        return self

    def newcomer(self, place: str = "", lease_s: float = LEASE_S) -> Lease:
        self._born += 1
        record = LeaseRecord(
            holder=f"life-{self._born}", place=place, run="r", host="h", pid=self._born, taken_at=0.0, lease_s=lease_s
        )
        return Lease(self.plane.kv, self.bucket, KEY, record, clock=self.clock)

    async def holder(self, place: str = "") -> tuple[Lease, KeyValue]:
        """A newcomer that has waited for as long as it takes."""
        lease = self.newcomer(place)
        for _ in range(20):
            if await lease.look() == "take":
                await lease.claim_keys(["trainer"])
                return lease, self.plane.fenced(lease).kv
            self.clock.now_s += 1.0
        raise AssertionError("the lease was never to be had")


async def test_the_holder_renews_and_writes_and_a_newcomer_is_told_to_go() -> None:
    lives = await Lives().open()
    first, kv = await lives.holder()
    second = lives.newcomer()
    assert await second.look() == "wait"
    lives.clock.now_s += 2.0
    await first.renew()
    assert await second.look() == "held" and second.seen is not None and second.seen.pid == 1
    await kv.put(lives.bucket, "trainer", b"1")


async def test_a_newcomer_with_a_shorter_time_waits_for_as_long_as_the_holder_says() -> None:
    lives = await Lives().open()
    await lives.holder()
    hasty = lives.newcomer(lease_s=2.0)
    verdicts = []
    for _ in range(11):
        verdicts.append(await hasty.look())
        lives.clock.now_s += 1.0
    assert verdicts == ["wait"] * 10 + ["take"]


async def test_a_lease_given_up_or_left_by_a_dead_process_of_this_folder_is_taken_at_once() -> None:
    lives = await Lives().open()
    await lives.holder(place="disk")
    assert await lives.newcomer("other").look() == "wait"
    assert await lives.newcomer("disk").look() == "take", "who has the lock file knows that the former holder is dead"
    second, _ = await lives.holder()
    await second.release()
    assert await lives.newcomer().look() == "take"


async def test_a_holder_that_comes_back_too_late_writes_nothing_and_says_why() -> None:
    lives = await Lives().open()
    first, kv = await lives.holder()
    await kv.put(lives.bucket, "trainer", b"old")
    second, theirs = await lives.holder()
    await theirs.put(lives.bucket, "trainer", b"new")
    plane = lives.plane.fenced(first)
    await lives.plane.ensure_stream(StreamSpec(name="LOG", subjects=("log",)))
    for write in (
        lambda: kv.put(lives.bucket, "trainer", b"late"),
        lambda: kv.put(lives.bucket, "anything", b"late"),
        lambda: kv.update(lives.bucket, "ledger", b"late", last_revision=0),
        lambda: plane.publish("log", b"late", stream="LOG", message_id="late"),
        lambda: plane.purge("LOG", 1),
        lambda: fetch(plane, "LOG", "worker", 1, 0.1),
        lambda: plane.ensure_stream(StreamSpec(name="LOG2", subjects=("log2",))),
    ):
        with pytest.raises(LeaseLost, match=r"process 2 on h \(run r\) has taken over lease.trainer .* stops"):
            await write()
    assert first.lost.is_set() and not second.lost.is_set()
    entry = await lives.plane.kv.get(lives.bucket, "trainer")
    assert entry is not None and entry.value == b"new"


async def test_a_write_that_was_on_its_way_when_the_lease_was_taken_over_is_refused_by_the_server() -> None:
    """The former holder asked while its lease ran, and was suspended between that and its write."""
    lives = await Lives().open()
    first, kv = await lives.holder()
    await kv.put(lives.bucket, "trainer", b"old")
    await lives.holder()
    first._term.renewed(lives.clock.now_s)  # as it looked when it asked
    with pytest.raises(LeaseLost):
        await kv.put(lives.bucket, "trainer", b"late")
    entry = await lives.plane.kv.get(lives.bucket, "trainer")
    assert entry is not None and entry.value == b"old"


async def test_a_takeover_writes_again_what_is_newest_also_where_a_server_that_lags_answers_first() -> None:
    lives = await Lives().open()
    _, kv = await lives.holder()
    await kv.put(lives.bucket, "trainer", b"8")
    old = await lives.plane.kv.get(lives.bucket, "trainer")
    await kv.put(lives.bucket, "trainer", b"9")
    answers, newest = [old], lives.plane.kv.get

    async def lagging(bucket: str, key: str) -> KvEntry | None:
        return answers.pop() if key == "trainer" and answers else await newest(bucket, key)

    lives.plane.kv.get = lagging  # type: ignore[method-assign]
    await lives.holder()
    entry = await newest(lives.bucket, "trainer")
    assert not answers and entry is not None and entry.value == b"9"


async def test_a_holder_that_was_away_goes_on_where_nobody_took_its_place() -> None:
    lives = await Lives().open()
    first, kv = await lives.holder()
    lives.clock.now_s += 3600.0
    await kv.put(lives.bucket, "trainer", b"1")
    await lives.plane.kv.put(lives.bucket, "trainer", b"by hand")
    await kv.put(lives.bucket, "trainer", b"2")
    entry = await lives.plane.kv.get(lives.bucket, "trainer")
    assert entry is not None and entry.value == b"2" and not first.lost.is_set()


@pytest.mark.slow
@given(data=st.data())
def test_whatever_happens_only_the_last_to_take_the_lease_has_writes_accepted(nats_url: str, data: st.DataObject) -> None:
    """Lives look, renew, write and are frozen between asking and writing, in any order."""

    async def play() -> None:
        lives = await Lives().open(nats_url)
        await lives.plane.kv.put(lives.bucket, "trainer", b"an earlier life's")
        everybody = [lives.newcomer() for _ in range(3)]
        writers: dict[int, KeyValue] = {}
        newest = None
        for step in range(data.draw(st.integers(5, 40))):
            who = data.draw(st.integers(0, 2))
            lease = everybody[who]
            match data.draw(st.sampled_from(["look", "look", "renew", "write", "frozen write", "time", "give up"])):
                case "look" if who not in writers:
                    if await lease.look() == "take":
                        await lease.claim_keys(["trainer"])
                        writers[who] = lives.plane.fenced(lease).kv
                        newest = who
                case "renew" if who in writers:
                    try:
                        await lease.renew()
                        assert who == newest
                    except LeaseLost:
                        assert who != newest
                case ("write" | "frozen write") as how if who in writers:
                    if how == "frozen write":
                        lease._term.renewed(lives.clock.now_s)
                    try:
                        await writers[who].put(lives.bucket, "trainer", b"%d %d" % (who, step))
                        assert who == newest, "an old life's write was accepted"
                    except LeaseLost:
                        assert who != newest
                case "give up" if who in writers and who == newest:
                    await lease.release()
                    del writers[who]
                    everybody[who] = lives.newcomer()
                case "time":
                    lives.clock.now_s += data.draw(st.sampled_from([0.5, 1.0, 1.9, 30.0]))
                case _:
                    pass
        await lives.plane.close()

    asyncio.run(play())


async def test_the_streams_of_a_name_belong_to_the_run_that_first_had_it() -> None:
    plane = await own_plane()
    await prepare_node_streams(plane, "alpha", create=True)
    await take_name(plane, "alpha", "monday", "nats://here")
    await take_name(plane, "alpha", "monday", "nats://here")
    with pytest.raises(NameTaken, match=r"name alpha is taken: .*nats://here belong to run monday .*node\.id.*--run monday"):
        await take_name(plane, "alpha", "tuesday", "nats://here")


async def test_a_renewal_that_cannot_be_made_is_a_server_that_is_away() -> None:
    lives = await Lives().open()
    first, kv = await lives.holder()
    lives.clock.now_s += LEASE_S
    await lives.plane.close()
    with pytest.raises(NotConnected):
        await kv.put(lives.bucket, "trainer", b"1")
    assert not first.lost.is_set()


async def test_a_folder_has_one_process_at_a_time_and_keeps_its_number(tmp_path: Path) -> None:
    file = tmp_path / "run" / "trainer.lock"
    first = await FolderLock.take(file, who="trainer of alpha", patience_s=0.0)
    with pytest.raises(
        FolderTaken, match=r"another trainer of alpha uses .*run: process \d+ on .* node\.run, node\.id or node\.var_dir"
    ):
        await FolderLock.take(file, who="trainer of alpha", patience_s=0.1)
    first.close()
    second = await FolderLock.take(file, who="trainer of alpha", patience_s=0.0)
    assert second.place == first.place
    second.close()


async def test_a_copied_folder_is_another_place(tmp_path: Path) -> None:
    file, copy = tmp_path / "trainer.lock", tmp_path / "copy.lock"
    first = await FolderLock.take(file, who="trainer", patience_s=0.0)
    copy.write_bytes(file.read_bytes())
    second = await FolderLock.take(copy, who="trainer", patience_s=0.0)
    assert second.place != first.place
    first.close()
    second.close()


@pytest.mark.parametrize("elsewhere", ["boot", "device", "inode"])
async def test_a_disk_that_was_copied_or_moved_or_a_machine_started_anew_is_another_place(tmp_path: Path, elsewhere: str) -> None:
    file = tmp_path / "trainer.lock"
    first = await FolderLock.take(file, who="trainer", patience_s=0.0)
    first.close()
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {elsewhere: "another"}))  # the very same file, number and all, as a copied disk has it
    second = await FolderLock.take(file, who="trainer", patience_s=0.0)
    second.close()
    assert second.place != first.place, "its process may live on the other machine"
    third = await FolderLock.take(file, who="trainer", patience_s=0.0)
    third.close()
    assert third.place == second.place


async def test_where_the_kernel_has_no_number_of_its_start_no_death_is_taken_for_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_BOOT_ID", tmp_path / "none")
    places = set()
    for _ in range(2):
        lock = await FolderLock.take(tmp_path / "trainer.lock", who="trainer", patience_s=0.0)
        places.add(lock.place)
        lock.close()
    assert len(places) == 2


async def test_the_lease_of_a_holder_that_died_with_its_machine_is_had_after_its_time() -> None:
    lives = await Lives().open()
    await lives.holder(place="before")
    after = lives.newcomer("after")
    verdicts = []
    for _ in range(11):
        verdicts.append(await after.look())
        lives.clock.now_s += 1.0
    assert verdicts == ["wait"] * 10 + ["take"]
