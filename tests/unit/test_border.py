"""The border: every reason for a refusal, in the promised order, and no input that makes it
raise.
"""

from __future__ import annotations

from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.copies import GroupPrint, ReplayMemory
from services.verifier.episodes import without_tokens
from services.verifier.reputation import AGAIN_S, FIRST_S, GRACE_S, TRIES
from services.verifier.sharing import Content, is_shared, sign
from services.verifier.trust import KnownKeys
from shared.config import NodeConfig, TaskSpec
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import Completion, RolloutGroup, Sampling, SignedRollouts, Task, signed_bytes
from shared.contracts.wire import DEFAULT_SWARM_ID, ModelIdentity
from shared.identity.keys import KeyFileError, SigningKey, load_or_create, new_seed, verify
from shared.registry import SCORED_LOCALLY
from shared.tasks.derive import task_ref
from shared.tasks.held_out import HeldOut
from shared.tasks.prompt import text_task
from shared.tasks.sandbox import JobResult

NOW_S = 1_800_000_000.0
KEY = SigningKey(new_seed())
OTHER_KEY = SigningKey(new_seed())
THIRD_KEY = SigningKey(new_seed())
HELD = text_task(task_ref(dataset="gcd", seed=2**31 - 9, index=0), "A held-out question", "1")


def group(draw: int = 0, **changes: object) -> RolloutGroup:
    """A group of a task that no other draw has."""
    completion = Completion(
        text="4", finish_reason="stop", token_count=2, token_ids=pack_ids([4, 0]), behaviour_logprobs=pack_logprobs([-0.5, -1.0])
    )
    whole = RolloutGroup(
        node="beta",
        created_at=NOW_S - 5,
        draw=draw,
        task=text_task(task_ref(dataset="gcd", seed=1 + draw, index=0), "gcd of 4 and 8?", "4"),
        completions=[completion, msgspec.structs.replace(completion, text="5")],
        model=ModelIdentity(name="m", tokenizer_hash="a" * 64),
        policy_version=0,
        sampling=Sampling(),
    )
    return msgspec.structs.replace(whole, **changes)


def signed(body: RolloutGroup, key: SigningKey = KEY) -> bytes:
    return encode(sign(body, key))


def border(
    folder: Path, *, accept: str = "dataset", max_bytes: int = 100_000, max_completions: int = 4, max_chars: int = 100
) -> Border:
    rules = BorderRules(
        node="alpha",
        accept=accept,  # type: ignore[arg-type]
        own_tasks={("gcd", "{}")},
        max_age_s=1800,
        max_clock_skew_s=60,
        max_bytes=max_bytes,
        max_completions=max_completions,
        max_answer_chars=max_chars,
        max_tokens=32,
    )
    known = KnownKeys(folder / "known_keys.txt", ("alpha", OTHER_KEY.public_key))
    return Border(rules, known, ReplayMemory(1000, folder / "accepted.txt"), HeldOut([HELD]))


def result(reason: str | None = None, cpu_s: float = 0.0) -> JobResult:
    return JobResult([1.0, 0.0] if reason is None else [], None, reason, "", 0, 0.1, cpu_s=cpu_s)


SUBJECT = subjects.rollouts("beta")


def taken_in(gate: Border, subject: str, payload: bytes, now_s: float = NOW_S) -> Candidate:
    """A group that passes all checks and is scored."""
    candidate = gate.examine(subject, payload, now_s)
    assert isinstance(candidate, Candidate), candidate
    assert gate.conclude(candidate, JobResult([0.5] * len(candidate.group.completions), None, None, "", 0, 0.1), now_s) is None
    return candidate


def completions(**changes: object) -> list[Completion]:
    return [msgspec.structs.replace(each, **changes) for each in group().completions]


def tokens_of(count: int) -> dict[str, object]:
    """Fields of a completion of this many tokens."""
    return {
        "token_count": count,
        "token_ids": pack_ids([5] * count),
        "behaviour_logprobs": pack_logprobs([-1.0] * count),
    }


