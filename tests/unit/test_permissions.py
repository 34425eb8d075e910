"""What each user of a secured server may do, as pure rules. `test_permission_table.py` shows a
real server enforcing them.
"""

from __future__ import annotations

import itertools
import time

import pytest

from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.identity.permissions import ROLES, Permissions, inbox, node_role, swarm_node, swarm_observer
from shared.roles import SEVERAL
from shared.transport.blobs import companion_name
from swarm_cli.nats.server_config import Tls, node_account, render, render_accounts, swarm_account

POLICY = f"$KV.node_alpha.{subjects.POLICY_KEY}"


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, `>` is one or more at the end."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


def may_publish(permissions: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in permissions.publish)


def may_subscribe(permissions: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in permissions.subscribe)


def test_only_the_trainer_may_write_the_policy_pointer():
    assert [role for role in ROLES if may_publish(node_role("alpha", role), POLICY)] == ["trainer"]
    assert not may_publish(swarm_node("alpha"), POLICY)


def test_each_key_of_the_nodes_bucket_has_one_writer():
    keys = [subjects.TRAINER_KEY, subjects.SAMPLER_KEY, subjects.LEDGER_KEY, subjects.INTAKE_KEY, subjects.EVAL_KEY]
    for key in keys:
        assert len([role for role in ROLES if may_publish(node_role("alpha", role), f"$KV.node_alpha.{key}")]) == 1, key
    for role, other in itertools.product(ROLES, ROLES):
        for replica in (subjects.SOLE_REPLICA, "pod-0"):
            subject = f"$KV.node_alpha.{subjects.status_key(other, replica)}"
            allowed = role == other and (other in SEVERAL or replica == subjects.SOLE_REPLICA)
            assert may_publish(node_role("alpha", role), subject) == allowed


def test_a_role_takes_its_own_leases_only_and_any_role_the_nodes_name():
    """The first process of a run writes the name down, whichever it is."""
    for role, other in itertools.product(ROLES, ROLES):
        lease = f"$KV.node_alpha.{subjects.lease_key(other, 'pod-0' if other in SEVERAL else '')}"
        assert may_publish(node_role("alpha", role), lease) == (role == other)
        assert not may_publish(node_role("beta", role), lease)
    for role in ROLES:
        assert may_publish(node_role("alpha", role), subjects.node_name("alpha"))
        assert not may_publish(node_role("beta", role), subjects.node_name("alpha"))
    assert not any(
        may_publish(swarm_node("alpha"), subject) for subject in (subjects.node_name("alpha"), "$KV.node_alpha.lease.trainer")
    )


@pytest.mark.parametrize(
    ("stream_subject", "writer"),
    [
        (subjects.node_rollouts("alpha"), "generator"),
        (subjects.node_scored("alpha"), "verifier"),
        (subjects.node_dead_letters("alpha"), "verifier"),
        (subjects.node_batches("alpha"), "sampler"),
        (subjects.node_policies("alpha"), "trainer"),
    ],
)
def test_each_stream_of_a_node_has_one_writer(stream_subject: str, writer: str):
    assert [role for role in ROLES if may_publish(node_role("alpha", role), stream_subject)] == [writer]


def test_no_role_may_touch_the_swarm_plane_or_another_node():
    theirs = [
        *(subjects.rollouts(node) for node in ("alpha", "beta")),
        subjects.evals("alpha"),
        f"$KV.{subjects.SWARM_NODES_BUCKET}.alpha",
        f"$JS.API.DIRECT.GET.{subjects.SWARM_ROLLOUTS}",
        f"$JS.API.STREAM.INFO.{subjects.SWARM_ROLLOUTS}",
        subjects.node_rollouts("beta"),
        "$KV.node_beta.policy",
        "$JS.API.DIRECT.GET.KV_node_beta",
    ]
    for role, subject in itertools.product(ROLES, theirs):
        assert not may_publish(node_role("alpha", role), subject), (role, subject)


def test_a_node_speaks_on_the_swarm_plane_under_its_own_name_only():
    alpha = swarm_node("alpha")
    for node in ("alpha", "beta", "alpha-2", "alph"):
        own = node == "alpha"
        rollouts = subjects.rollouts(node)
        for subject in (rollouts, f"blob.{rollouts}", subjects.evals(node), f"$KV.{subjects.SWARM_NODES_BUCKET}.{node}"):
            assert may_publish(alpha, subject) == own, subject


