"""A node's own report, read from its key-value bucket into one plain value that the progress view
and `status` show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts import subjects
from shared.contracts.codec import decode
from shared.contracts.control import EvalReport, PolicyPointer, ServiceStatus, TrainerPosition
from shared.contracts.lease import LeaseRecord
from shared.contracts.status_figures import FamilyFigure, StatusFigure
from shared.contracts.wire import MessageError
from shared.lease.errors import NameTaken
from shared.lease.name import name_owner
from shared.roles import ROLES
from shared.runtime.status import STOPPED, is_alive
from shared.transport.base import KvEntry, NotConnected, Transport, TransportError

STATUS_PREFIX = "status."
LOADING_S = 600.0
"""How long a process of a node that was just started may load before it counts as silent."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's data from its bucket. None: not written yet."""

    node: str
    statuses: tuple[ServiceStatus, ...] = ()
    position: TrainerPosition | None = None
    policy: PolicyPointer | None = None
    evaluation: EvalReport | None = None
    unreadable: tuple[str, ...] = field(default=())
    run: str = ""
    """The run that the node's name and streams belong to; empty if it is not known."""
    begun: float = 0.0
    """When the run was last started, if it is this machine's; else 0. What was reported before is
    of an earlier start.
    """
    recorded_version: int = 0
    """Of an ended run: the newest version on record."""
    leases: tuple[tuple[LeaseRecord, float], ...] = ()
    """Leases of the processes that hold the node's name, one per role or replica, each with the
    time at which the server last stored it (Unix time).
    """

    def held(self, now: float) -> list[LeaseRecord]:
        """The leases in force: recently renewed and not released."""
        return [lease for lease, stored_at in self.leases if not lease.released and now - stored_at <= 2 * lease.lease_s]

    def held_on(self, here: str, now: float, *, claimed: bool) -> list[str]:
        """The machines other than `here` that hold the node's name although it is wanted twice, as
        `HOST (run RUN)`. A node may be spread over machines, as in a cluster: its name is wanted
        twice if its processes are of several runs, or if it is `claimed` here (this machine has a
        node of that name) and none of them is here.
        """
        held = self.held(now)
        several = len({lease.run for lease in held}) > 1
        if not several and (not claimed or any(lease.host == here for lease in held)):
            return []
        others = {(lease.host, lease.run) for lease in held if lease.host != here}
        return [f"{host} (run {run})" for host, run in sorted(others)]

    def left_by_another_run(self, run: str, now: float) -> bool:
        """Whether the node belongs to another run than `run` ("": not known) and is not running."""
        return bool(run and self.run and self.run != run) and not any(self.alive(role, now) for role in ROLES)

    @property
    def step(self) -> int:
        """Steps taken, as far as the trainer has reported."""
        written = self.position.policy_version if self.position else 0
        return max(written, int(self.figure("trainer", StatusFigure.STEP)))

    @property
    def version(self) -> int:
        """Version of the newest published policy."""
        return self.policy.version if self.policy else self.recorded_version

    def roles(self, role: str) -> list[ServiceStatus]:
        """Statuses of all replicas of a role, the newest first, including processes that
        are gone.
        """
        return sorted((s for s in self.statuses if s.role == role), key=lambda s: -s.updated_at)

    def alive(self, role: str, now: float) -> list[ServiceStatus]:
        """Statuses of the replicas that are alive."""
        return [status for status in self.roles(role) if is_alive(status, now)]

    def ended(self, now: float) -> bool:
        """Whether the node has run, and all its processes ended in order."""
        newest = [self.roles(role)[0] for role in ROLES if self.roles(role)]
        nobody = not any(self.alive(role, now) for role in ROLES)
        begins = any(self.starting(role, now) for role in ROLES)
        return nobody and not begins and bool(newest) and all(status.state == STOPPED for status in newest)

    def starting(self, role: str, now: float) -> bool:
        """Whether the role has not reported since the node was started, and that is not long ago:
        it is not there yet, where one that has reported since and is silent now is gone.
        """
        if not self.roles(role) and self.step > 0:
            return False  # steps were taken, so it has been there, or is not coming
        lives = [status.started_at for each in ROLES for status in self.alive(each, now)]
        began = self.begun or min(lives, default=0.0)
        reported = max((status.updated_at for status in self.roles(role)), default=0.0)
        return not self.alive(role, now) and reported < began and now - began <= LOADING_S

    @property
    def life_began(self) -> float:
        """When the node was last started, after none of its processes had been running; 0 if none
        has ever reported.
        """
        began = 0.0
        until = 0.0
        for status in sorted(self.statuses, key=lambda status: status.started_at):
            if status.started_at > until:
                began = status.started_at
            until = max(until, status.updated_at)
        return began

    def total(self, role: str, figure: StatusFigure | FamilyFigure, since: float = 0.0) -> float:
        """Sum of a counter over all replicas that have reported in the node's current life and
        since `since` (Unix time). So the restart of a process does not lower it, and after a start
        of the whole node nothing is left of its last life.
        """
        begun = max(since, self.life_began)
        return sum(status.figures.get(figure, 0.0) for status in self.roles(role) if status.updated_at >= begun)

    def figure(self, role: str, figure: StatusFigure | FamilyFigure) -> float:
        """Newest value of a gauge; 0 if it was never reported."""
        return self.newest(role, figure) or 0.0

    def newest(self, role: str, figure: StatusFigure | FamilyFigure) -> float | None:
        """Newest value of a gauge; None if it was never reported."""
        return next((status.figures[figure] for status in self.roles(role) if figure in status.figures), None)


