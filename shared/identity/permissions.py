"""Who may publish and subscribe to what on a secured server: the only definition.
`swarm nats config` renders it.

A node's user on the swarm plane publishes only under the node's name and reads only by direct get;
each role of a node has its own user on the node plane. Permissions alone would not confine them,
because the server does not check the reply subject of a request. So every user except an operator
has its own account, whose imports are these permissions (`swarm_cli.nats.server_config`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts import subjects
from shared.contracts.subjects import FINDINGS_KEY, REPUTATION_KEY, SENDERS_PREFIX
from shared.roles import OBSERVER, OPERATOR, ROLES, SEVERAL
from shared.transport.base import bucket_stream
from shared.transport.blobs import companion_name, companion_subject

ADVISORY = "$JS.EVENT.ADVISORY.API"
"""Subject on which JetStream reports, in the streams' account, each API request and its sender."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


SWARM_ACCOUNT = "SWARM"
"""The account with the swarm's streams."""


def node_account_name(node: str) -> str:
    """Name of the account with a node's streams."""
    return f"NODE_{node.upper()}"


def user_account(streams: str, user: str) -> str:
    """Name of a user's account: that of the streams for their operator, else one of its own, which
    is unique because names of nodes have no underscore.
    """
    return streams if user == OPERATOR else f"{streams}_{user.upper()}"


EVERYTHING = Permissions((">",), (">",))


def inbox(node: str, role: str) -> str:
    """Prefix of a role's reply subjects."""
    return f"_INBOX_{node}.{role}"


def swarm_node(node: str) -> Permissions:
    """A node on the swarm plane: writes its rollouts, scores and directory entry; reads all streams
    by direct get. It may not ask about a stream: the server serves one `STREAM.INFO` after the
    other for everybody, and with a request of 24 bytes it lists every deletion of the stream.
    """
    streams = (
        *_with_chunks(subjects.SWARM_ROLLOUTS),
        subjects.SWARM_EVALS,
        bucket_stream(subjects.SWARM_NODES_BUCKET),
    )
    return Permissions(
        publish=(
            *_with_chunk_subject(subjects.rollouts(node)),
            subjects.evals(node),
            _key(subjects.SWARM_NODES_BUCKET, node),
            *_direct(streams),
        ),
        subscribe=(f"_INBOX_{node}.>",),
    )


def swarm_observer() -> Permissions:
    """A spectator on the swarm plane: reads scores and directory by direct get, and no groups, so
    that nobody with the shared key can make the server send them.
    """
    streams = (subjects.SWARM_EVALS, bucket_stream(subjects.SWARM_NODES_BUCKET))
    return Permissions(publish=_direct(streams), subscribe=(f"_INBOX_{OBSERVER}.>",))