def with_body(body: bytes) -> bytes:
    signature = KEY.sign(signed_bytes(DEFAULT_SWARM_ID, body))
    return encode(SignedRollouts(swarm=DEFAULT_SWARM_ID, node="beta", public_key=KEY.public_key, signature=signature, body=body))


def version_1_group() -> bytes:
    """As nodes sent it that did not name the swarm yet."""
    body = encode(group())
    signature = KEY.sign(b"swarm-rollouts-v1\x00" + body)
    fields = {"schema": 1, "node": "beta", "public_key": KEY.public_key, "signature": signature, "body": body}
    packed: bytes = msgpack.packb(fields)
    return packed


def task(**ref: object) -> Task:
    made = group().task
    return msgspec.structs.replace(made, ref=msgspec.structs.replace(made.ref, **ref))


def forged() -> bytes:
    message = sign(group(), KEY)
    return encode(msgspec.structs.replace(message, body=message.body.replace(b"gcd of 4", b"gcd of 9")))


ELSEWHERE = sign(group(), KEY, swarm_id="another")
"""A true group of another swarm."""


@pytest.mark.parametrize(
    ("reason", "subject", "payload"),
    [
        (Refusal.TOO_LARGE, SUBJECT, b"x" * 100_001),
        (Refusal.MALFORMED, SUBJECT, b"x" * 100_000),
        (Refusal.MALFORMED, SUBJECT, b""),
        (Refusal.MALFORMED, SUBJECT, b"\x93" * 1000),
        (Refusal.MALFORMED, SUBJECT, encode(group())),
        (Refusal.SCHEMA_VERSION, SUBJECT, encode(group()).replace(b"schema\x03", b"schema\x04")),
        (Refusal.MALFORMED, SUBJECT, with_body(b"\xc1")),
        (Refusal.SCHEMA_VERSION, SUBJECT, with_body(encode(group()).replace(b"schema\x03", b"schema\x04"))),
        (Refusal.SCHEMA_VERSION, "swarm.rollouts.v1.beta.gcd", version_1_group()),
        (Refusal.OTHER_SWARM, SUBJECT, encode(sign(group(), KEY, swarm_id="another"))),
        (Refusal.SIGNATURE, SUBJECT, encode(msgspec.structs.replace(ELSEWHERE, swarm=DEFAULT_SWARM_ID))),
        (Refusal.OUT_OF_RANGE, SUBJECT, encode(msgspec.structs.replace(ELSEWHERE, swarm="x\x00y"))),
        (Refusal.SIGNATURE, SUBJECT, forged()),
        (Refusal.SIGNATURE, SUBJECT, encode(msgspec.structs.replace(sign(group(), KEY), public_key="U" * 56))),
        (Refusal.AUTHOR, subjects.rollouts("gamma"), signed(group())),
        (Refusal.SCHEMA_VERSION, "swarm.rollouts.v9.beta", signed(group())),
        (Refusal.AUTHOR, "swarm.rollouts.v3.beta.gcd", signed(group())),
        (Refusal.AUTHOR, SUBJECT, signed(group(node="gamma"))),
        (Refusal.AUTHOR, SUBJECT, with_body(encode(group(node="gamma")))),
        (Refusal.AUTHOR, subjects.rollouts("alpha"), signed(group(node="alpha"))),
        (Refusal.TOO_OLD, SUBJECT, signed(group(created_at=NOW_S - 1801))),
        (Refusal.FROM_FUTURE, SUBJECT, signed(group(created_at=NOW_S + 61))),
        (Refusal.TASK_NOT_ALLOWED, SUBJECT, signed(group(task=task(dataset="lcm")))),
        (Refusal.HELD_OUT, SUBJECT, signed(group(task=HELD))),
        (Refusal.LENGTHS, SUBJECT, signed(group(completions=completions(text="x" * 101)))),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(token_count=3)))),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(token_ids=pack_ids([1, 2, 3]))))),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(behaviour_logprobs=pack_logprobs([-1.0]))))),
        (Refusal.LENGTHS, SUBJECT, signed(group(completions=completions(**tokens_of(33))))),
        (Refusal.LENGTHS, SUBJECT, signed(group(completions=completions(**tokens_of(0))))),
        (
            Refusal.LENGTHS,
            SUBJECT,
            signed(group(completions=completions(token_count=0, token_ids=None, behaviour_logprobs=None))),
        ),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(token_ids=None)))),
        *(
            (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(behaviour_logprobs=pack_logprobs([-0.5, value])))))
            for value in (float("-inf"), float("inf"), float("nan"), 0.5)
        ),
        (Refusal.MALFORMED, SUBJECT, signed(group(prompt_ids=pack_ids([-1])))),
        (Refusal.MALFORMED, SUBJECT, signed(group(prompt_ids=b"torn!"))),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(token_ids=pack_ids([-1, 2]))))),
        (Refusal.MALFORMED, SUBJECT, signed(group(completions=completions(behaviour_logprobs=b"\xff" * 8)))),
    ],
)
def test_what_is_wrong_with_a_message_decides_the_reason(reason: Refusal, subject: str, payload: bytes, tmp_path: Path) -> None:
    verdict = border(tmp_path).examine(subject, payload, NOW_S)
    assert isinstance(verdict, Refused)
    assert verdict.reason is reason, verdict
    assert verdict.sender == subjects.rollouts_author(subject)


