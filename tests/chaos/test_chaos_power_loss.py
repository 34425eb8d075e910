"""Power loss: what the server had not made durable is gone, and what it had acknowledged must still
be there.

kill -9 proves nothing here, since the page cache outlives a process. Instead strace records every
write, fsync and O_SYNC open of the server. After the kill each file of its store is cut back to
what was durable at that instant; files that were never synced go. Streams' message files only grow,
so that cutting at the last durable byte is what a disk would hold at worst. Not simulated: a lost
directory entry of a synced file, reordering inside one file, and disks that lie about a flush.

The control, the same cut with the server's default `sync_interval`, must lose messages, or the cut
is none.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.cancelling import cancel_and_wait
from shared.contracts import subjects
from shared.contracts.streams import ensure_node_streams
from shared.transport.connect import connect
from tests.chaos.figures import Row, note
from tests.chaos.publishing import Load, load_stream, lost_and_duplicated, stored_ids
from tests.chaos.scale import SCALE
from tests.chaos.servers import ShippedServer
from tests.full_disk import strace_works
from tests.nats_server import NatsServer

PUBLISH_S = 1.5
CALLS = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
STRACE = ["strace", "-f", "-q", "-y", "-s", "0", "-e", f"trace={CALLS}"]
_PID = re.compile(r"^(\d+) +(.*)$")
_FD = re.compile(r"^\w+\((\d+)<([^>]*)>")
_OPENED = re.compile(r'^openat\([^,]*, "(?P<path>[^"]*)", (?P<flags>[A-Z_|]+).*\) = (?P<fd>\d+)<(?P<real>[^>]*)>')
_PWRITE = re.compile(r"^pwrite64\(\d+<([^>]*)>, .*, (\d+), (\d+)\) = (\d+)$")
_RENAMED = re.compile(r'^rename\w*\((?:[^"]*)"([^"]*)",[^"]*"([^"]*)".*\) = 0')


class Durable:
    """Replays a strace log: how many bytes of each file a power cut would leave."""

    def __init__(self, store: Path) -> None:
        self._store = str(store.resolve())
        self.size_bytes: dict[str, int] = defaultdict(int)
        self.syncs = 0
        self._written: dict[str, int] = defaultdict(int)
        self._synchronous: dict[str, bool] = {}
        self._unfinished: dict[str, str] = {}
        self._at_sync: dict[str, int] = {}
        """By thread: what a sync under way is sure to cover."""

    def replay(self, log: str) -> Durable:
        """Take in the whole log."""
        for line in log.splitlines():
            found = _PID.match(line)
            if found is None:
                continue
            pid, call = found.groups()
            if call.endswith("<unfinished ...>"):
                self._unfinished[pid] = call.removesuffix("<unfinished ...>").rstrip()
                self._started(pid, call)
            elif call.startswith("<... "):
                call = self._unfinished.pop(pid, "") + call.partition("resumed>")[2]
                self._finished(pid, re.sub(r"\)\s+= ", ") = ", call))
            else:
                self._finished(pid, re.sub(r"\)\s+= ", ") = ", call))
        return self

    def _started(self, pid: str, call: str) -> None:
        # What is written while a sync runs may miss it.
        if call.startswith(("fsync", "fdatasync")) and (fd := _FD.match(call)):
            self._at_sync[pid] = self._written[fd.group(2)]

    def _finished(self, pid: str, call: str) -> None:
        if opened := _OPENED.match(call):
            real = opened["real"]
            if real.startswith(self._store):
                self._synchronous[real] = "SYNC" in opened["flags"]
                if "O_TRUNC" in opened["flags"]:
                    self._written[real] = 0
        elif written := _PWRITE.match(call):
            path, _, offset, count = written.groups()
            self._note(path, int(offset) + int(count))
        elif call.startswith("write(") and (fd := _FD.match(call)) and call.rpartition(" = ")[2].isdigit():
            path = fd.group(2)
            if path.startswith(self._store):
                self._note(path, self._written[path] + int(call.rpartition(" = ")[2]))
        elif call.startswith(("fsync", "fdatasync")) and (fd := _FD.match(call)) and call.endswith(" = 0"):
            path = fd.group(2)
            if path.startswith(self._store):
                self.syncs += 1
                self.size_bytes[path] = max(self.size_bytes[path], self._at_sync.pop(pid, self._written[path]))
        elif renamed := _RENAMED.match(call):
            source, target = renamed.groups()
            for sizes in (self.size_bytes, self._written):
                if source in sizes:
                    sizes[target] = sizes.pop(source)

    def _note(self, path: str, end: int) -> None:
        if not path.startswith(self._store):
            return
        self._written[path] = max(self._written[path], end)
        if self._synchronous.get(path):
            self.syncs += 1
            self.size_bytes[path] = self._written[path]

    def cut(self) -> int:
        """Leave in the store what was durable; returns how many bytes that takes away."""
        gone = 0
        for file in Path(self._store).rglob("*"):
            if file.is_file():
                size, kept = file.stat().st_size, self.size_bytes.get(str(file), 0)
                gone += max(0, size - kept)
                if kept == 0:
                    file.unlink()
                elif kept < size:
                    with file.open("r+b") as stream:
                        stream.truncate(kept)
        return gone


def start_traced(server: NatsServer, log: Path) -> subprocess.Popen[bytes]:
    """Start the server and let strace follow it from its first system call that matters to the
    streams made later.
    """
    server.start()
    tracer = subprocess.Popen([*STRACE, "-o", str(log), "-p", str(server.pid)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    status = Path(f"/proc/{server.pid}/status")
    while "TracerPid:\t0" in status.read_text():
        assert time.monotonic() < deadline, "strace did not attach"
        time.sleep(0.02)
    return tracer


async def publish_until_the_cut(server: NatsServer) -> tuple[list[str], bytes, bytes]:
    """Load on a stream while the policy pointer changes, then kill -9 in the middle of it.

    Returns what was acknowledged, the pointer's last acknowledged value, and the one that was being
    written.
    """
    transport = await connect(server.url, name="power")
    await ensure_node_streams(transport, "alpha")
    await transport.ensure_stream(load_stream())
    loads = [Load(transport, f"p{number}", 3000) for number in range(4)]
    running = [asyncio.create_task(load.run()) for load in loads]
    kept, written, ends = b"", b"", time.monotonic() + PUBLISH_S
    while time.monotonic() < ends:
        written = f"position {len(loads[0].acknowledged)}".encode()
        await transport.kv.put(subjects.node_bucket("alpha"), subjects.POLICY_KEY, written)
        kept = written
    written = b"the one under way"
    last = asyncio.create_task(transport.kv.put(subjects.node_bucket("alpha"), subjects.POLICY_KEY, written))
    await asyncio.sleep(0)
    server.kill()
    await cancel_and_wait(*running, last)
    await transport.close()
    return [message_id for load in loads for message_id in load.acknowledged], kept, written


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a power cut left."""

    sent: int
    lost: int
    duplicated: int
    pointer_kept: bool
    cut_bytes: int


