"""Records that nodes write for all of a swarm: held-out scores, and entries in the directory.

Scores are kept in bounded memory keyed by names and swarms that senders choose. A sender can push
out its own values, but of others' only those as new as its own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from shared.cancelling import together
from shared.config.verifier_section import ViewConfig
from shared.contracts import subjects
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.wire import DEFAULT_SWARM_ID, MessageError, is_node_name
from shared.identity.roster import RosterError, read_roster
from shared.identity.statements import CheckedStatement, SignatureStatus, check_statement, statement_content, statement_time
from shared.transport.base import Ends, KvEntry, NoStream, StoredMessage, Transport, TransportError
from swarm_cli.errors import CommandError

SWARMS_A_NAME = 4
"""Swarms kept per name. A node is in few swarms on one hub, but a sender can invent any number."""
ESTABLISHED_S = 600.0
"""Seconds between a name's first and last signed report that make it established. Names invented
for an attack have not existed that long."""
NEWCOMERS_PART = 4
"""One in this many places is reserved for names that are not established."""
SILENT_S = 86_400.0
KEYS_A_NAME = 8
NAMES_WITH_KEYS = 8
"""Keys are kept for this many times as many names as reports are."""

ENTRIES_READ = 4096
"""The most directory entries that are read, the newest first. An honest node renews its entry every
10 s; after 15 minutes of silence an entry is removed.
"""

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    """A name's value in one swarm, and when the name was first and last heard there."""

    value: T
    first_at: float
    last_at: float


class BoundedNameMap(Generic[T]):
    """Keeps one value per name and swarm (None: no swarm was named), and the last few swarms of
    each name.

    Anybody can invent names quickly. So a name that has signed for one swarm over `ESTABLISHED_S`
    is established and keeps its place, however many names come after it. The other names compete
    for the remaining places, and those heard last stay.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = names_kept
        self._newcomers: dict[str, dict[str | None, _Slot[T]]] = {}
        """In the order in which they were last heard."""
        self._established: dict[str, dict[str | None, _Slot[T]]] = {}
        """In the order in which they became established."""

    def __iter__(self) -> Iterator[tuple[str | None, str, T]]:
        """Swarm, name and value."""
        for names in (self._established, self._newcomers):
            for name, swarms in names.items():
                for swarm, slot in swarms.items():
                    yield swarm, name, slot.value

    def get(self, swarm: str | None, name: str) -> T | None:
        """The kept value; None if there is none."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.value

    def established(self) -> list[str]:
        """Names that keep their places."""
        return list(self._established)

    def since(self, swarm: str | None, name: str) -> float | None:
        """When the name was first heard in this swarm; None if it is not kept."""
        slot = self._swarms(name).get(swarm)
        return None if slot is None else slot.first_at

    def is_established(self, swarm: str | None, name: str) -> bool:
        """Check whether the name has signed for this swarm over `ESTABLISHED_S`."""
        slot = self._swarms(name).get(swarm)
        return slot is not None and _is_established(swarm, slot)

    def put(self, swarm: str | None, name: str, value: T, looked_at: str | None, at: float, *, listed: bool = False) -> None:
        """Keep `value` as the newest. A name's value in the swarm `looked_at` is never dropped for
        its value in another swarm.

        Args:
            at: When it was sent, by the server's clock, which the sender cannot set.
            listed: Whether the reader's roster has the name.
        """
        swarms = self._swarms(name)
        last = swarms.pop(swarm, None)
        slot = swarms[swarm] = _Slot(value, at if last is None else last.first_at, at)
        if len(swarms) > SWARMS_A_NAME:
            del swarms[_to_forget(swarms, {swarm, looked_at})]
        if name not in self._established:
            self._newcomers.pop(name, None)
            kept = self._established if listed or _is_established(swarm, slot) else self._newcomers
            kept[name] = swarms
        if len(self._established) + len(self._newcomers) > self._names_kept:
            self._make_room(at)

    def _swarms(self, name: str) -> dict[str | None, _Slot[T]]:
        return self._established.get(name) or self._newcomers.get(name) or {}

    def _make_room(self, now: float) -> None:
        """Drop a newcomer. If the established names have more than their share, drop one of them
        instead: a silent one, or else the youngest.
        """
        if self._newcomers and len(self._established) <= self._names_kept - self._names_kept // NEWCOMERS_PART:
            del self._newcomers[next(iter(self._newcomers))]
            return
        silent = (
            name for name, swarms in self._established.items() if all(slot.last_at < now - SILENT_S for slot in swarms.values())
        )
        del self._established[next(silent, next(reversed(self._established)))]


