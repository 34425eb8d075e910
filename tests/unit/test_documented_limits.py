"""Limits that the pages state are those of the code. Each is read from its page, so a constant that
changes alone fails here, also one that other tests import.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.verifier import reputation, sharing, trust
from shared.contracts.limits import DAY_S, MIB, SWARM_LIMITS
from swarm_cli.nats.server_config import HOSTED_GIB, MOST_STREAMS, render_accounts, swarm_account

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
KIB = 1024


def stated(page: str, pattern: str) -> list[int]:
    """The numbers that `pattern` finds at one place of `page`, whose line breaks are spaces."""
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    (found,) = re.findall(pattern, text)
    return [int(number.replace(",", "")) for number in ([found] if isinstance(found, str) else found)]


def limits_of(name: str) -> dict[str, int]:
    """The `limits` line of a guest in the accounts of a swarm of one node and its spectators."""
    text = "\n".join(render_accounts([swarm_account({"alpha": "UA", "operator": "UP"}, observer_key="UO")]))
    (line,) = re.findall(rf"  SWARM_{name} {{\n    limits {{ (.*) }}\n", text)
    return {key: int(value) for key, value in (pair.split(": ") for pair in line.split(", "))}


def test_a_member_and_the_spectators_have_the_limits_that_the_page_on_security_states() -> None:
    (connections,) = stated("security.md", r"\| connections \| (\d+) ")
    (leaves,) = stated("security.md", r"\| leaf connections \| (\d+) \|")
    (subscriptions,) = stated("security.md", r"\| subscriptions per connection \| ([\d,]+) \|")
    payload_mib, watched_kib = stated("security.md", r"\| bytes of a message \| (\d+) MiB; spectators (\d+) KiB \|")
    assert limits_of("ALPHA") == {
        "max_connections": connections,
        "max_subscriptions": subscriptions,
        "max_leafnodes": leaves,
        "max_payload": payload_mib * MIB,
    }
    assert limits_of("OBSERVER")["max_payload"] == watched_kib * KIB
    assert limits_of("OBSERVER")["max_leafnodes"] == 0


def test_storage_and_streams_have_the_bounds_that_the_page_on_security_states() -> None:
    gib, streams = stated("security.md", r"(\d+) GiB \(`--node-storage-gib`\), all copies counted; no memory; (\d+) streams")
    assert (gib, streams) == (HOSTED_GIB, MOST_STREAMS)
    (entry_kib,) = stated("security.md", r"\| its directory entry \| (\d+) KiB \|")
    assert entry_kib * KIB == SWARM_LIMITS.node_entry_max_bytes
    newest, score_kib, days = stated("security.md", r"the newest ([\d,]+) of up to (\d+) KiB, up to (\d+) days old")
    assert newest == SWARM_LIMITS.evals_max_per_node
    assert score_kib * KIB == SWARM_LIMITS.eval_max_bytes
    assert days * DAY_S == SWARM_LIMITS.evals_max_age_s
    (window_s,) = stated("security.md", r"\| message ids that the server remembers \| those of the last (\d+) s")
    assert window_s == SWARM_LIMITS.duplicate_window_s


def test_what_a_key_may_cost_is_what_the_page_on_security_states() -> None:
    grace_s, half_life_s = stated(
        "security.md", r"\| a key's CPU time \| (\d+) s, plus 0\.5 s per accepted group; halves every (\d+) s \|"
    )
    assert (grace_s, half_life_s) == (reputation.GRACE_S, reputation.COST_HALF_LIFE_S)
    assert reputation.PER_GROUP_S == 0.5
    assert stated("security.md", r"newest has weight 0\.1; half-life (\d+) s\)") == [reputation.HALF_LIFE_S]


def test_a_key_may_take_another_name_after_the_hour_and_a_name_is_free_after_the_days_that_the_page_on_security_states() -> None:
    (days,) = stated(
        "security.md",
        r"(\d+) days without an accepted group; a key may take another name an hour after",
    )
    assert trust.RENAME_AFTER_S == 3600
    assert days * DAY_S == trust.IDLE_S


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("reliability.md", r"an outbox of at most (\d+) groups and (\d+) MiB that drops"),
        ("joining.md", r"up to (\d+) groups or (\d+) MiB wait in its verifier"),
    ],
)
def test_the_outbox_holds_what_the_pages_state(page: str, pattern: str) -> None:
    groups, mib = stated(page, pattern)
    assert (groups, mib * MIB) == (sharing.MAX_GROUPS, sharing.MAX_BYTES)


ENFORCED = {
    "connections": "test_a_key_has_no_more_connections_than_its_limit_and_others_still_have_theirs",
    "leaf connections": "test_the_running_server_limits_a_members_leaf_connections_to_four_and_gives_others_none",
    "subscriptions per connection": "test_a_connection_has_no_more_subscriptions_than_its_limit",
    "unread replies per connection": "test_who_does_not_read_what_it_asked_for_is_cut_where_the_configuration_says",
    "bytes of a message": "test_spectators_send_at_most_64_kib_a_message",
    "storage, where its own streams are on this server": "test_a_node_that_exceeds_its_storage_is_refused_and_others_are_not",
    "subjects": "test_a_member_has_four_subjects_and_makes_up_no_others",
    "its directory entry": "test_a_directory_entry_has_at_most_160_kib",
    "held-out scores": "test_one_member_cannot_push_out_others_scores",
    "message ids that the server remembers": "test_no_stream_of_the_swarm_knows_message_ids_for_longer_than_two_seconds",
}
"""By resource: what shows on a real server that the limit is enforced."""


def test_each_limit_of_the_page_on_security_is_shown_by_a_test_that_is_there() -> None:
    section = (DOCS / "security.md").read_text(encoding="utf-8").split("## What one key may hold")[1].split("\n## ")[0]
    resources = re.findall(r"^\| (?!resource of a member)([^|-][^|]*?) \|", section, flags=re.MULTILINE)
    assert resources == list(ENFORCED)
    there = "".join(
        (TESTS / file).read_text(encoding="utf-8") for file in ("integration/test_nats_limits.py", "k8s/test_outside.py")
    )
    assert not [test for test in ENFORCED.values() if f"def {test}(" not in there]
