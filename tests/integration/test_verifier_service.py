"""Whole verifiers on a real server: local groups in, foreign groups in, and everything that must
stay outside.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from services.verifier.border import Refusal
from services.verifier.figures import Figures
from services.verifier.sharing import MAX_GROUPS, Outbox, sign
from services.verifier.swarm_reader import SwarmLink
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode, unpack_logprobs, unpacked
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.messages import RolloutGroup, ScoredGroup, SignedRollouts, Task, signed_bytes
from shared.contracts.senders import SendersReport
from shared.contracts.streams import ensure_node_streams, prepare_swarm_streams
from shared.contracts.subjects import SENDERS_PREFIX
from shared.contracts.wire import DEFAULT_SWARM_ID, ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import SignatureStatus, check_statement, sign_statement
from shared.run_records import read_jsonl, refused_file
from shared.runtime.status import StatusBoard
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.held_out import held_out_tasks
from shared.transport.base import NoStream
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from tests.integration.installed_verifier import HANG, HANG_ASLEEP, HANGS, install
from tests.integration.running_verifier import (
    MakeServer,
    RunningVerifier,
    configured,
    generate,
    group,
    queue_is_empty,
    scored,
    until,
    verifier,
    want,
)
from tests.nats_server import free_port

WITH_A_SCORER_THAT_HANGS = [{"dataset": "gcd"}, {"dataset": "simple_integration", "verifier": "hangs"}]


async def test_a_local_group_is_scored_once_shared_and_taken_in_by_another_node(nats_server: MakeServer, tmp_path: Path) -> None:
    url = nats_server().url
    alpha_config, beta_config = (configured(name, url, tmp_path) for name in ("alpha", "beta"))
    async with verifier(alpha_config) as alpha, verifier(beta_config) as beta:
        assert beta.swarm is not None
        await generate(beta.node, group("beta", 0))
        await until(lambda: beta.status.get("scored_local") == 1)
        report = EvalReport(
            node="alpha", policy_version=1, created_at=1.0, n=1, pass_rate=1.0, mean_reward=1.0, per_task={}, seconds=1.0
        )
        await alpha.node.kv.put(subjects.node_bucket("alpha"), subjects.EVAL_KEY, encode(report))
        await generate(alpha.node, *(group("alpha", index) for index in range(12)), group("alpha", 20, ["no", "none"]))
        await until(lambda: beta.status.get("accepted") == 12 and alpha.status.get("accepted") == 1)
        mine = [each for each in await scored(alpha.node, "alpha") if each.origin == "local"]
        assert sorted(each.group.draw for each in mine) == [*range(12), 20]
        assert [each.rewards for each in mine if each.group.draw < 12] == [[1.0, 0.0]] * 12
        theirs = [each for each in await scored(beta.node, "beta") if each.origin == "external"]
        assert {each.group.draw for each in theirs} == {*range(12)}, "a group without a right answer teaches nobody"
        assert all(each.group.completions[0].token_ids is not None for each in theirs)
        assert await queue_is_empty(alpha.node, "alpha")
        assert alpha.status.get("shared") == 12
        assert beta.status.get("refused") == alpha.status.get("refused") == 0

        async def reported() -> bool:
            assert alpha.swarm is not None
            return bool(await alpha.swarm.read(subjects.SWARM_EVALS, 1, 10)) and (
                await alpha.swarm.kv.get(subjects.SWARM_NODES_BUCKET, "alpha") is not None
            )

        await until(reported)
        entry = await beta.swarm.kv.get(subjects.SWARM_NODES_BUCKET, "alpha")
        assert entry is not None
        heard = check_statement(entry.value, NodeRecord, time.time())
        assert heard.said.model.name == "tiny" and heard.standing is SignatureStatus.SIGNED
        (scores,) = await beta.swarm.read(subjects.SWARM_EVALS, 1, 10)
        assert scores.inline is not None
        told = check_statement(scores.inline, EvalReport, time.time())
        assert told.standing is SignatureStatus.SIGNED and told.said == report and told.public_key == heard.public_key
    assert (alpha_config.node.run_dir / "node.nk").stat().st_mode & 0o777 == 0o600


async def test_a_node_that_trains_on_no_foreign_group_reads_and_scores_none_and_shares_its_own(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    url = nats_server().url
    alone = configured("beta", url, tmp_path)
    alone = alone.model_copy(update={"sampler": alone.sampler.model_copy(update={"external": 0})})
    async with verifier(configured("alpha", url, tmp_path)) as alpha, verifier(alone) as beta:
        await generate(alpha.node, group("alpha", 0))
        await generate(beta.node, group("beta", 0))
        await until(lambda: alpha.status.get("accepted") == 1 and alpha.status.get("shared") == 1)
        # It has had the time that sharing takes to look at the swarm, and has not begun to.
        assert beta.status.get("shared") == 1
        assert await beta.node.kv.get(subjects.node_bucket("beta"), subjects.INTAKE_KEY) is None
        assert beta.status.get("accepted") == beta.status.get("refused") == 0


async def test_a_group_of_another_tokenizer_keeps_its_authors_logprobs_where_a_node_asks_and_no_token_ids(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    url = nats_server().url
    asking = NodeRecord(
        node="gamma",
        public_key=(key := SigningKey(new_seed())).public_key,
        model=ModelIdentity(name="tiny", tokenizer_hash="a" * 64),
        tasks=["gcd"],
        policy_version=1,
        software="swarm",
        updated_at=time.time(),
        swarm_schema=3,
        encodings=["zstd"],
        wants_logprobs=True,
    )
    async with verifier(configured("beta", url, tmp_path)) as beta:
        assert beta.swarm is not None
        await beta.swarm.kv.put(subjects.SWARM_NODES_BUCKET, "gamma", encode(sign_statement(asking, key, "swarm")))
        await generate(beta.node, group("beta", 0))
        await until(lambda: beta.status.get("scored_local") == 1)
        async with verifier(configured("alpha", url, tmp_path)) as alpha:
            await asyncio.sleep(1.0)  # it reads the directory as it starts
            await generate(alpha.node, group("alpha", 0, model=ModelIdentity(name="other", tokenizer_hash="b" * 64)))
            await until(lambda: beta.status.get("accepted") == 1)
        (theirs,) = [each.group for each in await scored(beta.node, "beta") if each.origin == "external"]
    assert [each.token_ids for each in theirs.completions] == [None, None]
    assert [unpack_logprobs(each.behaviour_logprobs or b"") for each in theirs.completions] == [
        pytest.approx([-1.0, -0.1], rel=1e-3)
    ] * 2


async def test_a_group_delivered_again_after_a_crash_counts_once(nats_server: MakeServer, tmp_path: Path) -> None:
    """The crash: a verifier took the group, stored its rewards, and died before it acknowledged."""
    config = configured("alpha", nats_server().url, tmp_path)
    crashed = await connect(config.nats.node_url, name="crashed")
    await ensure_node_streams(crashed, "alpha")
    stream = subjects.node_rollouts_stream("alpha")
    async with verifier(config):
        pass
    await generate(crashed, group("alpha", 0))
    (delivery,) = await fetch(crashed, stream, subjects.VERIFIER_CONSUMER, 1, 2.0)
    payload = await crashed.payload(delivery.message)
    stored = ScoredGroup(
        group_id=content_id(payload),
        origin="local",
        group=decode(payload, RolloutGroup),
        rewards=[1.0, 0.0],
        scored_by="alpha",
        score_seconds=0.0,
        scored_at=time.time(),
    )
    scored_stream = subjects.node_scored_stream("alpha")
    await crashed.publish(subjects.node_scored("alpha"), encode(stored), stream=scored_stream, message_id=stored.group_id)
    async with verifier(config) as again:
        await until(lambda: queue_is_empty(again.node, "alpha"))
        assert len(await scored(again.node, "alpha")) == 1
        await until(lambda: again.status.get("shared") == 1)
    await crashed.close()


async def test_nodes_with_and_without_further_fields_learn_from_each_other_and_blame_nobody(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    """The later version's fields stand at every level of its groups, scores and directory entry."""
    url = nats_server().url
    command = [sys.executable, "-m", "tests.integration.newer_node", "gamma", url, str(tmp_path)]
    later = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert later.stdin is not None
    try:
        async with verifier(configured("beta", url, tmp_path)) as beta:
            assert beta.swarm is not None
            await generate(beta.node, *(group("beta", index) for index in range(8)))
            await until(lambda: beta.status.get("accepted") == 8)

            async def heard_there() -> bool:
                with suppress(NoStream):
                    return sum(each.origin == "external" for each in await scored(beta.node, "gamma")) == 8
                return False

            await until(heard_there)
            assert beta.status.get("refused") == 0
            messages = await beta.swarm.read(subjects.SWARM_ROLLOUTS, 1, 99)
            sent = [decode(await beta.swarm.payload(each), SignedRollouts) for each in messages]
            bodies = {each.node: msgspec.msgpack.decode(unpacked(each.body, each.encoding, 2**20)) for each in sent}
            assert bodies["gamma"]["completions"][0]["added"] == bodies["gamma"]["added"] == ["parts", [1, 2]]
            assert "added" not in bodies["beta"]

            async def listed() -> bool:
                assert beta.swarm is not None
                entry = await beta.swarm.kv.get(subjects.SWARM_NODES_BUCKET, "gamma")
                return (
                    entry is not None and check_statement(entry.value, NodeRecord, time.time()).standing is SignatureStatus.SIGNED
                )

            await until(listed)
            for node in ("beta", "gamma"):
                for each in (await beta.node.kv.newest(subjects.node_bucket(node), 1024, SENDERS_PREFIX))[0]:
                    assert decode(each.value, SendersReport).worst == []
    finally:
        later.stdin.close()
        assert await asyncio.wait_for(later.wait(), 20) == 0


