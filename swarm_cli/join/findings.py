"""Checks of `swarm join` and their reports: for each check a word, whether it passed, and a
sentence, with the remedy if it did not. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.config import NodeConfig, TaskSpec
from shared.contracts.wire import SWARM_SCHEMA_VERSION
from shared.registry import TASK_SOURCES
from shared.version import VERSION
from swarm_cli.invitation import Accepted, Invitation, OfferedTask
from swarm_cli.join.hub import HubLook
from swarm_cli.local.base_model import TOY_POLICY, toy_to_be_built
from swarm_cli.risky_settings import left_out_rows, row_limit_warnings

if TYPE_CHECKING:
    from shared.tasks.file_rows import FileQuestions

NOTABLE_SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `ok` is None for a remark that neither passes nor fails."""

    what: str
    ok: bool | None
    told: str

    @property
    def line(self) -> str:
        """As `swarm join` prints it."""
        return f"{ {True: 'ok', False: 'NO', None: '--'}[self.ok]:<4}{self.what:<11} {self.told}"


def software(invitation: Invitation, tasks_version: str) -> Finding:
    """Return whether the versions agree: of the messages, or nothing can be read, and of the tasks,
    or nothing is accepted.
    """
    if invitation.swarm_schema != SWARM_SCHEMA_VERSION:
        older = "this machine" if invitation.swarm_schema > SWARM_SCHEMA_VERSION else "the swarm"
        return Finding(
            "software",
            False,
            f"the swarm's messages have version {invitation.swarm_schema}, this machine's {SWARM_SCHEMA_VERSION}: update {older}",
        )
    if invitation.tasks_version != tasks_version:
        return Finding(
            "software",
            False,
            f"the swarm derives its tasks with reasoning-gym {invitation.tasks_version}, this machine with {tasks_version}, where "
            f"the same reference may mean another task: pip install reasoning-gym=={invitation.tasks_version}",
        )
    return Finding(
        "software", True, f"swarm {VERSION} here, {invitation.software} there; messages of version {SWARM_SCHEMA_VERSION}"
    )


def model(config: NodeConfig, problems: Sequence[str]) -> Finding:
    """Return whether the model exists and can be read."""
    if problems:
        return Finding("model", False, problems[0])
    if toy_to_be_built(config):
        return Finding("model", True, f"{TOY_POLICY} does not exist yet: the toy policy is built first, in two to five minutes")
    return Finding("model", True, config.model.path)


def tasks(config: NodeConfig, accepted: Accepted, problem: str) -> Finding:
    """Return whether the tasks can be derived, and whether the swarm accepts any of them."""
    if problem:
        return Finding("tasks", False, problem)
    taken = [spec for spec in config.tasks if takes(accepted, spec)]
    files = [spec for spec in config.tasks if spec.source == "file" and spec not in taken]
    names = ", ".join(dict.fromkeys(spec.dataset or spec.path for spec in config.tasks))
    if files:
        held = ", ".join(dict.fromkeys(spec.file_name for spec in files))
        rest = f"; of the others the swarm accepts {len(taken)}" if len(files) < len(config.tasks) else ""
        return Finding(
            "tasks",
            None,
            f"a token does not say which files the swarm's nodes have: groups of {held} are accepted by those that have the same "
            f"rows among their own tasks{rest}",
        )
    if not taken:
        offered = ", ".join(dict.fromkeys(task.dataset for task in accepted.tasks)) or "none"
        return Finding(
            "tasks",
            False,
            f"the swarm accepts none of {names}: omit --tasks to use the swarm's, or choose among {offered} (with the "
            "same settings)",
        )
    left = "" if len(taken) == len(config.tasks) else f"; the swarm accepts {len(taken)} of these {len(config.tasks)}"
    return Finding("tasks", True, f"{names}{left}")


def rows(config: NodeConfig, files: Sequence[FileQuestions]) -> list[Finding]:
    """Rows of files that are left out, and files of which the swarm soon takes no more groups.
    files: as of the process that read them.
    """
    left_out = [Finding("left out", None, sentence) for sentence in left_out_rows(files)]
    return [*left_out, *(Finding("few rows", None, sentence) for sentence in row_limit_warnings(config, files))]


def takes(accepted: Accepted, spec: TaskSpec) -> bool:
    """Return whether the inviting node accepts groups of this source (its `verifier.accept`)."""
    if accepted.rule == "any" and spec.source != "file" and spec.dataset not in TASK_SOURCES.installed:
        return True

    def fits(task: OfferedTask) -> bool:
        return task.dataset == spec.dataset and (accepted.rule != "same" or task.config == spec.canonical_config)

    return any(map(fits, accepted.tasks))