def test_of_a_group_with_more_completions_than_are_taken_the_first_are_heard_and_nobody_is_blamed(tmp_path: Path) -> None:
    gate = border(tmp_path)
    sent = [completions(text=f"{number}")[0] for number in range(9)]
    candidate = gate.examine(SUBJECT, signed(group(completions=sent)), NOW_S)
    assert isinstance(candidate, Candidate)
    assert [each.text for each in candidate.group.completions] == ["0", "1", "2", "3"]
    judged = msgspec.structs.replace(result(), rewards=[1.0, 0.0, 0.0, 1.0])
    assert gate.conclude(candidate, judged, NOW_S) is None
    too_long = gate.examine(SUBJECT, signed(group(draw=2, completions=completions(text="x" * 101))), NOW_S)
    assert isinstance(too_long, Refused) and too_long.reason is Refusal.LENGTHS
    assert gate.reputation.worst(1, NOW_S) == []


def test_a_good_group_passes_once_and_never_again_also_after_a_restart(tmp_path: Path) -> None:
    first = border(tmp_path)
    payload = signed(group())
    candidate = first.examine(SUBJECT, payload, NOW_S)
    assert isinstance(candidate, Candidate)
    assert candidate.sender == "beta"
    assert candidate.group == group()
    assert candidate.group_id == content_id(encode(group()))
    assert first.conclude(candidate, result(), NOW_S) is None
    for again in (first, border(tmp_path)):
        refused = again.examine(SUBJECT, payload, NOW_S)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.REPLAYED


def test_a_group_stored_twice_blames_nobody_also_while_both_are_examined_and_scored(tmp_path: Path) -> None:
    """A publisher that had no answer repeats its message, and the stream may keep both."""
    gate, payload = border(tmp_path), signed(group())
    first, second = (gate.examine(SUBJECT, payload, NOW_S, seq) for seq in (1, 2))
    assert isinstance(first, Candidate) and isinstance(second, Candidate)
    examination = gate.examination(SUBJECT, payload, NOW_S, 3)
    made = next(examination)()
    while not isinstance(made, GroupPrint):
        made = examination.send(made)()
    assert gate.conclude(first, result(), NOW_S) is None
    refused = gate.conclude(second, result(), NOW_S)
    assert refused is not None and (refused.reason, refused.blamed) == (Refusal.REPLAYED, None)
    with pytest.raises(StopIteration) as ended:
        examination.send(made)
    assert (ended.value.value.reason, ended.value.value.blamed) == (Refusal.REPLAYED, None)
    assert all(each.suspicion == 0 for each in gate.reputation.worst(9, NOW_S))