async def test_foreign_messages_that_must_stay_outside_do_and_the_node_works_on(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "hangs", HANGS)
    # The hanging answer's second of processor time must end it, not the group's deadline.
    bounds = {"max_foreign_bytes": 20_000, "max_foreign_completions": 4, "foreign_group_s": 60}
    config = configured("alpha", nats_server().url, tmp_path, None, WITH_A_SCORER_THAT_HANGS, **bounds)
    key, thief = SigningKey(new_seed()), SigningKey(new_seed())
    subject = subjects.rollouts("beta")

    def signed(body: RolloutGroup, by: SigningKey = key) -> bytes:
        return encode(sign(body, by))

    good = group("beta", 0)
    held_out = held_out_tasks(config.tasks, config.eval.tasks)[0]
    lying = msgspec.structs.replace(group("beta", 7).task, answer="999")
    body = encode(group("beta", 1))
    forged = SignedRollouts(
        swarm=DEFAULT_SWARM_ID,
        node="beta",
        public_key=key.public_key,
        signature=key.sign(signed_bytes(DEFAULT_SWARM_ID, body)),
        body=encode(group("beta", 2)),
    )
    hanging_task = derive_task(task_ref(dataset="simple_integration", seed=1, index=0))
    hanging = group("gamma", 0, [HANG, HANG + "+1", HANG + "+2"], task=hanging_task)
    sent: list[tuple[Refusal | None, str, bytes]] = [
        (Refusal.MALFORMED, subject, b"\x00garbage"),
        (Refusal.MALFORMED, "swarm.rollouts.nonsense", b""),
        (None, subject, signed(good)),
        (Refusal.REPLAYED, subject, signed(good)),
        (Refusal.SIGNATURE, subject, encode(forged)),
        (Refusal.UNKNOWN_KEY, subject, signed(group("beta", 3), thief)),
        (Refusal.AUTHOR, subjects.rollouts("gamma"), signed(group("beta", 4))),
        (Refusal.AUTHOR, f"{subject}.made-up", signed(group("beta", 13))),
        (Refusal.TOO_OLD, subject, signed(group("beta", 5, created_at=time.time() - 4000))),
        (Refusal.FROM_FUTURE, subject, signed(group("beta", 6, created_at=time.time() + 4000))),
        (Refusal.TASK_MISMATCH, subject, signed(group("beta", 7, task=lying))),
        (Refusal.HELD_OUT, subject, signed(group("beta", 8, task=held_out))),
        (Refusal.TOO_LARGE, subject, b"\x00" * 20_001),
        (Refusal.LENGTHS, subject, signed(group("beta", 9, ["1" * 17_000]))),
        (Refusal.TASK_NOT_ALLOWED, subject, signed(group("beta", 10, task=_foreign_dataset()))),
        (Refusal.TASK_UNDERIVABLE, subject, signed(group("beta", 11, task=_bad_index()))),
        (Refusal.UNKNOWN_REWARD, subjects.rollouts("gamma"), signed(hanging, thief)),
        (Refusal.REPEATED, subject, signed(group("beta", 0, draw=99))),
        (None, subject, signed(group("beta", 12))),
    ]
    async with verifier(config) as alpha:
        assert alpha.swarm is not None
        for number, (_, where, payload) in enumerate(sent):
            await alpha.swarm.publish(where, payload, stream=subjects.SWARM_ROLLOUTS, message_id=f"m{number}")
            # One after the other: a replay is one only after the first was taken in.
            await until(lambda: alpha.status.get("refused") + alpha.status.get("accepted") > number)  # noqa: B023
        await generate(alpha.node, *(group("alpha", index) for index in range(5)))
        await until(lambda: alpha.status.get("scored_local") == 5)
        await until(lambda: alpha.status.get("refused") + alpha.status.get("accepted") == len(sent))
        for reason in Refusal:
            expected = sum(each[0] is reason for each in sent)
            assert alpha.status.get(f"refused_{reason.value}") == expected, reason
        taken = [each.group.draw for each in await scored(alpha.node, "alpha") if each.origin == "external"]
        assert sorted(taken) == [0, 12]
        metrics = generate_latest(alpha.registry).decode()
        assert 'swarm_ingest_rejected_total{reason="quarantined"} 0.0' in metrics
        assert 'swarm_ingest_rejected_by_sender_total{sender="gamma"} 2.0' in metrics
    kept = read_jsonl(refused_file(config.node.run_dir, "0"))
    assert Counter(line["reason"] for line in kept) == Counter(reason.value for reason, _, _ in sent if reason)
    unread = {each.value for each in (Refusal.MALFORMED, Refusal.SIGNATURE, Refusal.TOO_LARGE, Refusal.REPLAYED)}
    assert {line["reason"] for line in kept if "group" not in line} == unread, "no text of what was not decoded"
    (too_old,) = (line for line in kept if line["reason"] == Refusal.TOO_OLD.value)
    assert too_old["id"] == content_id(decode(sent[8][2], SignedRollouts).body) and too_old["group"]["draw"] == 5