def sizes(config: NodeConfig, accepted: Accepted) -> Finding:
    """Return whether the swarm accepts groups as large as this node makes."""
    longest = config.generator.max_new_tokens
    if longest > accepted.max_tokens:
        return Finding(
            "sizes",
            None,
            f"answers may have {longest} tokens here, and the swarm refuses those with more than {accepted.max_tokens}: "
            f"with generator.max_new_tokens = {accepted.max_tokens} it accepts all",
        )
    return Finding("sizes", True, f"up to {longest} tokens per answer; the swarm accepts {accepted.max_tokens}")


def ports(wanted: Iterable[int], refused: str) -> Finding:
    """Return whether the node's ports are free. refused: in which words joining would say that they
    are not.
    """
    return Finding("ports", not refused, refused or f"{', '.join(map(str, sorted(wanted)))} are free")


def connection(look: HubLook, invitation: Invitation, name: str, hub_key: str, signing_key: str) -> Finding:
    """Return whether the hub answers and lets this node in."""
    if look.refused and look.reached and hub_key and invitation.credential is None:
        return Finding(
            "connection",
            False,
            f"{invitation.url} does not know this node yet. Send its operator this line, which is not secret, and run the same "
            f"command again once the node is listed:\n  {request_line(name, hub_key, signing_key)}",
        )
    if look.refused:
        return Finding("connection", False, look.refused)
    if look.unreachable:
        return Finding(
            "connection",
            False,
            f"{look.unreachable}: ask the operator whether the server runs, and whether something on the way blocks its port",
        )
    if look.operates:
        return Finding(
            "connection",
            False,
            f"the key in the token may do more than a node on {invitation.url}: it is the operator's, or the "
            "hub's accounts are old. Tell the operator, who should replace that key or render the accounts again (`swarm nats "
            "config`), and ask for another token",
        )
    if not look.streams and invitation.url.startswith("tls://"):
        return Finding(
            "connection", False, "the swarm's streams do not exist: its operator must run `swarm nats init --plane swarm`"
        )
    if look.others and not look.nodes:
        return Finding(
            "connection",
            None,
            f"{invitation.url}, but no node there is known to be in the swarm called {invitation.swarm_id}; the directory has "
            f"{look.others} of others. If that is not its name, the nodes refuse whatever is sent: ask for a new token",
        )
    there = f"nodes there: {len(look.nodes)}" if look.nodes else "no node is there yet"
    if look.others:
        there += f" ({look.others} more {'entry' if look.others == 1 else 'entries'} in the directory, not signed for this swarm)"
    return Finding("connection", True, f"{invitation.url}, the swarm called {invitation.swarm_id}; {there}")


def clock(look: HubLook, accepted: Accepted) -> Finding | None:
    """Return whether this machine's clock agrees with the server's: other nodes refuse groups from
    the future and from long ago. None if the server did not report its time, which some versions do
    not.
    """
    if look.skew_s is None:
        return None
    direction = "ahead of" if look.skew_s > 0 else "behind"
    apart = f"{abs(look.skew_s):.1f} s {direction} the server's"
    most_s = accepted.max_clock_skew_s if look.skew_s > 0 else accepted.max_age_s / 2
    if abs(look.skew_s) > most_s:
        return Finding(
            "clock",
            False,
            f"{apart}, and the swarm refuses groups that are more than {most_s:.0f} s off: set this machine's clock "
            "(`timedatectl set-ntp true`)",
        )
    if abs(look.skew_s) > NOTABLE_SKEW_S:
        return Finding("clock", None, f"{apart}: good enough, but better set it (`timedatectl set-ntp true`)")
    return Finding("clock", True, apart)


def name(look: HubLook, wanted: str, signing_key: str, suggestion: str) -> Finding:
    """Return whether the name is free, or already this node's."""
    if look.holder is not None and look.holder.public_key != signing_key:
        return Finding(
            "name",
            False,
            f"{wanted} is taken by a node with another key, so other nodes would refuse this one: use --name {suggestion}",
        )
    return Finding("name", True, wanted)


def admission(invitation: Invitation, wanted: str, signing_key: str) -> Finding | None:
    """Return whether the swarm's roster lists this node; None if it has no roster."""
    if not invitation.roster:
        return None
    if any(member.node == wanted and member.public_key == signing_key for member in invitation.roster):
        return Finding("roster", True, "this node is listed")
    return Finding(
        "roster",
        None,
        "this node is not on the swarm's roster: other nodes refuse its groups (unknown_key), but it accepts theirs. Ask the "
        f"operator to add it with:\n  swarm roster add {wanted} {signing_key}\n(in a cluster: to keys/roster.txt, for "
        "`swarm k8s secrets`)",
    )


def request_line(wanted: str, hub_key: str, signing_key: str) -> str:
    """Return what a newcomer sends to the operator of a secured hub: a name and two public keys."""
    return f"{wanted} hub={hub_key} signs={signing_key}"