def test_a_name_belongs_to_the_first_key_seen_also_after_a_restart(tmp_path: Path) -> None:
    first = border(tmp_path)
    assert isinstance(first.examine(SUBJECT, signed(group(), THIRD_KEY), NOW_S), Candidate), "what is not accepted binds nothing"
    taken_in(first, SUBJECT, signed(group()))
    for again in (first, border(tmp_path)):
        refused = again.examine(SUBJECT, signed(group(draw=1), THIRD_KEY), NOW_S)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.UNKNOWN_KEY


def test_replicas_learn_each_others_names(tmp_path: Path) -> None:
    one, two = (KnownKeys(tmp_path / "known", ("alpha", "UA")) for _ in range(2))
    assert one.bind("beta", "UB", NOW_S)
    assert not two.bind("beta", "UC", NOW_S)
    assert not two.bind("alpha", "UC", NOW_S)
    assert two.bind("gamma", "UC", NOW_S)
    assert not one.bind("delta", "UC", NOW_S), "a key has one name, also at another replica"


def test_what_the_sandbox_says_becomes_a_typed_reason_and_a_hang_a_quarantine(tmp_path: Path) -> None:
    gate = border(tmp_path)
    candidate = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(candidate, Candidate)
    differences = {
        "task_mismatch": Refusal.TASK_MISMATCH,
        "task_index": Refusal.TASK_UNDERIVABLE,
        "task_dataset": Refusal.TASK_UNDERIVABLE,
        "task_verifier": Refusal.TASK_NOT_ALLOWED,
        "???": Refusal.TASK_UNDERIVABLE,
    }
    for said, reason in differences.items():
        refused = gate.conclude(candidate, result(said), NOW_S)
        assert refused is not None
        assert (refused.reason, refused.blamed) == (reason, None)
    incomplete = gate.conclude(candidate, JobResult([1.0], None, None, "", 0, 0.1), NOW_S)
    assert incomplete is not None
    assert (incomplete.reason, incomplete.blamed) == (Refusal.UNKNOWN_REWARD, None)
    assert gate.reputation.worst(1, NOW_S) == []
    gate = border(tmp_path)
    hanging = gate.examine(SUBJECT, signed(group(draw=1)), NOW_S)
    assert isinstance(hanging, Candidate)
    refused = gate.conclude(hanging, result("scoring_timeout", cpu_s=GRACE_S / 2), NOW_S)
    assert refused is not None
    assert (refused.reason, refused.blamed, refused.quarantined_s) == (Refusal.SCORING_TIMEOUT, KEY.public_key, 0.0)
    again = gate.examine(SUBJECT, signed(group(draw=3)), NOW_S)
    assert isinstance(again, Candidate)
    refused = gate.conclude(again, result("scoring_timeout", cpu_s=GRACE_S / 2 + 0.1), NOW_S)
    assert refused is not None
    assert (refused.reason, refused.blamed, refused.quarantined_s) == (Refusal.SCORING_COST, KEY.public_key, FIRST_S)
    left_out = gate.examine(SUBJECT, signed(group(draw=2)), NOW_S + 1)
    assert isinstance(left_out, Refused)
    assert left_out.reason is Refusal.QUARANTINED
    assert isinstance(gate.examine(SUBJECT, signed(group(draw=2)), NOW_S + FIRST_S + 1), Candidate)


def test_a_group_that_was_refused_is_not_scored_again_whoever_sends_it_again(tmp_path: Path) -> None:
    gate = border(tmp_path)
    candidate = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(candidate, Candidate)
    gate.conclude(candidate, result("scoring_timeout"), NOW_S)
    again = gate.examine(SUBJECT, signed(group()), NOW_S + FIRST_S + 1)
    assert isinstance(again, Refused)
    assert (again.reason, again.blamed) == (Refusal.REPLAYED, None)


