"""A simulated node's border: the services' own fair queue and checks, applied to the same bytes
that would cross the swarm plane.

Only the sandbox is left out. It protects a node from answers that make a scorer hang or use up
memory, and here this process sampled all the text itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import nkeys

from lab.task_desk import TaskDesk
from services.trainer.selection.left_out import absurd_text
from services.verifier.border import Border, Candidate, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.copies import CopyMemory, Fingerprint, Fingerprinter, ReplayMemory
from services.verifier.episodes import without_token_ids
from services.verifier.fair_queue import FairQueue
from services.verifier.reputation import apply_findings
from services.verifier.rewards import foreign_rewards
from services.verifier.sharing import WHOLE, Content, sign
from services.verifier.swarm_reader import BURST_S
from services.verifier.trust import Trust
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.messages import RolloutGroup, ScoredGroup
from shared.identity.keys import SigningKey
from shared.model.prompts import tokenizer_hash
from shared.seeds import bytes_from
from shared.tasks.sandbox.jobs import JobResult

_SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class SwarmMessage:
    """A message as stored in the swarm's stream."""

    sender: str
    subject: str
    payload: bytes


class KnownNames:
    """Trust in a swarm whose members are known: every name belongs to one key."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys = keys

    def may_use(self, name: str, public_key: str, now_s: float) -> bool:
        """Whether the name is this key's."""
        return self._keys.get(name) == public_key

    def bind(self, name: str, public_key: str, now_s: float) -> bool:
        """Like `may_use`."""
        return self.may_use(name, public_key, now_s)

    def key_of(self, name: str) -> str | None:
        """The key of a name."""
        return self._keys.get(name)


def node_key(name: str, seed: int) -> SigningKey:
    """A key derived from the name and seed, always the same. For simulations only, because anyone
    can compute it.
    """
    raw = bytearray(bytes_from(f"lab {name} {seed}"))
    return SigningKey(bytes(nkeys.encode_seed(raw, nkeys.PREFIX_BYTE_USER)))


def swarm_message(group: RolloutGroup, key: SigningKey, config: NodeConfig) -> SwarmMessage:
    """The message in which a node shares the group."""
    # Nodes of a study may weigh others' text, so that they are sent all that can be.
    content = WHOLE if config.verifier.share_tokens else Content("text")
    signed = sign(group, key, content, swarm_id=config.nats.swarm_id)
    return SwarmMessage(group.node, subjects.rollouts(group.node), encode(signed))


_SALT = b"lab"
_MOST_PRINTS = 4096


class _SharedPrints(CopyMemory):
    """A memory of copies whose fingerprints are computed once for all nodes of this process."""

    def fingerprint(self, answers: Sequence[str]) -> Fingerprint:
        """See `Fingerprinter.fingerprint`."""
        return _fingerprint(tuple(answers))


@cache
def _printer() -> Fingerprinter:
    return Fingerprinter(_SALT)


@lru_cache(_MOST_PRINTS)
def _fingerprint(answers: tuple[str, ...]) -> Fingerprint:
    return _printer().fingerprint(answers)


class SimBorder:
    """One node's border: decides which foreign groups it accepts."""

    def __init__(self, config: NodeConfig, desk: TaskDesk, keys: dict[str, str], now_s: float, trust: Trust | None = None) -> None:
        """`keys`: the keys of all names; `trust` replaces them if names are not known
        beforehand.
        """
        trust = trust or KnownNames(keys)
        verifier = config.verifier
        self._desk = desk
        self._node = config.node.id
        self._tokenizer_hash = tokenizer_hash(desk.tokenizer)
        self._partial_credit = verifier.foreign_partial_credit
        self._border = Border(
            # All members are known here, as with a roster.
            BorderRules.of(config, "dataset" if verifier.accept == "auto" else verifier.accept),
            trust,
            ReplayMemory(verifier.replay_memory),
            desk.held_out,
            _SharedPrints(_SALT),
        )
        self._queue: FairQueue[tuple[int, SwarmMessage]] = FairQueue(
            verifier.intake_groups_per_s, verifier.max_sender_share, BURST_S, now_s, verifier.newcomer_share
        )
        self._seq = 0
        self._trust = trust

    def note_findings(self, batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int], now_s: float) -> None:
        """Record what training on a batch showed about its senders."""
        apply_findings(self._border.reputation, self._trust, absurd_text(batch, absurd_of, trained_of), 0, now_s)

    def note_own(self, group: RolloutGroup) -> None:
        """Record a group that this node sampled."""
        self._border.note_own(group)

    def admit(self, messages: Sequence[SwarmMessage], now_s: float, round_s: float) -> tuple[list[ScoredGroup], Counter[str]]:
        """The groups accepted from a round's messages, in the order of the checks, and the number
        of refusals by reason.

        The budget accrues over the round that ends at `now_s`; messages that exceed it are refused
        as a flood.
        """
        refused: Counter[str] = Counter()
        accepted: list[ScoredGroup] = []
        for message in messages:
            self._seq += 1
            if message.sender != self._node:
                claimed = self._border.senders.by_name(message.sender, now_s)
                waiting = (self._seq, message)
                lost = self._queue.offer(claimed.account, waiting, len(message.payload), now_s - round_s, claimed.earned)
                refused["flood"] += len(lost)
        slices = max(1, round(round_s / _SLICE_S))
        for number in range(slices + 1):
            at_s = now_s - round_s + number * round_s / slices
            while (found := self._queue.next(at_s)) is not None:
                sender, (seq, message) = found
                scored = self._look_at(message, seq, now_s)
                if isinstance(scored, ScoredGroup):
                    accepted.append(scored)
                else:
                    refused[scored.reason.value] += 1
                    if not scored.costly:
                        self._queue.refund(sender, blameless=False)
            if not len(self._queue):
                break
        return accepted, +refused

    def _look_at(self, message: SwarmMessage, seq: int, now_s: float) -> ScoredGroup | Refused:
        """The scored group, or why it is refused. Scoring happens in this process and
        costs nothing on the simulated clock; the time that a sender costs a verifier is measured
        only with real processes.
        """
        verdict = self._border.examine(message.subject, message.payload, now_s, seq)
        if not isinstance(verdict, Candidate):
            return verdict
        group = verdict.group
        rewards = self._desk.score(group.task.ref, [completion.text for completion in group.completions])
        refused = self._border.conclude(verdict, JobResult([*rewards], None, None, "", 0, 0.0), now_s)
        if refused is not None:
            return replace(refused, costly=True)
        signer = self._border.senders.by_key(verdict.public_key, now_s)
        same = group.model.tokenizer_hash == self._tokenizer_hash
        passed = self._desk.passed(group.task.ref, rewards)
        return ScoredGroup(
            group_id=verdict.group_id,
            origin="external",
            group=group if same else without_token_ids(group),
            rewards=rewards if self._partial_credit else foreign_rewards(rewards, passed),
            passed=passed,
            scored_by=self._node,
            score_seconds=0.0,
            scored_at=now_s,
            account=signer.account,
            established=signer.established,
        )