def node_role(node: str, role: str) -> Permissions:
    """A role on its node's plane. Raises ValueError for a role that does not exist."""
    if role not in _NEEDS:
        raise ValueError(f"no role {role!r}: one of {', '.join(ROLES)}")
    needs, bucket = _NEEDS[role](node), subjects.node_bucket(node)
    publish = (
        *needs.publish,
        *(_key(bucket, key) for key in (*needs.keys, _status(role), _lease(role))),
        subjects.node_name(node),
        *_reading((*needs.reads, bucket_stream(bucket), subjects.node_name_stream(node))),
        *_looking(node, needs.reads),
    )
    return Permissions(
        publish=tuple(dict.fromkeys(publish)),
        subscribe=(f"{inbox(node, role)}.>", *(_key(bucket, key) for key in needs.watched)),
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """Needs of one role beyond those of all roles: subjects and requests, keys written, streams
    read, keys watched.
    """

    publish: tuple[str, ...]
    keys: tuple[str, ...]
    reads: tuple[str, ...]
    watched: tuple[str, ...] = ()


def _generator(node: str) -> _Needs:
    rollouts = subjects.node_rollouts_stream(node)
    return _Needs(
        publish=(*_with_chunk_subject(subjects.node_rollouts(node)), _dropping(_chunks(rollouts))),
        keys=(subjects.LEDGER_KEY, subjects.EVAL_KEY, subjects.EVAL_TURN_KEY, subjects.POLICY_REFUSED_KEY),
        reads=(*_with_chunks(rollouts), subjects.node_policies_stream(node)),
        watched=(subjects.POLICY_KEY, subjects.SAMPLER_KEY),
    )


def _verifier(node: str) -> _Needs:
    rollouts, consumer = subjects.node_rollouts_stream(node), subjects.VERIFIER_CONSUMER
    streams = (rollouts, subjects.node_scored_stream(node), subjects.node_dead_letters_stream(node))
    return _Needs(
        publish=(
            *_with_chunk_subject(subjects.node_scored(node)),
            *_with_chunk_subject(subjects.node_dead_letters(node)),
            f"$JS.API.CONSUMER.MSG.NEXT.{rollouts}.{consumer}",
            # Both formats of acknowledgement subjects (ADR-15): without and with domain and
            # account.
            f"$JS.ACK.{rollouts}.{consumer}.>",
            f"$JS.ACK.*.*.{rollouts}.{consumer}.>",
            *(_dropping(_chunks(stream)) for stream in streams),
        ),
        keys=(subjects.INTAKE_KEY, subjects.REWARD_VALUES_KEY, f"{SENDERS_PREFIX}*", REPUTATION_KEY, subjects.SWARM_NAME_KEY),
        reads=tuple(name for stream in streams for name in _with_chunks(stream)),
    )


def _sampler(node: str) -> _Needs:
    scored, batches = subjects.node_scored_stream(node), subjects.node_batches_stream(node)
    return _Needs(
        publish=(
            *_with_chunk_subject(subjects.node_batches(node)),
            *_purging(scored),
            f"$JS.API.STREAM.PURGE.{_chunks(scored)}",
            _dropping(_chunks(batches)),
        ),
        keys=(subjects.SAMPLER_KEY, subjects.DEMAND_KEY),
        reads=(*_with_chunks(scored), *_with_chunks(batches)),
        watched=(subjects.TRAINER_KEY, subjects.EVAL_KEY),
    )


def _trainer(node: str) -> _Needs:
    batches, policies = subjects.node_batches_stream(node), subjects.node_policies_stream(node)
    return _Needs(
        publish=(
            subjects.node_policies(node),
            *_purging(batches),
            f"$JS.API.STREAM.PURGE.{_chunks(batches)}",
            # Not the stream's creation: whoever may create one may let it republish to any subject.
            *_purging(policies),
        ),
        keys=(subjects.POLICY_KEY, subjects.TRAINER_KEY, FINDINGS_KEY),
        reads=(*_with_chunks(batches), policies),
    )


_NEEDS: dict[str, Callable[[str], _Needs]] = {
    "generator": _generator,
    "verifier": _verifier,
    "sampler": _sampler,
    "trainer": _trainer,
}


def _status(role: str) -> str:
    return subjects.status_key(role, "*" if role in SEVERAL else subjects.SOLE_REPLICA)


def _lease(role: str) -> str:
    return subjects.lease_key(role, "*" if role in SEVERAL else "")


def _looking(node: str, already: tuple[str, ...]) -> tuple[str, ...]:
    """At its start, every role checks whether the node's streams exist."""
    streams = (
        subjects.node_rollouts_stream(node),
        subjects.node_scored_stream(node),
        subjects.node_batches_stream(node),
        subjects.node_dead_letters_stream(node),
    )
    names = tuple(name for name in streams if name not in already)
    consumer = f"$JS.API.CONSUMER.INFO.{subjects.node_rollouts_stream(node)}.{subjects.VERIFIER_CONSUMER}"
    return (*(f"$JS.API.STREAM.INFO.{name}" for name in names), consumer)


def _reading(streams: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"$JS.API.{verb}.{stream}" for stream in streams for verb in ("DIRECT.GET", "STREAM.INFO"))


def _direct(streams: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"$JS.API.DIRECT.GET.{stream}" for stream in streams)


def _dropping(stream: str) -> str:
    return f"$JS.API.STREAM.MSG.DELETE.{stream}"


def _purging(stream: str) -> tuple[str, str]:
    # A purge first looks whether the stream has chunks, and a request without permission gets no
    # answer at all.
    return f"$JS.API.STREAM.PURGE.{stream}", f"$JS.API.STREAM.INFO.{_chunks(stream)}"


def _chunks(stream: str) -> str:
    return companion_name(stream)


def _with_chunks(stream: str) -> tuple[str, str]:
    return stream, _chunks(stream)


def _with_chunk_subject(subject: str) -> tuple[str, str]:
    return subject, companion_subject(subject)


def _key(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"
