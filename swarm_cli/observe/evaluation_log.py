"""The held-out scores that nodes reported to the swarm, with their signatures checked, for `swarm
top` and the page. Anybody can write there: a bounded part is kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import chain, islice

import msgspec

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.control import EvalReport
from shared.contracts.wire import MessageError
from shared.identity.roster import RosterError, read_roster
from shared.identity.statements import Heard, Standing, hear
from shared.transport.base import Transport, TransportError
from swarm_cli.errors import CommandError

REPORTS_A_LOOK = 8192
"""Of a stream with more that is new, the newest."""
REPORTS_A_NODE = 256
NODES_KEPT = 1024
_REPORTS_A_READ = 1024
NOT_ON_ROSTER = "the roster does not list this key with this name"
OTHER_KEY = "another key signed for this name before"

Sender = tuple[str | None, str]
"""Swarm (None of an unsigned report) and name."""


def roster_of(config: NodeConfig) -> dict[str, str] | None:
    """Keys by name where the configuration trusts a roster; None where it trusts first keys.

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
    """Read on from look to look; of each node the newest reports, of many nodes those that reported
    last. As at the border, a name in a swarm belongs to the first key that is seen with it, and
    where there is a roster to the key that it lists.

    `tasks_kept`: results by dataset that are kept of a report. `roster`: keys by name.
    """

    def __init__(self, tasks_kept: int = 0, nodes_kept: int = NODES_KEPT, roster: Mapping[str, str] | None = None) -> None:
        self._roster = roster
        self._tasks_kept = tasks_kept
        self._nodes_kept = nodes_kept
        self._begin()

    def _begin(self) -> None:
        self._by_node: dict[Sender, deque[Heard[EvalReport]]] = {}
        self._refused: dict[Sender, Heard[EvalReport]] = {}
        self._bases: dict[Sender, Heard[EvalReport]] = {}
        self._keys: dict[Sender, str] = {}
        self._next_seq = 1

    def heard(self, swarm: str | None) -> list[Heard[EvalReport]]:
        """What is kept of a swarm, each node's in the order of the stream, and all that is
        unsigned; of those whose signature is refused, the last of each name. `swarm` None: it is
        not known which, and all are given.
        """
        wanted = [sender for sender in self._by_node if swarm is None or sender[0] in (None, swarm)]
        kept = [each for sender in wanted for each in chain(self._old_base(sender), self._by_node[sender])]
        return kept + [each for sender, each in self._refused.items() if swarm is None or sender[0] == swarm]

    def reports(self, swarm: str | None) -> list[EvalReport]:
        """As `heard`, without those whose signature is refused, and without unsigned ones of a node
        that signs.
        """
        heard = self.heard(swarm)
        signing = {each.said.node for each in heard if each.standing is Standing.SIGNED}
        return [
            each.said
            for each in heard
            if each.standing is Standing.SIGNED or (each.standing is Standing.UNSIGNED and each.said.node not in signing)
        ]

    def unsigned(self, swarm: str | None) -> frozenset[str]:
        """Names of which `reports` has unsigned ones only."""
        heard = self.heard(swarm)
        signing = {each.said.node for each in heard if each.standing is Standing.SIGNED}
        return frozenset(each.said.node for each in heard if each.standing is Standing.UNSIGNED) - signing

    async def follow(self, swarm_plane: Transport) -> None:
        """Read what is new. A server whose stream is shorter than what was read is another one:
        begin again.
        """
        try:
            state = await swarm_plane.stream_state(subjects.SWARM_EVALS)
            if state.last_seq + 1 < self._next_seq:
                self._begin()
            self._next_seq = max(self._next_seq, state.last_seq - REPORTS_A_LOOK + 1)
            # No more reads than that takes, so that a look ends however fast somebody writes.
            for _ in range(REPORTS_A_LOOK // _REPORTS_A_READ + 1):
                messages = await swarm_plane.read(subjects.SWARM_EVALS, self._next_seq, _REPORTS_A_READ)
                if not messages:
                    return
                self._next_seq = messages[-1].seq + 1
                now = time.time()
                for message in messages:
                    # A report is never large enough for a claim check: one that says so wants to be
                    # fetched, not read.
                    if message.inline is not None:
                        self.take(message.subject, message.inline, now)
        except TransportError:
            return

    def take(self, subject: str, payload: bytes, now: float) -> None:
        """Keep one report, if it is one of the node whose subject it came on."""
        try:
            heard = hear(payload, EvalReport, now)
        except MessageError:
            return
        if subject != subjects.evals(heard.said.node):
            return
        sender = (heard.swarm, heard.said.node)
        if heard.standing is Standing.SIGNED and (problem := self._stranger(sender, heard.public_key or "")):
            heard = Heard(heard.said, Standing.REFUSED, heard.public_key, heard.swarm, problem)
        per_task = dict(islice(heard.said.per_task.items(), self._tasks_kept))
        said = msgspec.structs.replace(heard.said, per_task=per_task)
        heard = Heard(said, heard.standing, heard.public_key, heard.swarm, heard.problem)
        if heard.standing is Standing.REFUSED:
            # Apart, so that forged reports push none of the node's own out.
            self._refused[sender] = heard
            if len(self._refused) > self._nodes_kept:
                del self._refused[next(iter(self._refused))]
            return
        kept = self._by_node.pop(sender, None) or deque(maxlen=REPORTS_A_NODE)
        kept.append(heard)
        self._by_node[sender] = kept
        if said.policy_version == 0:
            self._bases[sender] = heard
        if len(self._by_node) > self._nodes_kept:
            forgotten = next(iter(self._by_node))
            for known in (self._by_node, self._bases, self._keys):
                known.pop(forgotten, None)

    def _stranger(self, sender: Sender, public_key: str) -> str:
        """Why the name is not this key's; empty where it is."""
        if self._roster is not None:
            return "" if self._roster.get(sender[1]) == public_key else NOT_ON_ROSTER
        return "" if self._keys.setdefault(sender, public_key) == public_key else OTHER_KEY

    def _old_base(self, sender: Sender) -> list[Heard[EvalReport]]:
        """The base policy's report, where newer ones have pushed it out: every gain is measured
        against it.
        """
        base = self._bases.get(sender)
        return [] if base is None or base in self._by_node[sender] else [base]
