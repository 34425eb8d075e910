"""One node of real processes through kills, a dying server, a swarm that goes away and slow
consumers; then the accounts.

The tests run in the order of this file on one node, because what counts is the accounts after all
of it: every group that was acknowledged to the generator scored once, every batch trained once, and
the same weights as a trainer that nobody disturbed.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from services.verifier.sharing import MAX_BYTES
from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.control import ServiceStatus
from shared.transport.connect import connect
from tests.chaos.conftest import Wounded, prepare
from tests.chaos.figures import Row, note
from tests.chaos.observer import resident_bytes
from tests.chaos.scale import SCALE
from tests.chaos.servers import ShippedServer
from tests.e2e.processes import REPO, ROLES, NodeProcesses, wait_until
from tests.integration.trainer_life import final_state

BACK_S = 15.0
"""Promise: after a restart of the server every service is back within this."""
KILLED_BACK_S = 90.0
"""A killed service has to import torch and load a model on a busy machine; a deadline, not a
promise.
"""
GOES_ON_S = 120.0
FED_BATCHES = 1000


def newest_status(wounded: Wounded, role: str, good: Callable[[ServiceStatus], bool], timeout_s: float) -> float:
    """Seconds until a role says of itself what `good` wants."""
    started = time.monotonic()

    def there() -> bool:
        status = wounded.observer.status(role)
        return status is not None and good(status)

    wait_until(there, wounded.node, timeout_s=timeout_s, what=f"news from the {role}")
    return time.monotonic() - started


class Comebacks:
    """Killed services on their way back, and how long each took. One that is killed again meanwhile
    starts anew, uncounted.
    """

    def __init__(self, wounded: Wounded) -> None:
        self._wounded = wounded
        self._awaited: dict[str, tuple[int, float]] = {}
        self.seconds: dict[str, list[float]] = {role: [] for role in ROLES}
        self.at_work = Counter[str]()
        """Kills of a process that was at work; the others hit one that was starting."""

    def kill(self, role: str) -> None:
        """kill -9, and start again at once, as a supervisor would."""
        self.at_work[role] += role not in self._awaited
        self._wounded.node.kill(role)
        killed = time.monotonic()
        self._wounded.node.start(role)
        self._awaited[role] = (self._wounded.node.processes[role].pid, killed)

    def all_back(self, *roles: str) -> bool:
        """Look who is at work again."""
        for role, (pid, killed) in list(self._awaited.items()):
            status = self._wounded.observer.status(role)
            if status is not None and status.pid == pid:
                self.seconds[role].append(time.monotonic() - killed)
                del self._awaited[role]
        return not any(role in self._awaited for role in roles or ROLES)


def test_each_service_killed_at_random_instants_comes_back_and_the_node_goes_on(wounded: Wounded) -> None:
    rng, comebacks = random.Random(3), Comebacks(wounded)
    kills = [role for role in ROLES for _ in range(SCALE.service_kills)]
    rng.shuffle(kills)
    for role in kills:
        ends = time.monotonic() + rng.uniform(0.0, 2.0)
        while time.monotonic() < ends:
            comebacks.all_back()
            time.sleep(0.1)
        step = wounded.step
        comebacks.kill(role)
        # Sometimes others are killed while this one still starts, sometimes all is well again in
        # between.
        if SCALE.name == "full" and rng.random() < 0.15:
            wait_until(comebacks.all_back, wounded.node, timeout_s=KILLED_BACK_S, what="all services at work")
            wounded.until_step(step + 2, GOES_ON_S)
    wait_until(comebacks.all_back, wounded.node, timeout_s=KILLED_BACK_S, what="all services at work")
    wounded.until_step(wounded.step + 2, GOES_ON_S)
    for role in ROLES:
        note(
            Row(
                fault=f"kill -9 of the {role}",
                injected=SCALE.service_kills,
                recovery_s=comebacks.seconds[role],
                remark=f"{comebacks.at_work[role]} hit it at work, others while it started; recovery: until the new process works, "
                "imports and model included",
            )
        )


def test_the_server_killed_under_load_every_service_is_back_within_seconds(wounded: Wounded) -> None:
    rng, back_s, steps_s = random.Random(4), [], []
    for _ in range(SCALE.server_kills):
        time.sleep(rng.uniform(0.0, 2.0))
        step = wounded.step
        wounded.server.kill()
        time.sleep(rng.uniform(0.0, 1.0))
        wounded.server.start()
        started, up = time.monotonic(), time.time()
        for role in ROLES:
            newest_status(wounded, role, lambda status, up=up: status.updated_at > up, BACK_S)  # type: ignore[misc]
        back_s.append(time.monotonic() - started)
        wounded.until_step(step + 2, GOES_ON_S)
        steps_s.append(time.monotonic() - started)
    assert max(back_s) <= BACK_S
    note(
        Row(
            fault="kill -9 and restart of the node's server under load (`swarm up`'s nats.conf)",
            injected=SCALE.server_kills,
            recovery_s=back_s,
            remark=f"recovery: until all four services work with it again; two steps later after {max(steps_s):.1f} s at worst",
        )
    )


def test_with_the_swarm_plane_away_the_node_trains_alone_and_shares_again_afterwards(wounded: Wounded) -> None:
    def figure(name: str) -> float:
        status = wounded.observer.status("verifier")
        return status.figures.get(name, 0.0) if status else 0.0

    pid = wounded.node.processes["verifier"].pid
    before_step, before_bytes = wounded.step, resident_bytes(pid)
    wounded.swarm_server.kill()
    newest_status(wounded, "verifier", lambda status: status.figures.get("swarm_connected") == 0.0, 15.0)
    shared_before, largest_bytes, ends = figure("shared"), 0, time.monotonic() + SCALE.swarm_away_s
    while time.monotonic() < ends:
        time.sleep(1.0)
        largest_bytes = max(largest_bytes, resident_bytes(pid))
    alone = wounded.step - before_step
    assert wounded.node.processes["verifier"].pid == pid
    assert alone >= 2, "the node did not train while the swarm plane was away"
    wounded.swarm_server.start()
    started = time.monotonic()
    wait_until(lambda: figure("shared") > shared_before, wounded.node, timeout_s=120, what="local groups shared again")
    back_s = time.monotonic() - started
    external = sum(line["groups_external"] for line in wounded.node.steps())
    wait_until(
        lambda: sum(line["groups_external"] for line in wounded.node.steps()) > external,
        wounded.node,
        timeout_s=60.0,
        what="a step on foreign groups",
    )
    grown_bytes = largest_bytes - before_bytes
    assert grown_bytes < MAX_BYTES + 64 * 2**20
    note(
        Row(
            fault=f"swarm plane away for {SCALE.swarm_away_s:.0f} s",
            injected=1,
            counted="steps trained alone",
            sent=alone,
            recovery_s=[back_s],
            remark=f"recovery: until local groups are shared again; the verifier's memory grew by {grown_bytes / 2**20:.0f} MB"
            f" and {figure('shares_dropped'):.0f} shares were dropped from its full outbox, oldest first",
        )
    )


def test_a_frozen_service_holds_the_node_back_and_loses_nothing(wounded: Wounded) -> None:
    """A slow consumer at its slowest: the process is stopped in the middle of whatever it does, and
    goes on later.
    """
    back_s = []
    for role in ROLES:
        process = wounded.node.processes[role]
        process.send_signal(signal.SIGSTOP)
        time.sleep(SCALE.frozen_s)
        process.send_signal(signal.SIGCONT)
        started = time.monotonic()
        wounded.until_step(wounded.step + 2, GOES_ON_S)
        back_s.append(time.monotonic() - started)
    note(
        Row(
            fault=f"slow consumer: a service stopped for {SCALE.frozen_s:.0f} s, each role in turn",
            injected=len(ROLES),
            recovery_s=back_s,
            remark="recovery: until two more steps are trained",
        )
    )


def test_afterwards_every_acknowledged_group_was_scored_once_and_every_batch_trained_once(wounded: Wounded, tmp_path: Path) -> None:
    node, observer = wounded.node, wounded.observer
    assert node.stop("generator") == 0
    wait_until(lambda: observer.queued() == 0, timeout_s=120, what="an empty queue of local groups")
    wait_until(observer.caught_up, timeout_s=120, what="all of both logs read")
    assert node.stop("sampler") == 0
    wait_until(observer.caught_up, timeout_s=120, what="all of both logs read")
    batches = observer.numbered_batches()
    last = f"batch {batches[-1].number}, the last of {len(batches)} in the log up to {max(observer.batches)}, trained"
    wait_until(lambda: wounded.step >= len(batches), timeout_s=GOES_ON_S, what=last)
    assert node.stop("trainer") == 0
    assert node.stop("verifier") == 0
    for kept in (observer.scored, observer.batches):
        assert sorted(kept) == list(range(1, len(kept) + 1)), "the observer missed something"
    scored = [group for _, group in sorted(observer.scored.items())]
    local, external = ([group for group in scored if group.origin == origin] for origin in ("local", "external"))
    groups = Counter(group.group_id for group in scored)
    draws = Counter(group.group.draw for group in local)
    used = Counter(item.scored.group_id for batch in batches for item in batch.items if not item.replayed)
    steps = Counter(int(line["step"]) for line in node.steps())
    ledger = observer.ledger()
    half_made = {draw for lease in ledger.leases for draw in range(lease.first, lease.first + lease.count)}
    missing = {draw for draw in range(ledger.next_draw) if draw not in draws} - half_made
    lost = len(missing) + len(observer.acknowledged_groups - groups.keys())
    duplicated = sum(count - 1 for count in [*groups.values(), *draws.values(), *used.values(), *steps.values()])
    note(
        Row(
            fault="accounts after all faults of one node: local groups",
            injected=4 * SCALE.service_kills + SCALE.server_kills + 1 + len(ROLES),
            counted="groups stored in the queue",
            sent=observer.stored_groups(),
            lost=lost,
            duplicated=duplicated,
            remark=f"acknowledgements heard on the wire: {len(observer.acknowledged_groups)}; "
            f"publishes seen: {observer.publishes}; given up: {sum(bool(group.failure) for group in local)}; "
            f"foreign groups scored: {len(external)} of {len(wounded.peer.acknowledged)} sent (not promised), none twice",
        )
    )
    assert lost == duplicated == 0
    assert observer.stored_groups() == len(local)
    assert len(observer.acknowledged_groups) > 0
    assert {group.group_id for group in external} <= wounded.peer.offered, "a lie got in"
    assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
    assert sorted(steps) == list(range(1, len(batches) + 1))
    assert all(item.staleness is None or item.replayed or item.staleness <= 1 for batch in batches for item in batch.items)
    weights = _weights(wounded.config, node.run_dir)
    undisturbed = _train_undisturbed(wounded, tmp_path)
    same = weights == undisturbed
    updated = sum(bool(line["updated"]) for line in node.steps())
    note(
        Row(
            fault="accounts after all faults of one node: batches and weights",
            injected=SCALE.service_kills,
            counted="batches trained",
            sent=len(batches),
            lost=len(batches) - len(steps),
            duplicated=sum(count - 1 for count in steps.values()),
            remark=f"{updated} of them changed weights; the last checkpoint's {len(weights)} tensors and numbers, optimizer and "
            f"random state included, {'are all' if same else 'are NOT'} bit for bit those of a trainer that nobody disturbed",
        )
    )
    assert updated > 0
    assert same, sorted(name for name in weights if weights[name] != undisturbed.get(name))[:10]


def _weights(config: Path, run_dir: Path) -> dict[str, str]:
    var_dir = run_dir.parents[2]
    loaded = load_config(config, overrides={"node": {"id": "alpha", "run": run_dir.parent.name, "var_dir": str(var_dir)}})
    return {name: digest for name, digest in final_state(loaded).items() if name != "position"}


def _train_undisturbed(wounded: Wounded, folder: Path) -> dict[str, str]:
    """The same batch log, a fresh server, one trainer from beginning to end."""
    server = ShippedServer(folder / "nats").start()
    prepare(server.url, swarm=False)
    environment = {
        "SWARM_NATS__NODE_URL": server.url,
        "SWARM_NATS__SWARM_URL": "none",
        "SWARM_SAMPLER__EXTERNAL": "0",
        "SWARM_MODEL__PATH": str(REPO / "models" / "base"),
    }
    node = NodeProcesses("alpha", "chaos", folder, environment, wounded.config)
    payloads = [wounded.observer.batches[seq] for seq in sorted(wounded.observer.batches)]

    async def append(first: int, last: int) -> None:
        transport = await connect(server.url, name="copy")
        subject, stream = subjects.node_batches("alpha"), subjects.node_batches_stream("alpha")
        for number in range(first, last + 1):
            await transport.publish(subject, payloads[number - 1], stream=stream, message_id=f"batch-{number}")
        await transport.close()

    try:
        node.start("trainer")
        # The log forgets beyond 2,000 batches, so that a long one is fed as the trainer goes along.
        for first in range(1, len(payloads) + 1, FED_BATCHES):
            last = min(first + FED_BATCHES - 1, len(payloads))
            wounded.observer.call(append(first, last), 120.0)
            wait_until(lambda last=last: len(node.steps()) >= last, node, timeout_s=600.0, what=f"batch {last} trained")  # type: ignore[misc]
        assert node.stop("trainer") == 0
        return _weights(wounded.config, node.run_dir)
    finally:
        node.kill_all()
        server.kill()
