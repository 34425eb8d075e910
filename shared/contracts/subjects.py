"""Names of subjects, streams, buckets and consumers. No other code spells one out.

Subjects contain node ids and nothing else that varies: no dataset, step or uuid. The server keeps
an index entry in memory for each distinct subject, and a permission with a wildcard lets its holder
create as many subjects as it likes.
"""

from __future__ import annotations

import re

from shared.contracts.wire import SCHEMA_VERSION, SWARM_SCHEMA_VERSION, is_node_name

SWARM_ROLLOUTS = "SWARM_ROLLOUTS"
SWARM_EVALS = "SWARM_EVALS"
SWARM_NODES_BUCKET = "swarm_nodes"

_ROLLOUTS_PREFIX = f"swarm.rollouts.v{SWARM_SCHEMA_VERSION}"
_EVALS_PREFIX = f"swarm.evals.v{SCHEMA_VERSION}"
_VERSIONED = re.compile(r"swarm\.rollouts\.v[0-9]{1,9}\.")

ALL_ROLLOUTS = "swarm.rollouts.>"
ALL_EVALS = "swarm.evals.>"

VERIFIER_CONSUMER = "verifier"
"""Durable consumer on a node's rollouts; all verifier replicas share it."""


def rollouts(node: str) -> str:
    """Subject on which `node` shares groups of all datasets. The signed group itself says which
    task it is of.
    """
    return f"{_ROLLOUTS_PREFIX}.{node}"


def evals(node: str) -> str:
    """Subject on which `node` reports its held-out scores."""
    return f"{_EVALS_PREFIX}.{node}"


def is_of_another_version(subject: str) -> bool:
    """Check whether a rollouts subject is one of another schema version."""
    return bool(_VERSIONED.match(subject)) and not subject.startswith(f"{_ROLLOUTS_PREFIX}.")


def rollouts_author(subject: str) -> str | None:
    """The node that a rollouts subject belongs to. None if it is not a rollouts subject of this
    schema version or contains no node name: a token of a subject may be anything without white
    space, and the name goes into logs, metrics and reports.
    """
    parts = subject.split(".")
    if len(parts) == 4 and ".".join(parts[:3]) == _ROLLOUTS_PREFIX and is_node_name(parts[3]):
        return parts[3]
    return None


def node_rollouts(node: str) -> str:
    """Generator to verifier."""
    return f"node.{node}.rollouts"


def node_scored(node: str) -> str:
    """Verifier to sampler."""
    return f"node.{node}.scored"


def node_batches(node: str) -> str:
    """Sampler to trainer."""
    return f"node.{node}.batches"


def node_rollouts_stream(node: str) -> str:
    """Work queue of a node's unscored groups."""
    return f"NODE_{node.upper()}_ROLLOUTS"


def node_scored_stream(node: str) -> str:
    """Log of a node's scored groups, local and external."""
    return f"NODE_{node.upper()}_SCORED"


def node_batches_stream(node: str) -> str:
    """Log of a node's batches."""
    return f"NODE_{node.upper()}_BATCHES"


def node_dead_letters_stream(node: str) -> str:
    """Messages that were given up on, kept for inspection."""
    return f"NODE_{node.upper()}_DEAD"


def node_dead_letters(node: str) -> str:
    """Subject of a node's dead letters."""
    return f"node.{node}.dead"


def node_name(node: str) -> str:
    """Subject of the one message that says which run a node's streams belong to."""
    return f"node.{node}.name"


def node_name_stream(node: str) -> str:
    """The stream of that message, which the server lets nobody replace."""
    return f"NODE_{node.upper()}_NAME"


def node_bucket(node: str) -> str:
    """Key-value bucket of a node's small state."""
    return f"node_{node}"


def node_of_bucket(bucket: str) -> str | None:
    """The node that a bucket belongs to, or None if it is not a node's bucket."""
    node = bucket.removeprefix("node_")
    return node if node != bucket and is_node_name(node) else None


POLICY_KEY = "policy"
POLICY_REFUSED_KEY = "policy_refused"
BANS_KEY = "bans"
REPUTATION_KEY = "reputation"
SENDERS_PREFIX = "senders."
FINDINGS_KEY = "findings"
TRAINER_KEY = "trainer"
SAMPLER_KEY = "sampler"
DEMAND_KEY = "demand"
LEDGER_KEY = "ledger"
INTAKE_KEY = "intake"
REWARD_VALUES_KEY = "reward_values"
EVAL_KEY = "eval"
EVAL_TURN_KEY = "eval_turn"
SWARM_NAME_KEY = "swarm_name"
STATUS_PREFIX = "status."
LEASE_PREFIX = "lease."


SOLE_REPLICA = "0"
"""Replica in the status of a role that has one process, so that its key may write one key only."""
MAX_REPLICA_NUMBER = 9_999


def is_replica(text: str) -> bool:
    """Check whether a process may be named so among its role's: a pod's name, or a number that
    counts processes.
    """
    named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", text) is not None
    return named and not (text.isdigit() and int(text) > MAX_REPLICA_NUMBER)


def status_key(role: str, replica: str) -> str:
    """Key of one process's status."""
    return f"{STATUS_PREFIX}{role}.{replica}"


def lease_key(role: str, replica: str = "") -> str:
    """Key of the lease of a role, or of one replica of it."""
    return f"{LEASE_PREFIX}{role}.{replica}" if replica else f"{LEASE_PREFIX}{role}"


def node_policies_stream(node: str) -> str:
    """A node's policies in chunks, used when there is no shared volume."""
    return f"NODE_{node.upper()}_POLICIES"


def node_policies(node: str) -> str:
    """Chunks of a node's policies."""
    return f"node.{node}.policies"
