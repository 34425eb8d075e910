"""Measures what many nodes cost a swarm's server and the verifiers beside them (docs/capacity.md).

    python -m benchmarks.load 10 100 1000 10000 --into FOLDER        # a record for each number
    python -m benchmarks.load 100 --floods --into FOLDER             # a tenth sends far more
    python -m benchmarks.load --draw experiments/results/capacity    # the figure and the formula

The server and three verifiers are real, each in its own process; the verifiers' streams are on a
server of their own. `benchmarks.crowd` acts as all other nodes. For each of the three, this process
plays generator and sampler: every `STEP_S` it hands on two groups and takes six foreign ones out of
a pool of twelve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.crowd import FLOODING, FOREIGN, LOCAL, Crowd, CrowdReport, GroupMaker, added, crowd_config, crowd_process
from benchmarks.measuring import say
from benchmarks.reading import metric
from benchmarks.waiting import descendants, free_ports
from lab.runs import code_commit
from shared.cancelling import cancel_and_wait
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.messages import ScoredGroup
from shared.contracts.streams import prepare_node_streams
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.integration.running_verifier import until, want
from tests.nats_server import NatsServer

NAMES = ("alpha", "beta", "gamma")
NEWCOMER = "delta"
HONEST_PER_S = 200.0
"""The most groups a second of all honest identities together."""
EACH_PER_S = 0.2
STEP_S = 5.0
POOL = 2 * FOREIGN
POLL_S = 0.05
READY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One measurement. `settle_s`: from the crowd's start to the first interval. `parts`: processes
    of the crowd. `newcomer`: whether a fourth verifier starts in the middle.
    """

    identities: int
    each_per_s: float = EACH_PER_S
    tokens: int = 1024
    floods: bool = False
    settle_s: float = 20.0
    seconds: float = 90.0
    nodes: int = 3
    parts: int = 2
    newcomer: bool = True
    every_s: float = 10.0
    """Between two readings of all counts."""