def _foreign_dataset() -> Task:
    return derive_task(task_ref(dataset="lcm", seed=1, index=0))


def _bad_index() -> Task:
    made = derive_task(task_ref(dataset="gcd", seed=1, index=0))
    return msgspec.structs.replace(made, ref=task_ref(dataset="gcd", seed=1, index=10_000_000))


async def test_a_hanging_own_answer_leaves_its_group_and_an_unusable_group_becomes_a_dead_letter(
    nats_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "hangs", HANGS)
    config = configured("alpha", nats_server().url, tmp_path, None, WITH_A_SCORER_THAT_HANGS)
    task = derive_task(task_ref(dataset="simple_integration", seed=1, index=0))
    async with verifier(config) as alpha:
        lying = group("alpha", 1, task=msgspec.structs.replace(task, answer="x"))
        await generate(alpha.node, group("alpha", 0, [str(task.answer), HANG_ASLEEP], task=task), lying, group("alpha", 2))
        stream = subjects.node_rollouts_stream("alpha")
        await alpha.node.publish(subjects.node_rollouts("alpha"), b"unreadable", stream=stream, message_id="unreadable")
        await until(lambda: queue_is_empty(alpha.node, "alpha"))
        by_draw = {each.group.draw: each for each in await scored(alpha.node, "alpha")}
        assert (by_draw[0].rewards, by_draw[0].unknown) == ([1.0], {"timeout": 1})
        assert by_draw[2].rewards == [1.0, 0.0]
        assert by_draw[1].rewards == []
        assert (by_draw[1].failure or "").startswith("task_mismatch")
        assert alpha.status.get("score_timeouts") == 1
        dead = await alpha.node.read(subjects.node_dead_letters_stream("alpha"), 1, 10)
        assert sorted([await alpha.node.payload(message) for message in dead]) == sorted([encode(lying), b"unreadable"])