def _to_forget(swarms: Mapping[str | None, _Slot[T]], kept: Collection[str | None]) -> str | None:
    """The swarm of a name to drop: the youngest in which the name is not established, because
    somebody else may have invented it; else the one last heard longest ago.
    """
    others = [swarm for swarm in swarms if swarm not in kept]
    made_up = [swarm for swarm in others if not _is_established(swarm, swarms[swarm])]
    return max(made_up, key=lambda swarm: swarms[swarm].first_at) if made_up else others[0]


def _is_established(swarm: str | None, slot: _Slot[T]) -> bool:
    return swarm is not None and slot.last_at - slot.first_at >= ESTABLISHED_S


class FirstKeys:
    """The first key of each name in each swarm. If there are too many names, the newest is dropped:
    an early name keeps its key, however many come after it.
    """

    def __init__(self, names_kept: int) -> None:
        self._names_kept = NAMES_WITH_KEYS * names_kept
        self._kept: dict[str, dict[str, str]] = {}

    def get(self, swarm: str, name: str) -> str | None:
        """The name's key; None if it has none yet."""
        return self._kept.get(name, {}).get(swarm)

    def first(self, swarm: str, name: str, public_key: str) -> str:
        """The name's key; if it had none, `public_key` becomes its key."""
        if name not in self._kept and len(self._kept) >= self._names_kept:
            self._kept.popitem()
        keys = self._kept.setdefault(name, {})
        if swarm not in keys and len(keys) >= KEYS_A_NAME:
            keys.popitem()
        return keys.setdefault(swarm, public_key)


def with_places(found: Sequence[T], most: int, is_known: Callable[[T], bool]) -> list[T]:
    """At most `most` of the entries in `found`, in their order. Known ones are kept before all
    others, so that invented names cannot push them out.
    """
    known = [place for place, each in enumerate(found) if is_known(each)]
    others = [place for place, each in enumerate(found) if not is_known(each)]
    return [found[place] for place in sorted([*known, *others][:most])]


REPORTS_A_LOOK = 8192
"""The most new reports that one look reads, the newest."""
REPORTS_A_NODE = 256
NODES_KEPT = 1024
SENIOR_S = 6 * 3600.0
"""The newest 1,024 scores of a node, which is what a server keeps, go back as far where it
evaluates every 21 s.
"""
_REPORTS_A_READ = 1024
_ASKED_FOR = 128
"""The most names whose last report is requested separately if a flood hides it."""
ASKED_AT_ONCE = 32
NOT_ON_ROSTER = "the roster does not list this key with this name"
OTHER_KEY = "another key signed for this name before"


def configured_swarm(config: ViewConfig) -> str | None:
    """The swarm that the configuration names; None if it has the default, because `swarm up` names
    a swarm after its run, which a command in another terminal does not know.
    """
    return None if config.nats.swarm_id == DEFAULT_SWARM_ID else config.nats.swarm_id


class _Reports:
    """A node's reports in one swarm, in the order of the stream, without signed ones sent again."""

    def __init__(self) -> None:
        self.newest: deque[CheckedStatement[EvalReport]] = deque(maxlen=REPORTS_A_NODE)
        self.base: CheckedStatement[EvalReport] | None = None
        self._newest_signed: tuple[float, int] | None = None

    def add(self, heard: CheckedStatement[EvalReport]) -> None:
        """Keep a report, unless it is signed and no newer than one that is kept: anybody who reads
        an open hub can send a signed report again, as often as it takes to push out the newer ones.
        """
        when = (heard.said.created_at, heard.said.policy_version)
        if heard.standing is SignatureStatus.SIGNED:
            if self._newest_signed is not None and when <= self._newest_signed:
                return
            self._newest_signed = when
        self.newest.append(heard)
        if heard.said.policy_version == 0:
            self.base = heard

    def all(self) -> list[CheckedStatement[EvalReport]]:
        """The newest reports, and the base policy's even if newer ones have pushed it out: every
        gain is measured against it.
        """
        pushed_out = self.base is not None and self.base not in self.newest
        return [*([self.base] if self.base is not None and pushed_out else []), *self.newest]


def roster_of(config: ViewConfig) -> dict[str, str] | None:
    """Keys by name if the configuration trusts a roster; None if it trusts first keys.

    Raises:
        CommandError: the roster cannot be used.
    """
    if config.verifier.trust != "roster":
        return None
    try:
        return {name: entry.public_key for name, entry in read_roster(config.verifier.roster_file).items()}
    except RosterError as error:
        raise CommandError(str(error)) from None