class Node:
    """A real verifier, with this process as its generator and sampler."""

    def __init__(self, name: str, folder: Path, plane_url: str, hub_url: str, setting: Setting) -> None:
        self.name = name
        self._hub_url, self._plane_url = hub_url, plane_url
        self._folder = folder / name
        self._port = free_ports(4)
        self._maker = GroupMaker(crowd_config(demo=False), setting.tokens, name)
        self._tokens = setting.tokens
        self._next_seq, self._told = 1, -1
        self._due: list[tuple[int, float]] = []
        self.steps = self.used = self.taken = self.from_floods = 0
        self.first_at = self.ready_at = 0.0
        self.waits_s: list[float] = []
        """From each step's deficit until its groups were accepted."""
        self._plane: Transport | None = None
        self.process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        """Run its verifier, which is told to fill the pool."""
        self._folder.mkdir(parents=True)
        (self._folder / "node.toml").write_text(self._toml())
        self._plane = await connect(self._plane_url, name=f"driver-{self.name}")
        await prepare_node_streams(self._plane, self.name, create=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        environment |= {"SWARM_CONFIG": str(self._folder / "node.toml"), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        with (self._folder / "verifier.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.verifier"), env=environment, stdout=log, stderr=asyncio.subprocess.STDOUT
            )
        try:
            yield self
        finally:
            if self.process.returncode is None:
                self.process.terminate()
                await self.process.wait()
            await self._plane.close()

    def _toml(self) -> str:
        """Its configuration: a default sharing step of the crowd's tasks, and one scorer."""
        return f"""
[node]
id = "{self.name}"
run = "load"
var_dir = "{self._folder}"
[nats]
node_url = "{self._plane_url}"
swarm_url = "{self._hub_url}"
[http]
base_port = {self._port}
[generator]
max_new_tokens = {max(16, self._tokens)}
[sampler]
local = {LOCAL}
external = {FOREIGN}
[verifier]
workers = 1
[eval]
tasks = 0
[log]
level = "warning"
[[tasks]]
dataset = "chain_sum"
[[tasks]]
dataset = "gcd"
"""

    async def ready(self) -> None:
        """Wait until its verifier verifies. Raises RuntimeError if it ends."""
        assert self.process is not None
        await until(lambda: self.page() != "" or self.process.returncode is not None, READY_S)
        if self.process.returncode is not None:
            raise RuntimeError(f"{self.name} ended: {(self._folder / 'verifier.log').read_text()[-2000:]}")
        self.ready_at = time.monotonic()

    def page(self) -> str:
        """Its metrics; empty as long as it is not ready."""
        url = f"http://127.0.0.1:{self._port + 1}"
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/readyz", timeout=2.0).close()
            with urllib.request.urlopen(f"{url}/metrics", timeout=2.0) as answer:
                return str(answer.read().decode())
        return ""

    async def drive(self, until_s: float) -> None:
        """Take steps until then, by the monotonic clock."""
        step_at = time.monotonic()
        while (now := time.monotonic()) < until_s:
            if now >= step_at and (self.taken >= POOL or self.used):
                step_at = max(step_at + STEP_S, now)
                await self._step(now)
            await self._look()
            await asyncio.sleep(POLL_S)

    async def _step(self, now_s: float) -> None:
        assert self._plane is not None
        subject, stream = subjects.node_rollouts(self.name), subjects.node_rollouts_stream(self.name)
        for number in range(LOCAL):
            payload = encode(self._maker.group(self.name, self.steps * LOCAL + number, with_tokens=True))
            await self._plane.publish(subject, payload, stream=stream, message_id=content_id(payload))
        self.steps += 1
        self.used += min(FOREIGN, self.taken - self.used)
        self._due.append((self.used + POOL, now_s))

    async def _look(self) -> None:
        """Count what was accepted, and say what the pool lacks."""
        assert self._plane is not None
        for message in await self._plane.read(subjects.node_scored_stream(self.name), self._next_seq, 64):
            self._next_seq = message.seq + 1
            scored = decode(await self._plane.payload(message), ScoredGroup)
            if scored.origin == "external":
                self.first_at = self.first_at or time.monotonic()
                self.taken += 1
                self.from_floods += scored.group.node.startswith("flood-")
        while self._due and self.taken >= self._due[0][0]:
            self.waits_s.append(time.monotonic() - self._due.pop(0)[1])
        wanted = max(0, math.ceil((POOL + self.used - self.taken) / FOREIGN) * FOREIGN)
        if wanted != self._told:
            self._told = wanted
            await want(self._plane, self.name, wanted, self._next_seq - 1)

    def outstanding_s(self) -> list[float]:
        """How long each deficit has lasted that another step found uncovered."""
        return [wait_s for _, at_s in self._due if (wait_s := time.monotonic() - at_s) > STEP_S]

    def figures(self, connections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Its counts so far. connections: the hub's, which tell the bytes that it was sent."""
        assert self.process is not None
        page = self.page()
        rejected = {reason: int(float(count)) for reason, count in re.findall(r'rejected_total\{reason="(\w+)"\} (\S+)', page)}
        pids = [self.process.pid, *descendants(self.process.pid)]
        return {
            "steps": self.steps,
            "cpu_s": round(_cpu_s(self.process.pid, *descendants(self.process.pid)), 2),
            "memory_mb": round(sum(map(_pss_mb, pids)), 1),
            "bytes_in": sum(each["out_bytes"] for each in connections if each.get("name") == f"{self.name}-border"),
            "read": int(metric(page, "swarm_ingest_read_total")),
            "accepted": int(metric(page, "swarm_ingest_accepted_total")),
            "rejected": {reason: count for reason, count in rejected.items() if count},
            "flood_per_s": metric(page, "swarm_ingest_flood_messages_per_second"),
        }

    def told_as_flood(self) -> Counter[str]:
        """Names of senders of whom groups were refused as a flood, of those on record."""
        found = Counter[str]()
        for file in (self._folder / "runs" / "load" / self.name).glob("refused*.jsonl"):
            for line in file.read_text().splitlines():
                with suppress(ValueError):
                    told = json.loads(line)
                    found[told["sender"]] += told["reason"] == "flood"
        return +found


def _cpu_s(*pids: int) -> float:
    """CPU seconds of these processes, and of those of their children that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _pss_mb(pid: int) -> float:
    """Memory of a process in MB, with its part of what it shares with others."""
    with suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        return int(found[1]) / 1000 if found else 0.0
    return 0.0


class Hub:
    """The swarm's server, as the pages say that one for many nodes is configured."""

    def __init__(self, folder: Path) -> None:
        self._monitor = free_ports()
        config = f"http: 127.0.0.1:{self._monitor}\nmax_payload: 8MB\nmax_pending: 96MB"
        self.server = NatsServer(folder, config=config, jetstream="sync_interval: 10s")

    async def figures(self, plane: Transport) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Its counts so far, and its connections."""
        varz, connz = await asyncio.to_thread(lambda: (self._asked("varz"), self._asked("connz?limit=1024")))
        stream = await plane.stream_state(subjects.SWARM_ROLLOUTS)
        told = {name: varz[name] for name in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")}
        memory = {"memory_mb": round(_pss_mb(self.server.pid), 1), "cpu_s": round(_cpu_s(self.server.pid), 2)}
        return {**memory, **told, "messages": stream.last_seq, "stored_bytes": stream.size_bytes}, connz["connections"]

    def _asked(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/{path}", timeout=10.0) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@dataclass(slots=True)
class Record:
    """One measurement, as it is kept. Counts in `intervals` are since the start."""

    setting: dict[str, Any]
    commit: str = ""
    began: str = ""
    machine: str = ""
    intervals: list[dict[str, Any]] = field(default_factory=list)
    crowd: dict[str, Any] = field(default_factory=dict)
    acknowledged: int = 0
    lost: int = 0
    told_as_flood: dict[str, int] = field(default_factory=dict)
    """Of the honest."""
    waits_s: list[float] = field(default_factory=list)
    from_floods: int = 0
    newcomer: dict[str, float] = field(default_factory=dict)
    status: dict[str, float] = field(default_factory=dict)
    """`swarm status --url` after it: seconds, CPU seconds and MB at the peak."""
    summary: dict[str, float] = field(default_factory=dict)


async def measure(setting: Setting, folder: Path) -> Record:
    """Measure once, with all files below `folder`."""
    record = Record(
        asdict(setting), code_commit(), time.strftime("%Y-%m-%d %H:%M"), f"{os.cpu_count()} cores, {platform.machine()}"
    )
    hub, planes = Hub(folder / "hub"), NatsServer(folder / "planes")
    lasts_s = setting.settle_s + setting.seconds
    async with AsyncExitStack() as stack:
        for server in (hub.server, planes):
            await asyncio.to_thread(server.start)
            stack.push_async_callback(asyncio.to_thread, server.stop)
        plane = await connect(hub.server.url, name="observer")
        stack.push_async_callback(plane.close)
        nodes = [Node(name, folder, planes.url, hub.server.url, setting) for name in NAMES[: setting.nodes]]
        for node in nodes:
            await stack.enter_async_context(node.running())
        for node in nodes:
            await node.ready()
        parts = [_part(setting, number, hub.server.url, folder, lasts_s) for number in range(setting.parts)]
        crowd = [await stack.enter_async_context(crowd_process(part)) for part in parts]

        async def has_begun() -> bool:
            return (await plane.stream_state(subjects.SWARM_ROLLOUTS)).messages > 0

        await until(has_begun, READY_S)
        began = time.monotonic()
        work = [node.drive(began + lasts_s) for node in nodes]
        if setting.newcomer:
            newcomer = Node(NEWCOMER, folder, planes.url, hub.server.url, setting)
            work.append(_join(newcomer, began + setting.settle_s + setting.seconds / 2, record))
        driven = asyncio.gather(*work)
        for number in range(int(setting.seconds // setting.every_s) + 1):
            await asyncio.sleep(max(0.0, began + setting.settle_s + number * setting.every_s - time.monotonic()))
            told, connections = await hub.figures(plane)
            of_nodes = {node.name: await asyncio.to_thread(node.figures, connections) for node in nodes}
            at = {"at_s": round(time.monotonic() - began, 1), "load": round(os.getloadavg()[0], 2)}
            record.intervals.append({**at, "hub": told, "nodes": of_nodes})
        await driven
        async with asyncio.timeout(READY_S):
            await asyncio.gather(*(process.wait() for process in crowd))
        counts = await plane.counts(subjects.SWARM_ROLLOUTS, subjects.ALL_ROLLOUTS)
        record.status = await asyncio.to_thread(_status, hub.server.url)
        _finish(record, nodes, added([_read_report(part) for part in parts]), counts)
    return record


def _part(setting: Setting, number: int, url: str, folder: Path, seconds: float) -> Crowd:
    return Crowd(
        url=url,
        identities=setting.identities,
        each_per_s=setting.each_per_s,
        seconds=seconds,
        tokens=setting.tokens,
        floods=setting.floods,
        nodes=True,
        part=number,
        parts=setting.parts,
        report=str(folder / f"crowd-{number}.json"),
    )


def _read_report(part: Crowd) -> CrowdReport:
    return CrowdReport(**json.loads(Path(part.report).read_text()))


def _finish(record: Record, nodes: Sequence[Node], report: CrowdReport, stored: Mapping[str, int]) -> None:
    """Complete the record. stored: messages in the hub's window, by subject."""
    record.acknowledged = sum(report.acknowledged.values())
    record.lost = sum(max(0, sent - stored.get(subjects.rollouts(name), 0)) for name, sent in report.acknowledged.items())
    record.crowd = {name: value for name, value in asdict(report).items() if name not in ("acknowledged", "publish_s")}
    record.crowd["publish_p95_s"] = _at(report.publish_s or [], 0.95)
    record.crowd["senders"] = sum(map(bool, report.acknowledged.values()))
    refused = sum((node.told_as_flood() for node in nodes), Counter[str]())
    record.told_as_flood = {name: count for name, count in refused.items() if not name.startswith("flood-")}
    record.waits_s = [round(wait, 3) for node in nodes for wait in [*node.waits_s, *node.outstanding_s()]]
    record.from_floods = sum(node.from_floods for node in nodes)
    record.summary = summary(record)


async def _join(node: Node, at_s: float, record: Record) -> None:
    """Start a new node then, and record its seconds until it verifies and from then until its first
    foreign group.
    """
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    async with node.running():
        began = time.monotonic()
        await node.ready()
        driving = asyncio.create_task(node.drive(began + READY_S))
        try:
            await until(lambda: node.first_at > 0.0, READY_S)
        finally:
            await cancel_and_wait(driving)
    record.newcomer = {"ready_s": round(node.ready_at - began, 2), "first_group_s": round(node.first_at - node.ready_at, 2)}


def _status(url: str) -> dict[str, float]:
    """Show the swarm to a spectator, and measure what that takes."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm_cli", "status", "--url", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss / 1000, 1),
        "exit_code": process.returncode,
    }


def summary(record: Record) -> dict[str, float]:
    """The figures of a measurement that the page's table and formula are made of."""
    first, last = record.intervals[0], record.intervals[-1]
    seconds = last["at_s"] - first["at_s"]
    hub = {name: (value - first["hub"][name]) / seconds for name, value in last["hub"].items()}
    before, after = first["nodes"], last["nodes"]
    of_nodes = {
        what: sum(after[name][what] - before[name][what] for name in after)
        for what in ("steps", "cpu_s", "bytes_in", "read", "memory_mb")
    }
    steps = max(1, of_nodes["steps"])
    lasted_s = record.setting["settle_s"] + record.setting["seconds"]
    crowd = record.crowd
    return {
        "groups_per_s": hub["messages"],
        "group_bytes": crowd["stored_bytes"] / max(1, record.acknowledged),
        "read_per_group": crowd["read"] / max(1, record.acknowledged),
        "renewals_per_s": crowd["renewed"] / lasted_s,
        "entries_seen_per_s": crowd["seen"] / lasted_s,
        "hub_cores": hub["cpu_s"],
        "hub_in_msgs_per_s": hub["in_msgs"],
        "hub_out_msgs_per_s": hub["out_msgs"],
        "hub_in_mb_per_s": hub["in_bytes"] / 1e6,
        "hub_out_mb_per_s": hub["out_bytes"] / 1e6,
        "hub_memory_mb": max(each["hub"]["memory_mb"] for each in record.intervals),
        "node_cpu_s_per_step": of_nodes["cpu_s"] / steps,
        "node_kb_per_step": of_nodes["bytes_in"] / 1e3 / steps,
        "node_read_per_step": of_nodes["read"] / steps,
        "node_kb_per_read": of_nodes["bytes_in"] / 1e3 / max(1, of_nodes["read"]),
        "node_memory_mb": statistics.mean(node["memory_mb"] for node in last["nodes"].values()),
        "node_memory_growth_mb": of_nodes["memory_mb"] / len(after),
        "wait_p50_s": _at(sorted(record.waits_s), 0.5),
        "wait_p95_s": _at(sorted(record.waits_s), 0.95),
        "load_average": statistics.mean(each["load"] for each in record.intervals),
    }  # fmt: skip


def _at(values: Sequence[float], part: float) -> float:
    """The value below which this part of the sorted values is; NaN of none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else math.nan


# The formula and the figure.


def fitted(records: Sequence[Record]) -> list[float]:
    """Fit the hub's cores = a * groups a second + b * MB a second in and out + c * nodes + d: least
    squares, without terms that would be negative.
    """
    import numpy as np

    terms = np.array([_terms(each) for each in records])
    cores = np.array([each.summary["hub_cores"] for each in records])
    kept = list(range(terms.shape[1]))
    while True:
        found = np.linalg.lstsq(terms[:, kept], cores, rcond=None)[0]
        if (found >= 0.0).all():
            return [float(found[kept.index(term)]) if term in kept else 0.0 for term in range(terms.shape[1])]
        kept.remove(kept[int(found.argmin())])


def _terms(record: Record) -> list[float]:
    found = record.summary
    nodes = record.setting["identities"] + record.setting["nodes"]
    return [found["groups_per_s"], found["hub_in_mb_per_s"] + found["hub_out_mb_per_s"], float(nodes), 1.0]


def draw(records: Sequence[Record], target: Path) -> None:
    """Draw the hub's cores as measured and by the formula, and what a node's step costs it."""
    from matplotlib import pyplot

    honest = sorted((each for each in records if not each.setting["floods"]), key=lambda each: int(each.setting["identities"]))
    whole = [each for each in honest if each.setting["tokens"] == 1024]
    factors, sizes = fitted(honest), [each.setting["identities"] for each in whole]
    by_formula = [sum(f * term for f, term in zip(factors, _terms(each), strict=True)) for each in whole]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 2.6), layout="constrained")
    left.plot(sizes, [each.summary["hub_cores"] for each in whole], "o", label="measured")
    left.plot(sizes, by_formula, "-", label="formula")
    left.set(xscale="log", yscale="log", xlabel="identities", ylabel="cores of the hub")
    left.legend(frameon=False)
    for name, label in (("node_cpu_s_per_step", "CPU a step"), ("node_memory_mb", "memory"), ("node_kb_per_read", "bytes a group")):
        values = [each.summary[name] for each in whole]
        right.plot(sizes, [value / values[0] for value in values], "o-", label=label)
    right.set(xscale="log", ylim=(0, None), xlabel="identities", ylabel="over that beside 10")
    right.legend(frameon=False)
    figure.savefig(target, dpi=100)


def read_records(folder: Path) -> list[Record]:
    """The records in a folder, by the names of their files, each summed up anew."""
    found = [Record(**json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return [replace(each, summary=summary(each)) for each in found]


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("identities", nargs="*", type=int)
    parser.add_argument("--tokens", type=int, default=1024, help="of an answer")
    parser.add_argument("--each-per-s", type=float, default=EACH_PER_S, help="groups a second of each, if all make at most 200")
    parser.add_argument("--floods", action="store_true", help=f"one in {FLOODING} sends a hundred times as much")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rounds", type=int, default=1, help="times to measure all, in turns")
    parser.add_argument("--into", type=Path, default=Path("var/capacity"))
    parser.add_argument("--draw", type=Path, help="draw docs/images/capacity.png of the records in this folder")
    given = parser.parse_args()
    if given.draw:
        records = read_records(given.draw)
        draw(records, Path("docs/images/capacity.png"))
        print(json.dumps(fitted([each for each in records if not each.setting["floods"]])))
        return
    given.into.mkdir(parents=True, exist_ok=True)
    for turn in range(given.rounds):
        for identities in given.identities:
            each_per_s = min(given.each_per_s, HONEST_PER_S / identities)
            setting = Setting(
                identities=identities, each_per_s=each_per_s, tokens=given.tokens, floods=given.floods, seconds=given.seconds
            )
            with tempfile.TemporaryDirectory(dir="var") as folder:
                record = asyncio.run(measure(setting, Path(folder).absolute()))
            name = f"{identities:05d}-{given.tokens}{'-flood' if given.floods else ''}-{turn}"
            (given.into / f"{name}.json").write_text(json.dumps(asdict(record), indent=1) + "\n")
            figures = {name: float(f"{value:.3g}") for name, value in record.summary.items()}
            told = {"lost": record.lost, "told as a flood": sum(record.told_as_flood.values())}
            say(f"{name}: {json.dumps({**told, **record.newcomer, **record.status, **figures})}")


if __name__ == "__main__":
    main()
