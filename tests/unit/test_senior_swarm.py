"""Which swarm a look without a token shows: that of nodes which have been there for long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import CheckedStatement, check_statement, sign_statement
from swarm_cli.observe.evaluation_log import EvaluationLog

NOW = time.time()
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


def looked_at(reported: Mapping[tuple[str, str], Sequence[float]]) -> str | None:
    """Show where each name of a swarm reported so long ago, as a server keeps it."""
    log, entries, keys = EvaluationLog(), list[CheckedStatement[NodeRecord]](), {name: SigningKey(new_seed()) for name in reported}
    kept = [(ago, *who) for who, agos in reported.items() for ago in sorted(agos)[: SWARM_LIMITS.evals_max_per_node]]
    for ago, name, swarm in sorted(kept, reverse=True):
        at = NOW - ago
        said = EvalReport(
            node=name, policy_version=1, created_at=at, n=10, pass_rate=0.5, mean_reward=0.5, per_task={}, seconds=1.0
        )
        log.take(subjects.evals(name), encode(sign_statement(said, keys[name, swarm], swarm)), NOW, at)
    for name, swarm in reported:
        key = keys[name, swarm]
        model = ModelIdentity(name="m", tokenizer_hash="a" * 64)
        record = NodeRecord(
            node=name, public_key=key.public_key, model=model, tasks=["gcd"], policy_version=1, software="swarm", updated_at=NOW
        )
        entries.append(check_statement(encode(sign_statement(record, key, swarm)), NodeRecord, NOW))
    return log.senior_swarm(entries)


def test_who_reports_seldom_does_not_look_older_than_all_others() -> None:
    """They have been there for a month, and the server keeps their newest 1,024 reports."""
    often = {(name, "real"): [minutes * MINUTE_S for minutes in range(0, 30 * 24 * 60, 10)] for name in ("alpha", "beta")}
    assert looked_at(often | {("mallory", "false"): [29 * DAY_S, MINUTE_S]}) == "real"


def test_who_came_in_numbers_later_has_no_vote() -> None:
    crowd = {(f"mallory-{number}", "false"): [HOUR_S, MINUTE_S] for number in range(20)}
    assert looked_at({("alpha", "real"): [7 * HOUR_S, MINUTE_S], **crowd}) == "real"
    assert looked_at({("alpha", "real"): [2 * HOUR_S, MINUTE_S], **crowd}) == "real"
    assert looked_at({}) is None