def node_view(node: str, entries: Iterable[KvEntry], run: str = "") -> NodeView:
    """Decode a bucket's entries. Unrelated keys are skipped; a value that does not decode is listed
    in `unreadable`. run: that the node's streams belong to; empty if it is not known.
    """
    statuses: list[ServiceStatus] = []
    position: TrainerPosition | None = None
    policy: PolicyPointer | None = None
    evaluation: EvalReport | None = None
    unreadable: list[str] = []
    leases: list[tuple[LeaseRecord, float]] = []
    for entry in entries:
        try:
            if entry.key.startswith(STATUS_PREFIX):
                statuses.append(_own_status(node, entry))
            elif entry.key.startswith(subjects.LEASE_PREFIX):
                leases.append((decode(entry.value, LeaseRecord), entry.stored_at))
            elif entry.key == subjects.TRAINER_KEY:
                position = decode(entry.value, TrainerPosition)
            elif entry.key == subjects.POLICY_KEY:
                policy = decode(entry.value, PolicyPointer)
            elif entry.key == subjects.EVAL_KEY:
                evaluation = _own_report(node, entry)
        except MessageError:
            unreadable.append(entry.key)
    return NodeView(node, tuple(statuses), position, policy, evaluation, tuple(unreadable), run=run, leases=tuple(leases))


def _own_status(node: str, entry: KvEntry) -> ServiceStatus:
    """The status under a key. Each role may write only its own keys, so a status about another
    process is refused.
    """
    status = decode(entry.value, ServiceStatus)
    if status.node != node or entry.key != subjects.status_key(status.role, status.replica):
        raise MessageError("malformed", f"the status under {entry.key} is about {status.node}'s {status.role} {status.replica}")
    return status


def _own_report(node: str, entry: KvEntry) -> EvalReport:
    report = decode(entry.value, EvalReport)
    if report.node != node:
        raise MessageError("malformed", f"the evaluation under {entry.key} is about {report.node}")
    return report


async def run_of(transport: Transport, node: str) -> str:
    """The run that the node's streams on this server belong to; empty if it is not known."""
    try:
        owner = await name_owner(transport, node)
    except (TransportError, NameTaken):
        return ""
    return "" if owner is None else owner.run


async def gather(transport: Transport, nodes: Sequence[str]) -> list[NodeView]:
    """Read every node's bucket; a node without a bucket has an empty view.

    Raises:
        NotConnected: the server does not answer.
    """
    views = []
    for node in nodes:
        try:
            entries = await transport.kv.all(subjects.node_bucket(node))
        except NotConnected:
            raise
        except TransportError:
            entries = []
        views.append(node_view(node, entries, await run_of(transport, node) if entries else ""))
    return views
