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
from shared.contracts.status_figures import FamilyFigure, FigureFamily, StatusFigure
from shared.contracts.wire import MessageError
from shared.lease.name import NameTaken, name_owner
from shared.rewards import CAUSES
from shared.roles import ROLES, Role
from shared.runtime.pace import late_after_s
from shared.runtime.status import STARTING, STATUS_INTERVAL_S, STOPPED, is_alive
from shared.transport.base import KvEntry, NotConnected, Transport, TransportError
from swarm_cli.observe.run_files import NO_PASS_SHOWN

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


FIRST_WORK_S = 600.0
"""Before the first step the model is loaded and the base policy is evaluated."""
QUIET_S = 5 * STATUS_INTERVAL_S
"""A process that is silent this long is reported, long before it counts as gone (`SILENT_S`)."""

START_AGAIN_S = 60.0
"""A restarted process imports and loads its model before it writes its first status, and the others
have work again only when it has done some.
"""

NONE_TAKEN_S = 120.0
FEW_REFUSED = 16
"""Of a sender that makes a group in minutes, a few may be refused in succession."""
STILL_SENT_S = 60.0
_WAITING = ("waiting", "held back")
"""How the state of a process begins that says that it does no work now."""

_WORK: dict[Role, str] = {"trainer": "step", "sampler": "batch", "generator": "group", "verifier": "group scored"}
"""What each role produces, in the order in which a stalled role explains most."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A role that answers but makes no progress. `usual_s`: its usual interval, None if not yet
    known.
    """

    role: Role
    for_s: float
    usual_s: float | None

    @property
    def words(self) -> str:
        """Such as `no step for 2m (usually every 1s)`."""
        usual = "" if self.usual_s is None else f" (usually every {duration(self.usual_s)})"
        return f"no {_WORK[self.role]} for {duration(self.for_s)}{usual}"


def standing(view: NodeView, now: float) -> Standing | None:
    """The first role in the order of `_WORK` that answers but has stalled; None if there is none,
    or if the node's trainer has taken all its steps or does not answer.

    The sampler, generator and verifier may wait for the trainer on purpose, so the trainer is
    checked first, and what they do is no finding while it is gone. Nor is it while a process is
    starting: the others' work rested for as long as that one was away.
    """
    if finished(view) or (view.roles("trainer") and not view.alive("trainer", now)):
        return None
    begins = {role for role in ROLES for status in view.alive(role, now) if _starting(status, now)}
    for role in _WORK:
        if begins - {role}:
            continue
        alive = view.alive(role, now)
        found = [late for status in alive if (late := _late(status, now)) is not None]
        # If a role has several replicas, one that works is enough.
        if found and len(found) == len(alive):
            return min(found, key=lambda each: each.for_s)
    return None


def _starting(status: ServiceStatus, now: float) -> bool:
    since_s = now - status.started_at
    return since_s <= START_AGAIN_S or (status.state == STARTING and since_s <= FIRST_WORK_S)


def finished(view: NodeView) -> bool:
    """Whether the trainer has taken all its steps; the node then idles."""
    return bool(view.position and view.position.finished)


def absent(view: NodeView, now: float) -> list[str]:
    """The roles that do not answer, in words: `starting: waiting for trainer` for those that have
    not reported since the start, `starting again: trainer` for those that ended in order a moment
    ago, `no word from verifier for 2m` for the others. Empty if the node ended in order.
    """
    away = gone(view, now)
    missing = [role for role in ROLES if not view.alive(role, now)]
    begins = [role for role in missing if view.starting(role, now)]
    if view.ended(now) and not begins:
        return []
    again = [role for role in missing if role not in begins and any(_just_ended(status, now) for status in view.roles(role)[:1])]
    heard_at = [view.roles(role)[0].updated_at for role in away if view.roles(role)]
    silent = f" for {duration(now - max(heard_at))}" if heard_at else ""
    told = (("no word from ", away, silent), ("starting again: ", again, ""), ("starting: waiting for ", begins, ""))
    return [f"{words}{', '.join(roles)}{since}" for words, roles, since in told if roles]


def gone(view: NodeView, now: float) -> list[Role]:
    """The roles that do not answer, without those that ended in order a moment ago and those that
    have not reported since the start. Empty if the node ended in order, and if nothing is known of
    it: no process has reported, and the run is not this machine's.
    """
    if not view.statuses and not view.begun:
        return []
    missing = [] if view.ended(now) else [role for role in ROLES if not view.alive(role, now)]
    return [
        role
        for role in missing
        if not view.starting(role, now) and not any(_just_ended(status, now) for status in view.roles(role)[:1])
    ]


def ended_a_moment_ago(view: NodeView, now: float) -> bool:
    """Whether each role that does not answer ended in order a moment ago."""
    missing = [role for role in ROLES if not view.alive(role, now)]
    return all(any(_just_ended(status, now) for status in view.roles(role)[:1]) for role in missing)


def _just_ended(status: ServiceStatus, now: float) -> bool:
    return status.state == STOPPED and now - status.updated_at <= START_AGAIN_S


def quiet(view: NodeView, now: float) -> list[str]:
    """Roles whose status is late but which do not count as gone yet, such as `trainer not answering
    for 14s`.
    """
    return [f"{role} {_unanswered(status, now)}" for role, status in _late_with_word(view, now)]


def late_with_word(view: NodeView, now: float) -> list[Role]:
    """The roles that `quiet` is about."""
    return [role for role, _ in _late_with_word(view, now)]