def power_cut(server: NatsServer, log: Path) -> Outcome:
    """Publish, cut the power, start again, look."""
    tracer = start_traced(server, log)
    acknowledged, kept, written = asyncio.run(publish_until_the_cut(server))
    tracer.wait(20)
    cut_bytes = Durable(server.folder / "store").replay(log.read_text(errors="replace")).cut()
    server.start()

    async def look() -> Outcome:
        transport = await connect(server.url, name="power")
        try:
            lost, duplicated = lost_and_duplicated(acknowledged, await stored_ids(transport))
            entry = await transport.kv.get(subjects.node_bucket("alpha"), subjects.POLICY_KEY)
            pointer_kept = entry is not None and entry.value in (kept, written)
            return Outcome(len(acknowledged), lost, duplicated, pointer_kept, cut_bytes)
        finally:
            await transport.close()

    try:
        return asyncio.run(look())
    finally:
        server.kill()


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace is missing or may not trace here")


@needs_strace
def test_a_power_cut_takes_nothing_that_the_shipped_server_acknowledged(tmp_path: Path) -> None:
    outcomes = [power_cut(ShippedServer(tmp_path / f"n{cut}"), tmp_path / f"trace-{cut}") for cut in range(SCALE.power_cuts)]
    note(
        Row(
            fault="power cut, `swarm up`'s nats.conf (sync_interval: always)",
            injected=len(outcomes),
            counted="messages published",
            sent=sum(each.sent for each in outcomes),
            lost=sum(each.lost for each in outcomes),
            duplicated=sum(each.duplicated for each in outcomes),
            remark=f"bytes that were not durable yet: {sum(each.cut_bytes for each in outcomes):,}; policy pointers lost: "
            f"{sum(not each.pointer_kept for each in outcomes)}",
        )
    )
    for each in outcomes:
        assert each.sent > 20
        assert (each.lost, each.duplicated, each.pointer_kept) == (0, 0, True)


@needs_strace
def test_the_same_power_cut_with_the_servers_default_loses_messages(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "n", jetstream="sync_interval: 2m")
    tracer = start_traced(server, tmp_path / "trace")
    sent = len(asyncio.run(publish_until_the_cut(server))[0])
    tracer.wait(20)
    durable = Durable(server.folder / "store").replay((tmp_path / "trace").read_text(errors="replace"))
    blocks = [file for file in (server.folder / "store").rglob("*.blk") if file.parts[-3] == "CHAOS_LOAD"]
    stored_bytes = sum(file.stat().st_size for file in blocks)
    gone_bytes = sum(file.stat().st_size - durable.size_bytes.get(str(file), 0) for file in blocks)
    lost = round(sent * gone_bytes / stored_bytes)
    note(
        Row(
            fault="power cut, the server's default (sync_interval: 2m), as control",
            injected=1,
            counted="messages published",
            sent=sent,
            lost=lost,
            remark="lost: messages published times the share of their bytes that was not durable",
        )
    )
    assert sent > 100
    assert lost > sent // 2
