"""What `swarm top` shows, as plain values: pure functions over snapshots; time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shared.contracts import subjects
from shared.contracts.control import EvalReport
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.streams import node_streams, swarm_streams
from shared.identity.statements import Standing
from shared.roles import ROLES
from shared.runtime.status import STARTING
from shared.transport.base import StreamSpec
from swarm_cli.observe.node_state import (
    NodeView,
    finished,
    gone,
    instead_of_state,
    mostly_refused,
    standing,
    takes_none_s,
    top_refusal,
    trouble,
    unknown_rewards,
)
from swarm_cli.observe.progress import StepRate, base_evaluation, newest_evaluation
from swarm_cli.observe.run_files import Evaluation
from swarm_cli.observe.snapshot import NodeSnapshot, StreamFill, SwarmSnapshot

PHASES = ("wait", "intake", "forward_backward", "optimizer", "publish", "checkpoint")
"""Phases of a trainer step, as named in the trainer's status (`<phase>_share`)."""


@dataclass(frozen=True, slots=True)
class Fill:
    """How full a stream is. `ratio`: its share of the limit that it is nearest to; None if its
    limits are not known.

    `full_is_normal`: the stream is a window that drops its oldest messages; other streams make
    their writers wait.
    """

    name: str
    messages: int
    size_bytes: int | None
    ratio: float | None
    full_is_normal: bool


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process. `silent_s`: seconds since its last status; `age_s`: since its start, by its own
    report.
    """

    role: str
    replica: str
    state: str
    age_s: float
    silent_s: float
    alive: bool
    instead: str = ""
    """What is known of it that `state` hides: it does not answer, or its work does not go on."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out pass rates in order of policy version; `base` is that of version 0, if known."""

    history: tuple[Evaluation, ...] = ()
    unsigned: bool = False
    """It came from the swarm's stream without the node's signature."""

    @property
    def newest(self) -> Evaluation | None:
        """The evaluation of the highest policy version."""
        return self.history[-1] if self.history else None

    @property
    def base(self) -> Evaluation | None:
        """The evaluation of the base policy."""
        return base_evaluation(self.history)


@dataclass(frozen=True, slots=True)
class NodeModel:
    """One node. Rates are per minute; shares are of the trainer's recent time. None: not reported
    yet.
    """

    node: str
    heard: bool
    step: int | None
    steps_per_minute: float | None
    version: int | None
    generating_version: int | None
    held_out: HeldOut
    reward_local: float | None
    reward_external: float | None
    staleness_mean: float | None
    staleness_max: float | None
    made: int | None
    shared: int | None
    taken: int | None
    refused: int | None
    top_reason: str | None
    """Of what was refused; while none is taken, of what was examined and refused since."""
    to_score: int | None
    pool_local: int | None
    pool_external: int | None
    wanted_local: int | None
    wanted_external: int | None
    intake: int | None
    outbox: int | None
    dead: int | None
    scorer_kills: int | None
    unknown_rewards: int
    """Local answers that have left their groups because their reward is unknown."""
    phase_shares: Mapping[str, float]
    processes: tuple[ProcessLine, ...]
    missing: tuple[str, ...]
    """Roles that are gone, without those that are yet to come."""
    fills: tuple[Fill, ...]
    starting: tuple[str, ...] = ()
    """Roles that have not reported since the start."""
    trouble: tuple[str, ...] = ()
    """What has stalled or is late, in words; empty if the node is well."""
    stands_still: bool = False
    finished: bool = False
    ended: bool = False
    """Its processes ended in order, and none was started since."""
    takes_none_s: float | None = None
    """As `standing.takes_none_s`, of a node that is not finished."""
    held_on: tuple[str, ...] = ()
    """Other machines that hold the node's name."""
    elsewhere: bool = False
    """As in `NodeSnapshot`."""
    known_s: float = 0.0
    """How old these values are: above 0 if the server has not answered since."""


@dataclass(frozen=True, slots=True)
class TopModel:
    """The whole screen."""

    at: float
    nodes: tuple[NodeModel, ...]
    swarm_fills: tuple[Fill, ...]
    swarm_reachable: bool | None
    left_out: int = 0
    unreadable: int = 0
    """Of the directory: entries that are not shown, and those that are no node's."""
    swarm_denied: bool = False
    """As in `SwarmSnapshot`."""