def test_nobody_but_the_operator_may_change_streams_or_make_consumers():
    """A consumer delivers where its maker says, and a stream republishes where its maker says:
    either would undo the rest.
    """
    verbs = ["CREATE", "UPDATE", "DELETE", "RESTORE", "SNAPSHOT"]
    rollouts, scored = subjects.node_rollouts_stream("alpha"), subjects.node_scored_stream("alpha")
    streams = [rollouts, scored, "KV_node_alpha", subjects.SWARM_ROLLOUTS]
    requests = [f"$JS.API.STREAM.{verb}.{stream}" for verb in verbs for stream in streams]
    requests += [f"$JS.API.CONSUMER.CREATE.{stream}.verifier" for stream in streams]
    requests += [f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.verifier" for stream in streams]
    requests += [f"$JS.API.STREAM.PURGE.{stream}" for stream in ("KV_node_alpha", subjects.SWARM_ROLLOUTS)]
    for permissions in (swarm_node("alpha"), *(node_role("alpha", role) for role in ROLES)):
        for request in requests:
            assert not may_publish(permissions, request), request


def test_no_permission_is_wider_than_one_token_but_acknowledgements_and_inboxes():
    for permissions in (swarm_node("alpha"), *(node_role("alpha", role) for role in ROLES)):
        for pattern in permissions.publish:
            assert ">" not in pattern or pattern.startswith("$JS.ACK."), pattern
        for pattern in permissions.subscribe:
            assert ">" not in pattern or pattern.startswith("_INBOX_alpha."), pattern


def test_members_and_spectators_may_ask_about_no_stream_of_the_swarms():
    """A server answers one such request after the other for everybody, and a member can make one
    cost it a third of a second.
    """
    streams = [subjects.SWARM_ROLLOUTS, companion_name(subjects.SWARM_ROLLOUTS), subjects.SWARM_EVALS, "KV_swarm_nodes"]
    for permissions, stream in itertools.product((swarm_node("alpha"), swarm_observer()), streams):
        assert not may_publish(permissions, f"$JS.API.STREAM.INFO.{stream}"), stream


def test_a_member_has_as_many_subjects_as_its_permissions_name():
    """With a wildcard it would make up subjects, each an entry in the memory of the swarm's
    server.
    """
    assert not [pattern for pattern in swarm_node("alpha").publish if "*" in pattern or ">" in pattern]


def test_no_two_users_read_each_others_replies():
    users = {("alpha", role): node_role("alpha", role) for role in ROLES} | {("beta", "verifier"): swarm_node("beta")}
    for (mine, permissions), (node, role) in itertools.product(users.items(), users):
        reply = f"{inbox(node, role)}.x7"
        assert may_subscribe(permissions, reply) == (mine == (node, role)), (mine, reply)
        assert not may_subscribe(permissions, "_INBOX.x7")


def test_the_default_inbox_is_the_one_that_is_allowed():
    from shared.config.node_sections import NatsSection
    from shared.runtime.planes import for_process

    assert for_process(NatsSection().inbox_prefix, "alpha", "sampler") == inbox("alpha", "sampler")


def test_the_configuration_names_every_user_once_and_no_secret():
    seeds = [new_seed().decode() for _ in range(6)]
    names = [*ROLES, "operator"]
    public = {name: SigningKey(seed.encode()).public_key for name, seed in zip(names, seeds, strict=False)}
    swarm = SigningKey(seeds[5].encode()).public_key
    accounts = [node_account("alpha", public), swarm_account({"alpha": swarm})]
    lines = render_accounts(accounts)
    text = render(lines, tls=Tls("/c.pem", "/k.pem"), host="0.0.0.0", port=4222, sync_interval="always", store_dir="nats-both")
    for key in (*public.values(), swarm):
        assert text.count(f"nkey: {key}") == 1
    assert not any(seed in text for seed in seeds)
    assert 'cert_file: "/c.pem"' in text


def test_the_time_to_write_a_hubs_accounts_grows_with_its_members_only():
    began = time.process_time()
    lines = render_accounts([swarm_account({f"node-{number}": f"U{number}" for number in range(10_000)})])
    assert len(lines) > 10_000 and time.process_time() - began < 30, "when each member looked at each other one: 200 s"


def test_a_role_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no role 'root'"):
        node_role("alpha", "root")