def test_accept_same_wants_the_same_config_and_any_takes_all(tmp_path: Path) -> None:
    other_config = signed(group(task=task(config='{"max_numbers":3}')))
    refused = border(tmp_path, accept="same").examine(SUBJECT, other_config, NOW_S)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.TASK_NOT_ALLOWED
    assert isinstance(border(tmp_path, accept="same").examine(SUBJECT, signed(group()), NOW_S), Candidate)
    assert isinstance(border(tmp_path, accept="dataset").examine(SUBJECT, other_config, NOW_S), Candidate)
    assert isinstance(border(tmp_path, accept="any").examine(SUBJECT, signed(group(task=task(dataset="lcm"))), NOW_S), Candidate)


def test_no_foreign_group_is_taken_of_a_dataset_that_is_scored_locally_and_nobody_is_blamed(tmp_path: Path) -> None:
    for accept in ("same", "dataset", "any"):
        gate = border(tmp_path, accept=accept)
        for dataset in SCORED_LOCALLY:
            refused = gate.examine(SUBJECT, signed(group(task=task(dataset=dataset))), NOW_S)
            assert isinstance(refused, Refused)
            assert (refused.reason, refused.blamed) == (Refusal.TASK_NOT_ALLOWED, None)
    own = TaskSpec(dataset="simple_integration", verifier="exact")
    assert BorderRules.of(NodeConfig(tasks=[own]), "any").local_only.keys() == SCORED_LOCALLY - {own.dataset}