class TopHistory:
    """What is remembered between looks: step rates."""

    def __init__(self) -> None:
        self._rates: dict[str, StepRate] = {}

    def model(
        self,
        snapshot: SwarmSnapshot,
        reports: Sequence[EvalReport],
        in_files: Mapping[str, Sequence[Evaluation]],
        unsigned: Collection[str] = (),
    ) -> TopModel:
        """The screen for `snapshot`. `reports`: the swarm's; `in_files`: evaluations in the run's
        folder, by node; `unsigned`: nodes whose reports are unsigned.
        """
        nodes = []
        by_node: dict[str, list[EvalReport]] = {}
        for report in reports:
            by_node.setdefault(report.node, []).append(report)
        for node in snapshot.nodes:
            rate = self._rates.setdefault(node.node, StepRate()).update(snapshot.at, node.view.step)
            held_out = held_out_history(node.view, by_node.get(node.node, ()), in_files.get(node.node, ()))
            held_out = replace(held_out, unsigned=node.node in unsigned and node.view.evaluation is None)
            nodes.append(_node_model(node, rate, held_out, snapshot.at))
        specs = {spec.name: spec for spec in swarm_streams()}
        fills = tuple(_fill(fill, specs) for fill in snapshot.swarm_streams)
        left_out, unreadable = snapshot.left_out, snapshot.unreadable
        return TopModel(snapshot.at, tuple(nodes), fills, snapshot.swarm_reachable, left_out, unreadable, snapshot.swarm_denied)


def held_out_history(view: NodeView, reports: Iterable[EvalReport], in_files: Sequence[Evaluation]) -> HeldOut:
    """A node's held-out pass rates from all sources. A report on a lower version than the previous
    one means that training started again.
    """
    by_version: dict[int, Evaluation] = {evaluation.policy_version: evaluation for evaluation in in_files}
    for report in sorted((r for r in reports if r.node == view.node), key=lambda r: r.created_at):
        for later in [version for version in by_version if version > report.policy_version and not in_files]:
            del by_version[later]
        by_version[report.policy_version] = Evaluation.of(report)
    newest = newest_evaluation(view, ())
    if newest:
        by_version[newest.policy_version] = newest
    return HeldOut(tuple(by_version[version] for version in sorted(by_version)))


def _node_model(node: NodeSnapshot, rate: float | None, held_out: HeldOut, now: float) -> NodeModel:
    """One node's values. `rate`: steps per minute between two looks, None at the first. Sums over a
    role's replicas count from their start. A stream that the server did not report is None, not
    empty.
    """
    view = node.view
    takes_none = None if finished(view) else takes_none_s(view, now)
    most = top_refusal(view.roles("verifier"))
    specs = {spec.name: spec for spec in node_streams(view.node)}
    by_stream = {fill.stream: fill for fill in node.streams}
    queue = by_stream.get(subjects.node_rollouts_stream(view.node))
    dead = by_stream.get(subjects.node_dead_letters_stream(view.node))

    def total(role: str, figure: StatusFigure) -> int | None:
        return None if node.elsewhere else int(view.total(role, figure))

    return NodeModel(
        node=view.node,
        heard=bool(view.statuses),
        step=node.step,
        steps_per_minute=_rate(view, rate, now),
        version=node.version,
        generating_version=_count(view.newest("generator", StatusFigure.POLICY_VERSION)),
        held_out=held_out,
        reward_local=view.newest("trainer", StatusFigure.REWARD_LOCAL),
        reward_external=view.newest("trainer", StatusFigure.REWARD_EXTERNAL),
        staleness_mean=view.newest("trainer", StatusFigure.STALENESS_MEAN),
        staleness_max=view.newest("trainer", StatusFigure.STALENESS_MAX),
        made=total("generator", StatusFigure.GROUPS_GENERATED),
        shared=total("verifier", StatusFigure.SHARED),
        taken=total("verifier", StatusFigure.ACCEPTED),
        refused=total("verifier", StatusFigure.REFUSED),
        top_reason=(mostly_refused(view, now) if takes_none else None) or (most[0] if most else None),
        to_score=queue.state.messages if queue else None,
        pool_local=_count(view.newest("sampler", StatusFigure.POOL_LOCAL)),
        pool_external=_count(view.newest("sampler", StatusFigure.POOL_EXTERNAL)),
        wanted_local=_count(view.newest("sampler", StatusFigure.WANTED_LOCAL)),
        wanted_external=_count(view.newest("sampler", StatusFigure.WANTED_EXTERNAL)),
        intake=_intake(view),
        outbox=_count(view.newest("verifier", StatusFigure.OUTBOX)),
        dead=dead.state.messages if dead else None if node.elsewhere else 0,
        unknown_rewards=sum(unknown_rewards(view).values()),
        scorer_kills=total("verifier", StatusFigure.SCORERS_REPLACED),
        phase_shares=_phase_shares(view, now),
        processes=tuple(process_lines(view, now)),
        missing=() if node.elsewhere else tuple(gone(view, now)),
        fills=tuple(_fill(fill, specs) for fill in node.streams),
        starting=() if node.elsewhere else tuple(role for role in ROLES if view.starting(role, now)),
        trouble=(*trouble(view, now), *_doubts(node)),
        stands_still=standing(view, now) is not None,
        finished=finished(view),
        ended=view.ended(now),
        takes_none_s=takes_none,
        held_on=tuple(node.held_on(now)),
        elsewhere=node.elsewhere,
    )


