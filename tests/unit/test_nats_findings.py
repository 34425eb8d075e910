"""What `swarm nats report` finds wrong in what JetStream says, and how it shows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from swarm_cli.errors import CommandError
from swarm_cli.nats.backup import backup_order, chosen
from swarm_cli.nats.report import Report, Stream, read_stream, show, stream_findings, until_settled

NOW = datetime(2026, 11, 25, 3, 0, tzinfo=UTC)


def ago(seconds: float) -> str:
    """As the server writes times, to the nanosecond."""
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%f") + "123Z"


def entry(**changed: Any) -> dict[str, Any]:
    """A stream of a list, all well, as nats-server 2.15.1 has it."""
    config = {"name": "NODE_ALPHA_ROLLOUTS", "max_msgs": 512, "max_bytes": 1000, "discard": "new", "num_replicas": 3}
    state = {"messages": 10, "bytes": 100, "first_seq": 1, "last_seq": 10, "consumer_count": 1}
    copies = [{"name": name, "current": True, "active": 1} for name in ("nats-1", "nats-2")]
    cluster = {"name": "swarm", "leader": "nats-0", "replicas": copies}
    return {"config": config | changed.pop("config", {}), "state": state | changed.pop("state", {}), "cluster": cluster | changed}


def consumer(quiet_s: float = 3600.0, **changed: Any) -> dict[str, Any]:
    """A consumer of a list, idle for an hour."""
    return {
        "name": "verifier",
        "created": ago(86_400),
        "config": {"durable_name": "verifier", "max_ack_pending": 256, "ack_policy": "explicit"},
        "delivered": {"consumer_seq": 9, "stream_seq": 9, "last_active": ago(quiet_s)},
        "ack_floor": {"consumer_seq": 9, "stream_seq": 9},
        "num_ack_pending": 0,
        "num_redelivered": 0,
        "num_waiting": 1,
        "num_pending": 0,
        **changed,
    }


@pytest.mark.parametrize(
    ("stream", "of_consumer", "told"),
    [
        (entry(), consumer(), []),
        (entry(leader=""), consumer(num_pending=5), ["has no leader"]),
        (entry(replicas=[{"name": "nats-1", "current": True}]), consumer(), ["2 of 3 copies"]),
        (
            entry(
                replicas=[{"name": "nats-1", "current": False, "offline": True}, {"name": "nats-2", "current": False, "lag": 1200}]
            ),
            consumer(),
            ["nats-1 is offline", "nats-2 is behind by 1,200 operations"],
        ),
        (entry(state={"bytes": 910}), consumer(), ["91% full and refuses"]),
        (entry(state={"messages": 470}), consumer(), ["92% full and refuses"]),
        (entry(state={"bytes": 1000}, config={"discard": "old"}), consumer(), []),  # a window
        (entry(config={"max_bytes": -1, "max_msgs": -1}, state={"messages": 10**9}), consumer(), []),
        (
            entry(),
            consumer(num_pending=5),
            ["verifier of stream NODE_ALPHA_ROLLOUTS has stalled: 5 messages wait and nothing moved for 3,600 s"],
        ),
        (entry(), consumer(num_pending=5, quiet_s=10), []),
        (entry(), consumer(num_ack_pending=256, num_pending=9), ["256 messages are unacknowledged, its limit"]),
        (entry(), consumer(num_pending=1, delivered={}, ack_floor={}, created=ago(10)), []),  # only just made
    ],
)
def test_each_thing_that_is_wrong_is_a_sentence_and_a_full_window_is_none(
    stream: dict[str, Any], of_consumer: dict[str, Any], told: list[str]
) -> None:
    read = read_stream(stream, [of_consumer], "nats-0", NOW.timestamp())
    found = list(stream_findings(read))
    assert len(found) == len(told) and all(part in sentence for part, sentence in zip(told, found, strict=True)), found


@pytest.mark.parametrize(
    ("cluster", "ill", "looks", "told"),
    [
        ({"replicas": [{"name": "nats-1", "current": False, "lag": 1}]}, 2, 3, ""),
        ({"replicas": [{"name": "nats-1", "current": False, "lag": 1}]}, 1000, 1000, "nats-1 is behind by 1 operation"),
        ({"leader": ""}, 1, 2, ""),
        ({"leader": ""}, 1000, 1000, "has no leader"),
        ({"replicas": [{"name": "nats-1", "current": False, "offline": True}]}, 2, 1, "nats-1 is offline"),  # no use in waiting
    ],
)
async def test_what_mends_itself_in_a_moment_is_no_finding_and_what_stays_is(
    cluster: dict[str, Any], ill: int, looks: int, told: str
) -> None:
    seen = 0

    async def look() -> Report:
        nonlocal seen
        seen += 1
        listed = entry(config={"num_replicas": 2}, **(cluster if seen <= ill else {}))
        stream = read_stream(listed, [], "nats-0", NOW.timestamp())
        return Report(NOW.timestamp(), "nats-0", "2.15.1", {"limits": {}}, (stream,), 0)

    found = (await until_settled(look, patience_s=1.5)).findings()
    assert seen <= looks and len(found) == bool(told) and all(told in each for each in found)


def test_a_server_alone_leads_what_it_has() -> None:
    alone = {**entry(config={"num_replicas": 1}), "cluster": None}
    assert read_stream(alone, [], "hub", NOW.timestamp()).leader == "hub"


def test_a_report_of_hundreds_of_streams_with_hostile_names_is_short_and_has_what_is_wrong_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # that of the terminal that runs the tests
    streams = [Stream(f"{'X' * 200}\x1b[2J{number}", leader="nats-0" * 40) for number in range(500)]
    wrong = Stream("LOST")
    report = Report(NOW.timestamp(), "nats-0", "2.15.1", {"limits": {}}, (*streams, wrong), 7)
    show(report)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 160 and len(shown) < 80 and all(line.isprintable() for line in shown)
    assert shown[3].startswith("LOST ") and "NO LEADER" in shown[3] and shown[-1] == "7 more were left out"
    assert report.findings() == ["stream LOST has no leader, so it can be neither written nor read"]


@pytest.mark.parametrize(("stored", "told"), [(84, []), (85, ["85%"])])
def test_an_account_whose_store_is_nearly_full_is_told(stored: int, told: list[str]) -> None:
    report = Report(NOW.timestamp(), "nats-0", "2.15.1", {"storage": stored, "limits": {"max_storage": 100}}, (), 0)
    assert [part in sentence for part, sentence in zip(told, report.findings(), strict=True)] == [True] * len(told)


def test_positions_are_backed_up_before_what_they_point_to_and_messages_before_their_chunks() -> None:
    kinds = ("POLICIES", "SCORED_BLOBS", "SCORED", "ROLLOUTS", "BATCHES", "DEAD", "BATCHES_BLOBS")
    names = [*(f"NODE_ALPHA_{kind}" for kind in kinds), "KV_node_alpha"]
    ordered = sorted(names, key=backup_order)
    assert [each.removeprefix("NODE_ALPHA_") for each in ordered] == [
        "KV_node_alpha",
        "BATCHES",
        "ROLLOUTS",
        "SCORED",
        "DEAD",
        "POLICIES",
        "BATCHES_BLOBS",
        "SCORED_BLOBS",
    ]
    assert chosen(names, [], "alpha") == ordered
    with pytest.raises(CommandError, match="no stream of node alph:"):
        chosen(names, [], "alph")
