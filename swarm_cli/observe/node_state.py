"""A node at one moment: what was read of it, and what follows from that. Every display (`swarm
status`, `swarm top`, the page, the progress of `swarm up`) reads this one model. Pure.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.contracts.control import EvalReport, LeaseRecord, NodeRecord, PolicyPointer, ServiceStatus, TrainerPosition
from shared.contracts.status_figures import (
    EVALUATING_BASE,
    FIRST_GROUPS,
    GENERATING,
    LOADING_POLICY,
    STARTING,
    STATUS_INTERVAL_S,
    STOPPED,
    FamilyFigure,
    FigureFamily,
    StatusFigure,
    first_step_comes,
    is_alive,
    late_after_s,
)
from shared.contracts.subjects import node_bucket
from shared.identity.statements import CheckedStatement, SignatureStatus
from shared.rewards import CAUSES, Mark
from shared.roles import ROLES, Role
from shared.text import visible
from shared.transport.base import ConsumerState, StreamState, bucket_stream
from swarm_cli.observe.run_files import NO_PASS_SHOWN, Comparison, Evaluation, compared, group_notes, local_only_words

LOADING_S = 600.0
"""How long a process of a node that was just started may load before it counts as silent."""
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
_WAITING = ("waiting", "held back", LOADING_POLICY)
"""How the state of a process begins that says that it does no work now."""
UNEXAMINED = {"surplus": " (never examined)"}

_WORK: dict[Role, str] = {"trainer": "step", "sampler": "batch", "generator": "group", "verifier": "group scored"}
"""What each role produces, in the order in which a stalled role explains most."""

Kind = Literal["running", "starting", "finished", "stopped", "silent", "lost", "unread", "elsewhere"]
Health = Literal["good", "warn", "bad", "rest"]


def duration(seconds: float) -> str:
    """Seconds in the largest fitting unit: 0.4s, 42s, 7m, 3h, 2d. A time that is yet to come, by a
    clock that is apart from this machine's, is 0s ago.
    """
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds / unit)}{name}"
    return f"{seconds:.1f}s" if 0 < seconds < 1 else f"{max(0, int(seconds))}s"


@dataclass(frozen=True, slots=True)
class Stall:
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


@dataclass(frozen=True, slots=True)
class StreamFill:
    """A stream's fill and, if it has a durable consumer, that consumer's lag."""

    stream: str
    state: StreamState
    consumer: ConsumerState | None = None


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node at the Unix time `at`. None: not written yet, or not known here."""

    node: str
    statuses: tuple[ServiceStatus, ...] = ()
    position: TrainerPosition | None = None
    policy: PolicyPointer | None = None
    evaluation: EvalReport | None = None
    unreadable: tuple[str, ...] = ()
    """Keys of the node's bucket that do not decode."""
    run: str = ""
    """The run that the node's name and streams belong to; empty if it is not known."""
    begun: float = 0.0
    """When its run was last started here, else 0; earlier reports are of an earlier start."""
    recorded_version: int = 0
    """Of an ended run: the newest version on record."""
    unsaved: str = ""
    """Of an ended run: which steps no checkpoint contains, in words."""
    verdict: tuple[str, ...] = ()
    """Of an ended run: its judgement and the reasons (`node_verdict`)."""
    alone: bool = False
    """Nobody else is on its server, which is the swarm's too, so there is nobody to share with."""
    leases: tuple[tuple[LeaseRecord, float], ...] = ()
    """Leases of the processes that hold its name, each with the Unix time of its last renewal."""
    at: float = 0.0
    unread: str = ""
    """Why the node's bucket could not be read. The node may be well."""
    surplus: Mapping[str, int] = field(default_factory=dict)
    """How many keys of its processes were too many to read, by stem such as `status.generator`."""
    streams: tuple[StreamFill, ...] = ()
    lost: tuple[str, ...] = ()
    """Streams that it used, by its run's folder here, and that the server no longer has."""
    entry: CheckedStatement[NodeRecord] | None = None
    """Its entry in the swarm's directory, with the signature checked."""
    elsewhere: bool = False
    """Its bucket is on another server, so of its steps and groups nothing is known here."""
    claimed: bool = False
    """This machine has the folder of a node of this name."""
    scores: tuple[Evaluation, ...] = ()
    """Its held-out results in order of policy version, from all sources."""
    signed: bool = True
    """False: anybody may have written the scores."""
    shared_window: int | None = None
    """Its groups in the window of the swarm's stream; None if it is not known."""
    seen_rate: float | None = None
    """Steps per minute, of the steps that a view has seen; None before the second."""

    # What the trainer and the server tell.

    @property
    def step(self) -> int:
        """Steps taken, as far as the trainer has reported."""
        written = self.position.policy_version if self.position else 0
        return max(written, int(self.figure("trainer", StatusFigure.STEP)))

    @property
    def version(self) -> int | None:
        """Version of the newest published policy; of a node elsewhere by its signed entry."""
        if self.elsewhere:
            signed = self.entry is not None and self.entry.standing is SignatureStatus.SIGNED
            return self.entry.said.policy_version if self.entry is not None and signed else None
        return self.policy.version if self.policy else self.recorded_version

    @property
    def max_steps(self) -> int:
        """The steps after which the node is finished; 0 if no such number is known."""
        return self.step if self.finished else int(self.figure("trainer", StatusFigure.MAX_STEPS))

    @property
    def finished(self) -> bool:
        """True once the trainer has taken all its steps; the node then idles."""
        return bool(self.position and self.position.finished)

    @property
    def steps_per_minute(self) -> float | None:
        """The rate of the steps that were seen; before the second one by the newest step's length.
        It falls once the trainer stands for longer than three steps take. None if the node is not
        training or has stalled.
        """
        if not self.alive("trainer") or self.finished or self.stall is not None:
            return None
        step_s = self.figure("trainer", StatusFigure.STEP_SECONDS)
        rate = self.seen_rate if self.seen_rate is not None else 60.0 / step_s if step_s > 0 else None
        stepped_at = self.figure("trainer", StatusFigure.WORKED_AT)
        standing_s = self.at - stepped_at if stepped_at else 0.0
        return 60.0 / standing_s if rate and standing_s > 3 * 60.0 / rate else rate

    @property
    def newest_score(self) -> Evaluation | None:
        """The evaluation of the highest policy version."""
        return self.scores[-1] if self.scores else None

    @property
    def comparison(self) -> Comparison:
        """The evaluations that can be compared with the newest."""
        return compared(self.scores)

    @property
    def unscored(self) -> int:
        """Of a newest evaluation that has no score, because no answer has a known reward, how many
        answers; else 0.
        """
        newest, unknown = self.newest_score, int(self.figure("generator", StatusFigure.EVAL_UNKNOWN))
        if newest is not None and newest.unknown and not newest.n:
            return newest.unknown
        return unknown if unknown and (newest is None or newest.unknown == 0) else 0

    @property
    def held_out(self) -> str:
        """The newest held-out result, such as `0.655 @120` or `0.500 @8, 6 of 8 known`; `–` before
        the first.
        """
        newest = self.newest_score
        if newest is None or not newest.n:
            return f"unknown ({self.unscored})" if self.unscored else "–"
        of = f", {newest.n} of {newest.n + newest.unknown} known" if newest.unknown else ", newest unknown" if self.unscored else ""
        return f"{newest} @{newest.policy_version}{of}{'' if self.signed else ' unsigned'}"

    def total(self, role: str, figure: StatusFigure | FamilyFigure) -> float:
        """Sum of a counter over all replicas that have reported in the node's current life. So the
        restart of a process does not lower it, and after a start of the whole node nothing is left
        of its last life.
        """
        return sum(status.figures.get(figure, 0.0) for status in self._current_statuses(role))

    def figure(self, role: str, figure: StatusFigure | FamilyFigure) -> float:
        """Newest value of a gauge; 0 if it was never reported."""
        return self.newest(role, figure) or 0.0

    def newest(self, role: str, figure: StatusFigure | FamilyFigure) -> float | None:
        """Newest value of a gauge; None if it was never reported."""
        return next((status.figures[figure] for status in self.roles(role) if figure in status.figures), None)

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

    def _current_statuses(self, role: str) -> list[ServiceStatus]:
        begun = max(self.begun, self.life_began)
        return [status for status in self.roles(role) if status.updated_at >= begun]

    # Who holds the name.

    def held(self) -> list[LeaseRecord]:
        """The leases in force: recently renewed and not released."""
        return [lease for lease, stored_at in self.leases if not lease.released and self.at - stored_at <= 2 * lease.lease_s]

    def held_on(self, here: str = "") -> list[str]:
        """The machines other than `here` (this one) that hold the node's name although it is wanted
        twice, as `HOST (run RUN)`. A node may be spread over machines, as in a cluster: its name is
        wanted twice if its processes are of several runs, or if it is `claimed` here and none of
        them is here.
        """
        here, held = here or socket.gethostname(), self.held()
        several = len({lease.run for lease in held}) > 1
        if not several and (not self.claimed or any(lease.host == here for lease in held)):
            return []
        others = {(lease.host, lease.run) for lease in held if lease.host != here}
        return [f"{host} (run {run})" for host, run in sorted(others)]

    def left_by_another_run(self, run: str) -> bool:
        """Check whether the node belongs to another run than `run` ("": not known) and is not
        running.
        """
        return bool(run and self.run and self.run != run) and len(self.missing) == len(self.needed)

    # Which processes answer.

    def roles(self, role: str) -> list[ServiceStatus]:
        """Statuses of all replicas of a role, the newest first, including processes that
        are gone.
        """
        return sorted((s for s in self.statuses if s.role == role), key=lambda s: -s.updated_at)

    def alive(self, role: str) -> list[ServiceStatus]:
        """Statuses of the replicas that are alive."""
        return [status for status in self.roles(role) if is_alive(status, self.at)]

    @property
    def needed(self) -> tuple[Role, ...]:
        """The roles that the node has, as its newest process says."""
        newest = sorted(self.statuses, key=lambda status: status.updated_at)[-1:]
        return tuple(role for role in ROLES if all(role in (each.roles or ROLES) for each in newest))

    @property
    def unknown(self) -> list[Role]:
        """The roles of which nothing is known, because their statuses could not be read."""
        return [role for role in self.needed if self.unread or (f"status.{role}" in self.surplus and not self.alive(role))]

    @property
    def missing(self) -> list[Role]:
        """The roles of which no process is alive, as far as is known."""
        unknown = self.unknown
        return [role for role in self.needed if role not in unknown and not self.alive(role)]

    def starting(self, role: str) -> bool:
        """Check whether the role is still on its way: it has not reported since the node was
        started, and that is not long ago. One that has reported since and is silent now is gone.
        """
        if role in self.unknown or (not self.roles(role) and self.step > 0):
            return False  # steps were taken, so it has been there, or is not coming
        lives = [status.started_at for each in ROLES for status in self.alive(each)]
        began = self.begun or min(lives, default=0.0)
        reported = max((status.updated_at for status in self.roles(role)), default=0.0)
        return not self.alive(role) and reported < began and self.at - began <= LOADING_S

    def _just_ended(self, role: str) -> bool:
        newest = self.roles(role)[:1]
        if newest and newest[0].updated_at < self.begun:
            return False  # it ended before this start
        return bool(newest) and newest[0].state == STOPPED and self.at - newest[0].updated_at <= START_AGAIN_S

    @property
    def ended(self) -> bool:
        """True if the node has run, and all its processes ended in order."""
        newest = [self.roles(role)[0] for role in self.needed if self.roles(role)]
        begins = any(self.starting(role) for role in self.needed)
        nobody = len(self.missing) == len(self.needed)
        return nobody and not begins and bool(newest) and all(status.state == STOPPED for status in newest)

    @property
    def _ending(self) -> bool:
        """True while it is being ended: half of its roles or more ended in order a moment ago, and
        nothing else is missing. A role alone is being restarted.
        """
        missing = self.missing
        return len(missing) < len(self.needed) <= 2 * len(missing) and all(self._just_ended(role) for role in missing)

    @property
    def gone(self) -> list[Role]:
        """The roles that do not answer, without those that ended in order a moment ago and those
        that have not reported since the start. Empty if the node ended in order, and if nothing is
        known of it: no process has reported, and the run is not this machine's.
        """
        if self.elsewhere or self.ended or not (self.statuses or self.begun):
            return []
        return [role for role in self.missing if not self.starting(role) and not self._just_ended(role)]

    @property
    def late(self) -> list[Role]:
        """Roles whose status is late but which do not count as gone yet."""
        return [role for role in ROLES if (alive := self.alive(role)) and self.at - alive[0].updated_at > QUIET_S]

    @property
    def absent(self) -> list[str]:
        """The roles that do not answer, in words: `starting: waiting for trainer` for those that
        have not reported since the start, `starting again: trainer` for one that ended in order a
        moment ago, `no word from verifier for 2m` for the others. Empty if the node ended in order.
        """
        if self.elsewhere or self.unread:
            return []
        away, missing = self.gone, self.missing
        begins = [role for role in missing if self.starting(role)]
        if self.ended and not begins:
            return []
        if self._ending:
            return [f"ending, still running: {', '.join(role for role in self.needed if role not in missing)}"]
        again = [role for role in missing if role not in begins and self._just_ended(role)]
        heard_at = [self.roles(role)[0].updated_at for role in away if self.roles(role)]
        silent = f" for {duration(self.at - max(heard_at))}" if heard_at else ""
        unknown = ("not known, too many status entries: ", self.unknown, "")
        told = (("no word from ", away, silent), ("starting again: ", again, ""), ("starting: waiting for ", begins, ""), unknown)
        return [f"{words}{', '.join(roles)}{since}" for words, roles, since in told if roles]

    # Whether its work goes on.

    @property
    def stall(self) -> Stall | None:
        """The first role in the order of `_WORK` that answers but has stalled; None if there is
        none, or if the node's trainer has taken all its steps or does not answer, or people answer.

        The sampler, generator and verifier may wait for the trainer on purpose, so the trainer is
        checked first, and what they do is no finding while it is gone. Nor is it while a process is
        starting: the others' work rested for as long as that one was away.
        """
        if self.finished or (self.roles("trainer") and not self.alive("trainer")) or "generator" not in self.needed:
            return None
        begins = {role for role in ROLES for status in self.alive(role) if self._begins(status)}
        for role in _WORK:
            if begins - {role}:
                continue
            alive = self.alive(role)
            found = [late for status in alive if (late := self._stalled(status)) is not None]
            # If a role has several replicas, one that works is enough.
            if found and len(found) == len(alive):
                return min(found, key=lambda each: each.for_s)
        return None

    def _begins(self, status: ServiceStatus) -> bool:
        since_s = self.at - status.started_at
        return since_s <= START_AGAIN_S or (status.state == STARTING and since_s <= FIRST_WORK_S)

    def _stalled(self, status: ServiceStatus) -> Stall | None:
        worked_at = status.figures.get(StatusFigure.WORKED_AT)
        usual_s = status.figures.get(StatusFigure.WORK_EVERY_S)
        if worked_at is None and (status.role != "trainer" or first_step_comes(status.state, self.alive("generator"))):
            return None  # a sampler without foreign groups or a verifier of a new node may have nothing to do yet
        since_s = self.at - (status.started_at if worked_at is None else worked_at)
        patience_s = late_after_s(usual_s) or FIRST_WORK_S
        return Stall(status.role, since_s, usual_s) if since_s > patience_s else None

    @property
    def trouble(self) -> list[str]:
        """The findings about processes that answer, in words: one that is late first, because the
        others may stand still for it.
        """
        late = [f"{role} {self._unanswered(self.alive(role)[0])}" for role in self.late]
        return [*late, *filter(None, [self.none_scored, self.stall.words if self.stall else ""])]

    def _unanswered(self, status: ServiceStatus) -> str:
        return f"not answering for {duration(self.at - status.updated_at)}"

    def role_words(self, role: str) -> str:
        """The state of a role's processes, or what is known of them that their last state hides; of
        a node on another server it is not known.
        """
        if self.elsewhere:
            return "–"
        alive, known = self.alive(role), self.roles(role)
        if alive:
            return self._process_words(alive[0]) + (f" x{len(alive)}" if len(alive) > 1 else "")
        if role in self.unknown:
            return "not known"
        if self.starting(role):
            return STARTING
        if not known:
            return "never seen"
        if known[0].state == STOPPED:
            return f"ended {duration(self.at - known[0].updated_at)} ago"
        return self._unanswered(known[0])

    def _process_words(self, status: ServiceStatus) -> str:
        if self.at - status.updated_at > QUIET_S:
            return self._unanswered(status)
        if self.stall is not None and (late := self._stalled(status)) is not None:
            words = f"no {_WORK[late.role]} for {duration(late.for_s)}"
            # What it waits for is the trail to the cause.
            return f"{status.state}, {words}" if status.state.startswith(_WAITING) else words
        return self._current(status)

    def _current(self, status: ServiceStatus) -> str:
        """A process's state, or what the steps taken say of it that it has not said yet."""
        since = {FIRST_GROUPS: self.step > 0 and "training", GENERATING: self.finished and "idle"}
        return since.get(status.state) or status.state

    # Foreign groups and rewards.

    @property
    def takes_none_s(self) -> float | None:
        """Seconds since a node that used to accept foreign groups last accepted one, although
        others still send some. None if it accepts them, has not since its verifiers started, is
        sent none, or has taken all its steps.
        """
        alive = [] if self.finished else [status.figures for status in self.alive("verifier")]
        taken_at = max((figures.get(StatusFigure.TAKEN_AT, 0.0) for figures in alive), default=0.0)
        refused_at = max((figures.get(StatusFigure.REFUSED_AT, 0.0) for figures in alive), default=0.0)
        refused = sum(figures.get(StatusFigure.REFUSED_SINCE_TAKEN, 0.0) for figures in alive)
        since_s = self.at - taken_at
        is_sent_some = refused >= FEW_REFUSED and self.at - refused_at <= STILL_SENT_S
        return since_s if taken_at and is_sent_some and since_s >= NONE_TAKEN_S else None

    @property
    def none_taken(self) -> str:
        """`takes_none_s` in words; empty if it is None."""
        return "" if self.takes_none_s is None else f"no foreign group taken for {duration(self.takes_none_s)}"

    @property
    def mostly_refused(self) -> str:
        """For what most of what it examines is refused, while none is taken; empty if it is not
        known.
        """
        counts = self._by_label(self.alive("verifier"), FigureFamily.MOSTLY_REFUSED)
        return max(counts, key=lambda reason: counts[reason], default="")

    def refusals(self) -> str:
        """The two most frequent reasons for refusals, such as `4,000 surplus (never examined), 300
        repeated`; empty if nothing was refused in this life. Surplus is nobody's fault and must not
        hide the reason for the rest.
        """
        counts = self._by_label(self._current_statuses("verifier"), FigureFamily.REFUSED)
        most = sorted((name for name, count in counts.items() if count > 0), key=lambda name: -counts[name])[:2]
        return ", ".join(f"{int(counts[name]):,} {visible(name, 40)}{UNEXAMINED.get(name, '')}" for name in most)

    @staticmethod
    def _by_label(statuses: Iterable[ServiceStatus], family: FigureFamily) -> dict[str, float]:
        counts: dict[str, float] = {}
        for status in statuses:
            for name, value in status.figures.items():
                if (label := family.what(name)) is not None:
                    counts[label] = counts.get(label, 0.0) + value
        return counts

    @property
    def unknown_rewards(self) -> dict[str, int]:
        """Count the local answers that have left their groups because their reward is unknown, by
        cause; only causes that occurred.
        """
        counts = {cause: int(self.total("verifier", FigureFamily.UNKNOWN_REWARDS.of(cause))) for cause in CAUSES}
        return {cause: count for cause, count in counts.items() if count}

    @property
    def none_scored(self) -> str:
        """Why there is nothing of its own to train on, such as `no group scored: all 1,531 rewards
        are unknown (raised)`, or that nothing can be learnt as the reward is always None; empty if
        its verifiers have scored a local group since they started, no reward is unknown, or the
        node has taken all its steps.
        """
        scored, unknown = FigureFamily.SCORED.of("local"), self.unknown_rewards
        if self.finished or not unknown or self.newest("verifier", scored) is None or self.total("verifier", scored):
            return ""
        since = " since the verifier started" if self.step else ""
        if unknown.keys() == {Mark.NOT_APPLICABLE.cause}:
            return f"nothing can be learnt{since}: the reward returned None for all {sum(unknown.values()):,} answers"
        return f"no group scored{since}: all {sum(unknown.values()):,} rewards are unknown ({', '.join(unknown)})"

    @property
    def reward_notes(self) -> list[str]:
        """Sentences about groups that teach nothing, unknown rewards, sources that are local only
        or without a pass, and a base policy that the newest score cannot be compared with.
        """
        told = ", ".join(f"{count:,} {cause}" for cause, count in self.unknown_rewards.items())
        figures = self.roles("trainer")[0].figures if self.roles("trainer") else {}
        notes = group_notes(figures, self.node)
        notes += [f"answers whose reward is unknown have left their groups: {told}; the verifier's log says why"] if told else []
        newest = self.newest_score
        if self.unscored:
            notes.append(
                f"the newest held-out evaluation has no score: none of its {self.unscored:,} answers has a known reward; "
                "`swarm config check` tries the verifier"
            )
        elif newest is not None and newest.unknown:
            of = f"{newest.n:,} of {newest.n + newest.unknown:,} held-out answers"
            notes.append(f"the held-out score is of {of}; {newest.unknown:,} have no known reward")
        notes += [self.apart] if self.apart else []
        verifiers = [] if self.alone else self.alive("verifier")[:1]
        notes += [words for verifier in verifiers for words in local_only_words(verifier.figures)]
        if (trainer := self.alive("trainer")) and (former := trainer[0].figures.get(StatusFigure.FORMER_REWARDS)):
            notes.append(
                f"{int(former):,} of the newest step's groups were scored before the reward was changed: batches that were in "
                "the log then are trained on as they are"
            )
        notes += [NO_PASS_SHOWN] if newest is not None and newest.n and newest.pass_rate is None else []
        return [*notes, *filter(None, [self.comparison.why_no_base])]

    @property
    def apart(self) -> str:
        """Which processes hold a reward that was changed since they were started, in words; empty
        if all hold one. The process that was started last has read the newest.
        """
        held = [status for role in ROLES for status in self.alive(role) if status.scorer is not None]
        if len({status.scorer for status in held}) < 2:
            return ""
        newest = max(held, key=lambda status: status.started_at)
        changed = [role for role in ROLES if any(each.role == role and each.scorer == newest.scorer for each in held)]
        former = [role for role in ROLES if any(each.role == role and each.scorer != newest.scorer for each in held)]
        scored = {"verifier": "training answers", "generator": "held-out answers"}
        by = [
            f"{what} are scored by the {'former' if role in former else 'new'} one"
            for role, what in scored.items()
            if role in (*changed, *former)
        ]
        told = ", ".join(former)
        return (
            f"the reward was changed: {' and '.join(changed)} read the new one, {told} still "
            f"{'hold' if len(former) > 1 else 'holds'} the former{', so ' if by else ''}{' and '.join(by)}. Restart {told} "
            f"(`swarm restart {visible(self.node, 32)}-{former[0]}`), or the whole node"
        )

    # What cannot be written, or was not.

    def _failing_writes(self) -> list[tuple[Role, str, float, float]]:
        """Writes that fail in processes that are alive: role, kind of write, since when, how many
        tries failed.
        """
        found = []
        for role in ROLES:
            for figures in (status.figures for status in self.alive(role)):
                for figure, since in sorted(figures.items()):
                    if (kind := FigureFamily.FAILING_SINCE.what(figure)) is not None:
                        tries = figures.get(FigureFamily.WRITE_FAILURES.of(kind), 0.0)
                        found.append((role, visible(kind, 20).replace("_", " "), since, tries))
        return found

    @property
    def unwritten(self) -> str:
        """Failing writes, such as `cannot write: checkpoint, for 66s`; empty if there are none."""
        failing = self._failing_writes()
        kinds = ", ".join(dict.fromkeys(kind for _, kind, _, _ in failing))
        return f"cannot write: {kinds}, for {duration(self.at - min(since for _, _, since, _ in failing))}" if failing else ""

    @property
    def notes(self) -> list[str]:
        """Sentences about what was not saved and about rewards; of an ended run its reasons."""
        if self.verdict:
            return list(self.verdict[1:])
        failing = [
            f"the {role} cannot write: {kind}, for {duration(self.at - since)} ({tries:,.0f} failed writes); its log has the cause "
            "and the remedy (write_failed)"
            for role, kind, since, tries in self._failing_writes()
        ]
        return [*self.crowding, *failing, *self.reward_notes]

    @property
    def crowding(self) -> list[str]:
        """Sentences about keys that were not read, as no node has that many processes, with the
        remedy. Running processes write theirs again.
        """
        bucket = node_bucket(self.node)
        return [
            f"{more:,} more keys {stem}.* are not read: processes that ended left them, or somebody floods the bucket with the "
            f"{stem.partition('.')[2]}'s key. The server's operator removes them: `nats stream purge {bucket_stream(bucket)} "
            f"--subject '$KV.{bucket}.{stem}.*'`"
            for stem, more in self.surplus.items()
        ]

    # The whole node in one word, one colour, one line.

    @property
    def kind(self) -> Kind:
        """The node's state. `elsewhere`: its processes use another server. `stopped`: they ended in
        order, or half of them a moment ago. `starting`: also again. `silent`: one fell silent
        without ending in order, or did not come back. `lost`: the server no longer has its streams.
        `unread`: the state of some role could not be read.
        """
        if self.lost:
            return "lost"
        if self.unknown and not self.gone:
            return "unread"
        if not self.statuses:
            return "elsewhere"
        missing = self.missing
        needed = self.needed
        newest = [self.roles(role)[0] for role in needed if self.roles(role)]
        in_order = all(each.state == STOPPED for each in newest)
        if self.finished and (len(missing) < len(needed) or in_order):
            return "finished"
        if missing:
            if all(self.starting(role) for role in missing):
                return "starting"
            if self._ending or (in_order and len(missing) == len(needed)):
                return "stopped"
            return "silent" if self.gone else "starting"
        works = self.step > 0 or "trainer" not in needed or self.stall is not None or self.none_scored
        return "running" if works else "starting"

    @property
    def health(self) -> Health:
        """`good` only if the node is known to be well now; `rest`: it is not running here."""
        if self.lost:
            return "bad"
        if self.unknown and not self.gone:
            return "warn"
        if self.ended:
            return "rest"
        if self.gone:
            return "bad" if self.step else "warn"
        if self.elsewhere:
            return "warn" if self.doubt else "rest"
        if self.missing or self.late or self.unwritten:
            return "warn"
        return "bad" if self.stall is not None else "warn" if self.none_scored else "good"

    @property
    def doubt(self) -> str:
        """Why a node known only from the directory may not exist, as anybody may write there."""
        if self.statuses or self.entry is None or self.entry.standing is SignatureStatus.SIGNED:
            return ""
        return f"directory entry {self.entry.standing.value}{f': {self.entry.problem}' if self.entry.problem else ''}"

    @property
    def words(self) -> str:
        """The node's present work, or what keeps it from it."""
        if self.lost:
            return f"lost: {len(self.lost)} of its streams are gone from the server"
        if self.elsewhere:
            return self.doubt or "on another server"
        if self.unread:
            return f"not read: {self.unread}"
        missing = self.missing
        if missing or self.unknown:
            return ", ".join(self.absent) or f"{'ended' if self.statuses else 'never seen'}: {', '.join(missing)}"
        if trouble := self.trouble:
            return ", ".join(filter(None, [*trouble, self.unwritten]))
        if "trainer" not in self.needed:
            return ", ".join(filter(None, ("no trainer", *(each.state for each in self.alive("generator")[:1]), self.unwritten)))
        trainer, generator = self._current(self.alive("trainer")[0]), self.alive("generator")[0].state
        if trainer == FIRST_GROUPS and (generator == STARTING or generator.startswith(EVALUATING_BASE)):
            return f"starting: {'the generator loads the model' if generator == STARTING else generator}"
        if generator.startswith(LOADING_POLICY):
            trainer = f"generator: {generator}"
        if self.step == 0 and trainer != "training" and not self.finished:
            return f"starting: {'the trainer loads the model' if trainer == STARTING else trainer}"
        return ", ".join(filter(None, (trainer, self.none_taken, self.unwritten)))