def _doubts(node: NodeSnapshot) -> tuple[str, ...]:
    """Why a node known only from the directory may not exist: anybody may write there."""
    if node.statuses or node.entry is None or node.entry.standing is Standing.SIGNED:
        return ()
    return (f"directory entry {node.entry.standing.value}{f': {node.entry.problem}' if node.entry.problem else ''}",)


def outdated(model: TopModel, age_s: float) -> TopModel:
    """The model of `age_s` ago, because the server does not answer; without rates, which would be
    wrong by now.
    """
    nodes = tuple(replace(node, steps_per_minute=None, phase_shares={}, known_s=age_s) for node in model.nodes)
    return replace(model, nodes=nodes)


def process_lines(view: NodeView, now: float) -> list[ProcessLine]:
    """A node's processes in the order of their roles. A process that is gone is listed only if its
    role has no live one.
    """
    lines = []
    for role in ROLES:
        alive = view.alive(role, now)
        if view.starting(role, now):
            lines.append(ProcessLine(role, "", STARTING, 0.0, 0.0, alive=False))
            continue
        for status in alive or view.roles(role)[:1]:
            silent_s = max(0.0, now - status.updated_at)
            instead = instead_of_state(view, status, now) if status in alive else ""
            age_s = max(0.0, now - status.started_at)
            lines.append(ProcessLine(role, status.replica, status.state, age_s, silent_s, status in alive, instead))
    return lines


def _rate(view: NodeView, seen: float | None, now: float) -> float | None:
    """Steps per minute between looks; at the first look from the length of the newest step. None if
    the node is not training or has stalled.
    """
    if not view.alive("trainer", now) or finished(view) or standing(view, now) is not None:
        return None
    step_s = view.figure("trainer", StatusFigure.STEP_SECONDS)
    return seen if seen is not None else 60.0 / step_s if step_s > 0 else None


def _phase_shares(view: NodeView, now: float) -> dict[str, float]:
    """The phases' shares of the last steps' time; empty if no steps are taken, when they would be
    outdated.
    """
    if not view.alive("trainer", now) or standing(view, now) is not None:
        return {}
    shares = {phase: view.newest("trainer", FigureFamily.SHARE.of(phase)) for phase in PHASES}
    return {phase: min(1.0, max(0.0, share)) for phase, share in shares.items() if share is not None}


def _intake(view: NodeView) -> int | None:
    unread, waiting = view.newest("verifier", StatusFigure.INTAKE_BACKLOG), view.newest("verifier", StatusFigure.INTAKE_WAITING)
    return None if unread is None and waiting is None else int((unread or 0) + (waiting or 0))


def _fill(fill: StreamFill, specs: Mapping[str, StreamSpec]) -> Fill:
    spec, state = specs.get(fill.stream), fill.state
    ratios = []
    if spec and spec.max_msgs > 0:
        ratios.append(state.messages / spec.max_msgs)
    if spec and spec.max_bytes > 0 and state.size_bytes is not None:
        ratios.append(state.size_bytes / spec.max_bytes)
    name = fill.stream.rpartition("_")[2].lower()
    return Fill(name, state.messages, state.size_bytes, max(ratios, default=None), not (spec and spec.discard_new))


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