def _late_with_word(view: NodeView, now: float) -> list[tuple[Role, ServiceStatus]]:
    newest = [(role, alive[0]) for role in ROLES if (alive := view.alive(role, now))]
    return [(role, status) for role, status in newest if now - status.updated_at > QUIET_S]


def instead_of_state(view: NodeView, status: ServiceStatus, now: float) -> str:
    """What is known of a process that its last reported state hides: that it does not answer, or
    that it has nothing done for long while its node stands still. Empty if that state holds.
    """
    if now - status.updated_at > QUIET_S:
        return _unanswered(status, now)
    if standing(view, now) is not None and (late := _late(status, now)) is not None:
        words = f"no {_WORK[late.role]} for {duration(late.for_s)}"
        # What it waits for is the trail to the cause.
        return f"{status.state}, {words}" if status.state.startswith(_WAITING) else words
    return ""


def _unanswered(status: ServiceStatus, now: float) -> str:
    return f"not answering for {duration(now - status.updated_at)}"


def trouble(view: NodeView, now: float) -> tuple[str, ...]:
    """What is wrong with a node that answers, in words: a process that does not answer first,
    because the others may stand still for it.
    """
    still = standing(view, now)
    return (*quiet(view, now), *([still.words] if still else []))


def takes_none_s(view: NodeView, now: float) -> float | None:
    """Seconds since a node that used to accept foreign groups last accepted one, although others
    still send some. None if it accepts them, has not since its verifiers started, or is sent none.
    """
    alive = [status.figures for status in view.alive("verifier", now)]
    taken_at = max((figures.get(StatusFigure.TAKEN_AT, 0.0) for figures in alive), default=0.0)
    refused_at = max((figures.get(StatusFigure.REFUSED_AT, 0.0) for figures in alive), default=0.0)
    refused = sum(figures.get(StatusFigure.REFUSED_SINCE_TAKEN, 0.0) for figures in alive)
    since_s = now - taken_at
    is_sent_some = refused >= FEW_REFUSED and now - refused_at <= STILL_SENT_S
    return since_s if taken_at and is_sent_some and since_s >= NONE_TAKEN_S else None


def none_taken(view: NodeView, now: float) -> str:
    """`takes_none_s` in words; empty if it is None."""
    since_s = takes_none_s(view, now)
    return "" if since_s is None else f"no foreign group taken for {duration(since_s)}"


def mostly_refused(view: NodeView, now: float) -> str | None:
    """Why a node that takes none refuses most of what it examines; None if it is not known."""
    counts: dict[str, float] = {}
    for status in view.alive("verifier", now):
        for name, count in status.figures.items():
            if (reason := FigureFamily.MOSTLY_REFUSED.what(name)) is not None:
                counts[reason] = counts.get(reason, 0.0) + count
    return max(counts, key=lambda reason: counts[reason], default=None)


def top_refusal(statuses: Iterable[ServiceStatus]) -> tuple[str, int] | None:
    """The reason for which most foreign groups were refused, and how many; None if none was."""
    counts: dict[str, float] = {}
    for status in statuses:
        for name, value in status.figures.items():
            if (reason := FigureFamily.REFUSED.what(name)) is not None:
                counts[reason] = counts.get(reason, 0) + value
    most = max(counts, key=lambda name: counts[name], default=None)
    return (most, int(counts[most])) if most and counts[most] > 0 else None


def unknown_rewards(view: NodeView) -> dict[str, int]:
    """How many local answers have left their groups because their reward is unknown, by cause; only
    causes that occurred.
    """
    counts = {cause: int(view.total("verifier", FigureFamily.UNKNOWN_REWARDS.of(cause))) for cause in CAUSES}
    return {cause: count for cause, count in counts.items() if count}


def reward_notes(view: NodeView) -> list[str]:
    """Sentences about a node's unknown rewards, and about sources without a pass."""
    told = ", ".join(f"{count:,} {cause}" for cause, count in unknown_rewards(view).items())
    notes = [f"answers whose reward is unknown have left their groups: {told}; the verifier's log says why"] if told else []
    unscored = int(view.total("generator", StatusFigure.EVAL_UNKNOWN))
    if view.evaluation is not None and view.evaluation.unknown:
        n, unknown = view.evaluation.n, view.evaluation.unknown
        notes.append(f"the held-out score is of {n:,} of {n + unknown:,} held-out answers; {unknown:,} have no known reward")
    elif unscored:
        notes.append(f"{unscored:,} held-out answers have no known reward and are left out")
    return notes + ([NO_PASS_SHOWN] if view.evaluation is not None and view.evaluation.pass_rate is None else [])


def duration(seconds: float) -> str:
    """Seconds in the largest fitting unit: 0.4s, 42s, 7m, 3h, 2d. A time that is yet to come, by a
    clock that is apart from this machine's, is 0s ago.
    """
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds / unit)}{name}"
    return f"{seconds:.1f}s" if 0 < seconds < 1 else f"{max(0, int(seconds))}s"


def _late(status: ServiceStatus, now: float) -> Standing | None:
    worked_at = status.figures.get(StatusFigure.WORKED_AT)
    usual_s = status.figures.get(StatusFigure.WORK_EVERY_S)
    if worked_at is None and status.role != "trainer":
        return None  # a sampler without foreign groups or a verifier of a new node may have nothing to do yet
    since_s = now - (status.started_at if worked_at is None else worked_at)
    patience_s = late_after_s(usual_s) or FIRST_WORK_S
    return Standing(status.role, since_s, usual_s) if since_s > patience_s else None