def test_accept_any_takes_no_task_of_a_package_that_this_node_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.border.from_package", lambda dataset: dataset == "lcm")
    refused = border(tmp_path, accept="any").examine(SUBJECT, signed(group(task=task(dataset="lcm"))), NOW_S)
    assert isinstance(refused, Refused) and refused.reason is Refusal.TASK_NOT_ALLOWED and "[[tasks]]" in refused.detail


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=2000), st.text(max_size=40))
def test_random_bytes_are_refused_and_never_raise(tmp_path_factory: pytest.TempPathFactory, payload: bytes, subject: str) -> None:
    gate = _shared_border(tmp_path_factory)
    assert isinstance(gate.examine(subject, payload, NOW_S), Refused)
    assert isinstance(gate.examine(SUBJECT, with_body(payload), NOW_S), Refused)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_mutated_message_is_refused_and_never_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes are changed inside the signed body before signing, so that decoding and the later
    checks see them too.
    """
    gate = _shared_border(tmp_path_factory)
    whole = bytearray(encode(group()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    verdict = gate.examine(SUBJECT, with_body(bytes(whole)), NOW_S)
    assert isinstance(verdict, Candidate | Refused)
    envelope = bytearray(signed(group()))
    position = data.draw(st.integers(0, len(envelope) - 1))
    envelope[position] ^= data.draw(st.integers(1, 255))
    outside = gate.examine(SUBJECT, bytes(envelope), NOW_S)
    assert isinstance(outside, Refused) or outside.group == group()


_borders: list[Border] = []


def _shared_border(factory: pytest.TempPathFactory) -> Border:
    if not _borders:
        _borders.append(border(factory.mktemp("border")))
    return _borders[0]


def test_shares_follow_the_policy_and_can_leave_tokens_out() -> None:
    assert [is_shared("all", r) for r in ([1, 1], [0, 1])] == [True, True]
    assert [is_shared("informative", r) for r in ([1, 1], [0, 1])] == [False, True]
    assert [is_shared("none", r) for r in ([1, 1], [0, 1])] == [False, False]
    bare = without_tokens(group(prompt_ids=pack_ids([1])))
    assert bare.prompt_ids is None
    assert all(each.token_ids is None and each.behaviour_logprobs is None for each in bare.completions)
    assert [each.text for each in bare.completions] == ["4", "5"]
    assert sign(group(), KEY, Content("text", "none")).body == encode(without_tokens(group()))


def test_a_key_file_is_private_is_kept_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "node.nk"
    made, loaded = load_or_create(path), load_or_create(path)
    assert made.public_key == loaded.public_key
    assert path.stat().st_mode & 0o777 == 0o600
    signature = made.sign(b"message")
    assert verify(made.public_key, b"message", signature)
    assert not verify(made.public_key, b"other", signature)
    assert not verify(made.public_key[:-1] + "AB"[made.public_key.endswith("A")], b"message", signature)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_or_create(path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(KeyFileError, match="no nkey seed"):
        load_or_create(path)


def test_a_stranger_s_prompt_tokens_stay_outside(tmp_path: Path) -> None:
    verdict = border(tmp_path).examine(SUBJECT, signed(group(prompt_ids=pack_ids([1, 2, 3]))), NOW_S)
    assert isinstance(verdict, Candidate) and verdict.group.prompt_ids is None
    assert verdict.group.completions == group().completions


def test_an_empty_answer_that_ended_at_once_is_an_answer(tmp_path: Path) -> None:
    verdict = border(tmp_path).examine(SUBJECT, signed(group(completions=completions(text="", **tokens_of(1)))), NOW_S)
    assert isinstance(verdict, Candidate)


def test_a_key_whose_tasks_come_out_otherwise_here_is_heard_again_without_having_them_all_derived(tmp_path: Path) -> None:
    """Its package has another version. An attacker gains no more by saying so than three
    derivations in ten minutes for a key and dataset.
    """
    gate, derived, now_s = border(tmp_path), 0, NOW_S
    for number in range(200):
        verdict = gate.examine(SUBJECT, signed(group(draw=number, created_at=now_s)), now_s)
        if isinstance(verdict, Candidate):
            derived += 1
            verdict = gate.conclude(verdict, result("task_mismatch"), now_s) or verdict
        assert isinstance(verdict, Refused)
        assert (verdict.reason, verdict.blamed, verdict.quarantined_s) == (Refusal.TASK_MISMATCH, None, 0.0)
        now_s += AGAIN_S / 100
    assert derived == TRIES + 1
    assert gate.reputation.worst(1, now_s) == []
    other_key = gate.examine(SUBJECT, signed(group(draw=300, created_at=now_s), THIRD_KEY), now_s)
    assert isinstance(other_key, Candidate), "another key's groups are derived"
    now_s += AGAIN_S
    updated = gate.examine(SUBJECT, signed(group(draw=301, created_at=now_s)), now_s)
    assert isinstance(updated, Candidate), "it may have been updated meanwhile"
    assert gate.conclude(updated, result(), now_s) is None
    assert isinstance(gate.examine(SUBJECT, signed(group(draw=302, created_at=now_s, task=task(index=7))), now_s), Candidate)


def test_bytes_whose_task_came_out_otherwise_are_not_derived_again_whoever_sends_them(tmp_path: Path) -> None:
    gate = border(tmp_path)
    candidate = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(candidate, Candidate)
    assert gate.conclude(candidate, result("task_mismatch"), NOW_S) is not None
    again = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(again, Refused) and (again.reason, again.blamed) == (Refusal.REPLAYED, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"schema": 4}, Refusal.SCHEMA_VERSION),
        ({"completions": [{"text": "2", "finish_reason": "tool_call", "token_count": 1}]}, Refusal.OUT_OF_RANGE),
        ({"draw": "7"}, Refusal.MALFORMED),
    ],
    ids=["further-fields", "further-schema", "further-value", "another-form"],
)
def test_a_newer_nodes_group_is_taken_or_refused_and_its_key_blamed_only_for_what_no_version_sends(
    change: dict[str, object], reason: Refusal | None, tmp_path: Path
) -> None:
    gate = border(tmp_path)
    for number in range(20):
        fields = msgpack.unpackb(encode(group(draw=number, task=task(index=number)))) | {"parts": [{"kind": "text"}]} | change
        schema = fields.pop("schema")
        verdict = gate.examine(SUBJECT, with_body(msgpack.packb({**fields, "schema": schema})), NOW_S)
        if reason is None:
            assert isinstance(verdict, Candidate)
            continue
        assert isinstance(verdict, Refused)
        blamed = KEY.public_key if reason is Refusal.MALFORMED else None
        if not verdict.quarantined_s and verdict.reason is not Refusal.QUARANTINED:
            assert (verdict.reason, verdict.blamed) == (reason, blamed)
    assert gate.reputation.quarantined(NOW_S) == (1 if reason is Refusal.MALFORMED else 0)