async def test_a_node_whose_swarm_plane_is_away_works_alone_and_shares_once_it_is_there(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    own = nats_server()
    port = free_port()
    config = configured("alpha", own.url, tmp_path, swarm_url=f"nats://127.0.0.1:{port}")
    async with verifier(config) as alpha:
        await generate(alpha.node, *(group("alpha", index) for index in range(3)))
        await until(lambda: alpha.status.get("scored_local") == 3)
        assert alpha.status.get("shared") == alpha.status.get("swarm_connected") == 0
        nats_server(port=port)
        await until(lambda: alpha.status.get("shared") == 3)
        assert alpha.status.get("swarm_connected") == 1


async def test_shares_that_pile_up_are_dropped_oldest_first_and_counted(tmp_path: Path) -> None:
    config = configured("alpha", "nats://127.0.0.1:1", tmp_path)
    log = structlog.get_logger("verifier")
    registry = CollectorRegistry()
    figures = Figures(registry, StatusBoard("alpha", "verifier", "0"))
    outbox = Outbox(config.verifier, SigningKey(new_seed()), SwarmLink(config, figures, log), figures, log)
    for _ in range(MAX_GROUPS + 5):
        outbox.offer(group("alpha", 0), "0" * 64, [1.0, 0.0])
    metrics = generate_latest(registry).decode()
    assert 'swarm_rollout_publish_total{plane="swarm",result="dropped"} 5.0' in metrics
    assert f"swarm_outbox_groups {MAX_GROUPS}.0" in metrics


async def test_a_node_reads_what_it_wants_of_a_long_past_and_nothing_when_it_wants_nothing(
    nats_server: MakeServer, tmp_path: Path
) -> None:
    url = nats_server().url
    config = configured("alpha", url, tmp_path)
    key = SigningKey(new_seed())
    swarm = await connect(url, name="beta")
    await prepare_swarm_streams(swarm, create=True)
    for index in range(600):
        payload = encode(sign(group("beta", index), key))
        await swarm.publish(subjects.rollouts("beta"), payload, stream=subjects.SWARM_ROLLOUTS, message_id=content_id(payload))
    await swarm.close()
    async with verifier(config, wants=0) as context:
        await asyncio.sleep(1.0)
        assert read_total(context) == 0.0
        await want(context.node, "alpha", 6)
        await until(lambda: context.status.get("accepted") >= 6)
        await want(context.node, "alpha", 0, scored_seq=100)
        await asyncio.sleep(0.5)
        assert 6 <= read_total(context) <= 60, "of 600; a group that a busy machine takes long over is read for again"
        assert context.status.get("refused") == 0


def read_total(context: RunningVerifier) -> float:
    """Messages that its verifier has read from the swarm's stream."""
    return context.registry.get_sample_value("swarm_ingest_read_total") or 0.0