class EvaluationLog:
    """Keeps the newest reports of each node, and reads only new ones at each look. If there are too
    many nodes, it keeps those that have signed for long, then those that reported last. As at the
    border, a name in a swarm belongs to the first key seen with it or, with a roster, to the key
    listed there.

    `tasks_kept`: how many results by dataset are kept per report. `nodes_kept`: how many names.
    `roster`: keys by name. `swarm`: if known, the only swarm whose signed reports are kept.
    """

    def __init__(
        self,
        tasks_kept: int = 0,
        nodes_kept: int = NODES_KEPT,
        roster: Mapping[str, str] | None = None,
        swarm: str | None = None,
    ) -> None:
        self._roster = roster
        self._tasks_kept = tasks_kept
        self._nodes_kept = nodes_kept
        self._only = swarm
        self._looked_at = swarm
        self._begin()

    def _begin(self) -> None:
        self._kept = BoundedNameMap[_Reports](self._nodes_kept)
        self._keys = FirstKeys(self._nodes_kept)
        self._next_seq = 1
        self._heard_at = 0.0

    def heard(self, swarm: str | None) -> list[CheckedStatement[EvalReport]]:
        """The kept reports of a swarm, each node's in the order of the stream, and all unsigned
        ones. `swarm` None: the one that most names report to. Reports of one name in different
        swarms are never mixed.
        """
        swarm = self.usual_swarm() if swarm is None else swarm
        return [each for made_for, _, reports in self._kept if made_for in (None, swarm) for each in reports.all()]

    def established(self) -> list[str]:
        """Names that keep their places: the roster's, or those that have signed for long, in the
        order in which they came.
        """
        return self._kept.established() if self._roster is None else list(self._roster)

    def senior_swarm(self, entries: Iterable[CheckedStatement[NodeRecord]]) -> str | None:
        """The swarm of most nodes in the directory that have signed reports for `SENIOR_S`, by the
        server's clock, or before there is one of the node that has for longest: names that come in
        numbers later have no vote. None where none has signed any.

        Longer than that does not count more: the server keeps each name's newest reports, and who
        reports seldom would look older than everybody else.
        """
        since = [
            (first_at, entry.swarm)
            for entry in entries
            if entry.standing is SignatureStatus.SIGNED
            and entry.swarm is not None
            and self.key_of(entry.swarm, entry.said.node) == entry.public_key
            and (first_at := self._kept.since(entry.swarm, entry.said.node)) is not None
        ]
        senior = Counter(swarm for first_at, swarm in since if first_at <= self._heard_at - SENIOR_S)
        first = dict(reversed(sorted((swarm, first_at) for first_at, swarm in since)))
        return max(senior or first, key=lambda swarm: (senior[swarm], -first[swarm], swarm), default=None)

    def usual_swarm(self) -> str | None:
        """The swarm that most names report to, counting only established names if there are any;
        None if no report is signed.
        """
        signed = [(swarm, name) for swarm, name, _ in self._kept if swarm is not None]
        senior = [(swarm, name) for swarm, name in signed if self._kept.is_established(swarm, name)]
        names = Counter(swarm for swarm, _ in senior or signed)
        return max(names, key=lambda swarm: (names[swarm], swarm), default=None)

    def key_of(self, swarm: str, name: str) -> str | None:
        """The key that owns the name; None if no key does yet."""
        return self._keys.get(swarm, name) if self._roster is None else self._roster.get(name)

    def checked(self, entry: CheckedStatement[NodeRecord]) -> CheckedStatement[NodeRecord]:
        """A directory entry; refused if another key owns the name or the roster does not list the
        key, so that two keys' words are never shown as one node's.
        """
        key = self.key_of(entry.swarm or "", entry.said.node)
        free = key is None and self._roster is None
        if entry.standing is not SignatureStatus.SIGNED or free or key == entry.public_key:
            return entry
        problem = OTHER_KEY if self._roster is None else NOT_ON_ROSTER
        return CheckedStatement(entry.said, SignatureStatus.REFUSED, entry.public_key, entry.swarm, problem)

    def reports(self, swarm: str | None) -> list[EvalReport]:
        """Like `heard`, but without unsigned reports of nodes that also sign."""
        heard = self.heard(swarm)
        signing = {each.said.node for each in heard if each.standing is SignatureStatus.SIGNED}
        return [
            each.said
            for each in heard
            if each.standing is SignatureStatus.SIGNED
            or (each.standing is SignatureStatus.UNSIGNED and each.said.node not in signing)
        ]

    def unsigned(self, swarm: str | None) -> frozenset[str]:
        """Names of which `reports` has only unsigned reports."""
        heard = self.heard(swarm)
        signing = {each.said.node for each in heard if each.standing is SignatureStatus.SIGNED}
        return frozenset(each.said.node for each in heard if each.standing is SignatureStatus.UNSIGNED) - signing

    async def follow(self, swarm_plane: Transport, swarm: str | None = None) -> None:
        """Read the new reports. If the stream is shorter than what was read, it is another
        server's: start over. `swarm`: the one being looked at; reports to other swarms do not push
        its out.
        """
        self._looked_at = self._only or swarm or self._looked_at
        try:
            unread = await swarm_plane.ends(subjects.SWARM_EVALS, self._next_seq)
            if unread.first is None and await self._is_another(swarm_plane):
                self._begin()
                unread = await swarm_plane.ends(subjects.SWARM_EVALS)
            if unread.messages > REPORTS_A_LOOK:
                await self._skip(swarm_plane, await _newest(swarm_plane, unread))
            # A fixed number of reads, so that a look ends however fast somebody writes.
            for _ in range(REPORTS_A_LOOK // _REPORTS_A_READ + 1):
                messages = await swarm_plane.read(subjects.SWARM_EVALS, self._next_seq, _REPORTS_A_READ)
                if not messages:
                    return
                self._read(messages)
        except TransportError:
            return

    async def _is_another(self, swarm_plane: Transport) -> bool:
        """Check whether the stream is shorter than what was read. An empty one may be the same,
        whose reports became too old.
        """
        newest = await swarm_plane.last(subjects.SWARM_EVALS, ">")
        return newest is not None and newest.seq + 1 < self._next_seq

    async def _skip(self, swarm_plane: Transport, next_seq: int) -> None:
        """Skip to `next_seq`, because there are more new reports than are read. They may have been
        written to hide others. So first read the oldest reports, which show the earlier names and
        their keys, and the last report of each established name and of each in the directory.
        """
        if self._next_seq == 1:
            self._read(await swarm_plane.read(subjects.SWARM_EVALS, 1, _REPORTS_A_READ))
        known = dict.fromkeys([*self.established(), *await _listed(swarm_plane)])
        last = await _asked(
            lambda name: swarm_plane.last(subjects.SWARM_EVALS, subjects.evals(name)), list(islice(known, _ASKED_FOR))
        )
        self._take_all([each for each in last if each is not None and self._next_seq <= each.seq < next_seq])
        self._next_seq = max(self._next_seq, next_seq)

    def _read(self, messages: Sequence[StoredMessage]) -> None:
        """Take the messages and remember how far they were read."""
        self._take_all(messages)
        self._next_seq = messages[-1].seq + 1 if messages else self._next_seq

    def _take_all(self, messages: Sequence[StoredMessage]) -> None:
        now = time.time()
        for message in messages:
            # A report is never large enough for a claim check, so a message with one is not a
            # report and is not fetched.
            if message.inline is not None:
                self.take(message.subject, message.inline, now, message.stored_at)

    def take(self, subject: str, payload: bytes, now: float, stored_at: float | None = None) -> None:
        """Keep one report, if its node is the one whose subject it came on and its signature is not
        refused. `stored_at`: when the server received it; None: now.
        """
        try:
            heard = check_statement(payload, EvalReport, now)
        except MessageError:
            return
        if subject != subjects.evals(heard.said.node):
            return
        swarm, name, at = heard.swarm, heard.said.node, now if stored_at is None else stored_at
        if self._only is not None and swarm not in (None, self._only):
            return
        self._heard_at = max(self._heard_at, at)
        kept = self._kept.get(swarm, name) or _Reports()
        is_signed = heard.standing is SignatureStatus.SIGNED
        strange = is_signed and not self._is_owner(swarm or "", name, heard.public_key or "", kept)
        if strange or heard.standing is SignatureStatus.REFUSED:
            return
        per_task = dict(islice(heard.said.per_task.items(), self._tasks_kept))
        said = msgspec.structs.replace(heard.said, per_task=per_task)
        kept.add(CheckedStatement(said, heard.standing, heard.public_key, swarm))
        listed = is_signed and self._roster is not None
        self._kept.put(swarm, name, kept, self._looked_at, at, listed=listed)

    def _is_owner(self, swarm: str, name: str, public_key: str, kept: _Reports) -> bool:
        """Check whether the name belongs to this key. The kept reports count as well, because the
        key may have been forgotten after too many others.
        """
        if self._roster is not None:
            return self._roster.get(name) == public_key
        first = kept.newest[-1].public_key or "" if kept.newest else public_key
        return self._keys.first(swarm, name, first) == public_key


async def _newest(swarm_plane: Transport, unread: Ends) -> int:
    """Where the newest REPORTS_A_LOOK reports begin. Reports that the stream no longer keeps do not
    count: a member can write thousands of which the stream keeps few.
    """
    too_early, start = unread.first_seq, unread.last_seq
    while start - too_early > 1:
        middle = (too_early + start) // 2
        if (await swarm_plane.ends(subjects.SWARM_EVALS, middle)).messages > REPORTS_A_LOOK:
            too_early = middle
        else:
            start = middle
    return start


async def _asked(ask: Callable[[str], Coroutine[Any, Any, T]], names: Sequence[str]) -> list[T]:
    """The answers about these names, asked for `ASKED_AT_ONCE` at a time: one after the other they
    would take longer than a look may, where each is a way to another continent.
    """
    found: list[T] = []
    for begin in range(0, len(names), ASKED_AT_ONCE):
        found += await together(*map(ask, names[begin : begin + ASKED_AT_ONCE]))
    return found


async def _listed(swarm_plane: Transport) -> list[str]:
    """The names that renewed their entries of the directory last."""
    try:
        entries, _ = await swarm_plane.kv.newest(subjects.SWARM_NODES_BUCKET, _ASKED_FOR)
    except TransportError:
        return []
    return [entry.key for entry in entries]


# The swarm's directory, `swarm_nodes`.


@dataclass(frozen=True, slots=True)
class Directory:
    """Names of nodes, newest entry first, and their entries. `unreadable`: number of invalid
    entries; `left_out`: number of entries that were not read; `problem`: why none could be read.
    """

    names: tuple[str, ...] = ()
    unreadable: int = 0
    left_out: int = 0
    payloads: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""

    def entry(self, name: str) -> CheckedStatement[NodeRecord] | None:
        """A node's entry with its signature checked; None if it has none."""
        payload = self.payloads.get(name)
        return None if payload is None else check_statement(payload, NodeRecord, time.time())

    def entries(self, swarm: str | None = None) -> list[CheckedStatement[NodeRecord]]:
        """All entries, each with its signature checked; entries for another swarm than `swarm` are
        refused.
        """
        now = time.time()
        return [check_statement(payload, NodeRecord, now, swarm) for payload in self.payloads.values()]


def usual_swarm(entries: Iterable[CheckedStatement[NodeRecord]], now: float) -> str | None:
    """The swarm that most nodes' signed entries name; None if no entry is signed.

    If several swarms have equally many nodes, the newest entry decides. An entry from the future
    counts as a node but never as the newest, because its sender could then choose the swarm.
    """
    names, newest = Counter[str](), dict[str, float]()
    for entry in entries:
        if entry.standing is SignatureStatus.SIGNED and entry.swarm is not None:
            names[entry.swarm] += 1
            at = statement_time(entry.said)
            newest[entry.swarm] = max(newest.get(entry.swarm, 0.0), at if at <= now else 0.0)
    return max(names, key=lambda swarm: (names[swarm], newest[swarm], swarm), default=None)


def directory(entries: Iterable[KvEntry], left_out: int = 0) -> Directory:
    """The directory made of `entries`. A valid entry has the node's name both as its key and in its
    record, and its record decodes.
    """
    payloads, unreadable = {}, 0
    for entry in entries:
        try:
            listed = is_node_name(entry.key) and statement_content(entry.value, NodeRecord).node == entry.key
        except MessageError:
            listed = False
        if listed:
            payloads[entry.key] = entry.value
        else:
            unreadable += 1
    return Directory(tuple(payloads), unreadable, left_out, payloads)


async def read_directory(swarm_plane: Transport, wanted: Sequence[str] = ()) -> Directory:
    """The newest entries, and those of the nodes in `wanted`. Empty if there is no directory yet;
    with its `problem` if it cannot be read.
    """
    bucket = subjects.SWARM_NODES_BUCKET
    try:
        entries, left_out = await swarm_plane.kv.newest(bucket, ENTRIES_READ)
        known = {entry.key for entry in entries}
        missing = [name for name in wanted if name not in known] if left_out else []
        found = await _asked(lambda name: swarm_plane.kv.get(bucket, name), missing)
    except NoStream:
        return Directory()
    except TransportError as error:
        return Directory(problem=f"the swarm's directory could not be read, so nodes on other servers are missing: {error}")
    asked = [entry for entry in found if entry is not None]
    return directory([*entries, *asked], left_out - len(asked))
