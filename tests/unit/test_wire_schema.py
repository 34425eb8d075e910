"""Version 3 of the messages on a rollout's path, word for word, and what becomes of messages of
other versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest
import zstandard

from services.verifier.border import Border, Candidate, Refusal, Refused
from shared.config import TaskSpec
from shared.contracts import subjects
from shared.contracts.codec import MAX_VALUES, decode, decode_foreign, encode, pack_ids
from shared.contracts.limits import MAX_PARTS, MAX_PROMPT_MESSAGES, MAX_TEXT_CHARS
from shared.contracts.messages import (
    MAX_COMPLETIONS,
    Completion,
    Part,
    PromptMessage,
    RolloutGroup,
    Sampling,
    SignedRollouts,
    Task,
    TaskRef,
    signed_bytes,
    user_prompt,
)
from shared.contracts.wire import DEFAULT_SWARM_ID, Encoding, MessageError, ModelIdentity
from shared.tasks.derive import derive_task, forget_derived, task_ref
from shared.tasks.held_out import HeldOut, held_out_tasks
from shared.tasks.prompt import read_prompt, text_key
from shared.tasks.source import TaskSource
from tests import installed_packages
from tests.unit.test_border import KEY, NOW_S, SUBJECT, border, completions, group, signed

REF = {"dataset": "gcd", "package": "reasoning-gym", "version": "0.1.25", "config": "{}", "seed": 1, "index": 2}
TASK = {
    "ref": REF,
    "prompt": [{"role": "user", "parts": [{"kind": "text", "text": "gcd of 4 and 6?"}]}],
    "key": "18e6ef5a1ba9c8dd8f6d0b4a2b4b1a3a6a1f5a40a9c0fbd6bb0e0f3e1e0b7f5c",
    "answer": "2",
    "metadata": "{}",
}
SAID = {
    "text": "2",
    "finish_reason": "stop",
    "token_count": 2,
    "token_ids": b"\x07\0\0\0\x01\0\0\0",
    "behaviour_logprobs": b"\0\0\0\xbf\0\0\x80\xbe",
    "turn_tokens": b"\x02\0\0\0",
    "turn_chars": b"\x01\0\0\0",
}
GROUP = {
    "schema": 3,
    "node": "alpha",
    "created_at": 1_700_000_000.0,
    "draw": 3,
    "task": TASK,
    "completions": [SAID],
    "model": {"name": "toy", "tokenizer_hash": "0" * 64},
    "policy_version": 5,
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 256},
    "prompt_ids": None,
}
ENVELOPE = {
    "schema": 3,
    "swarm": "swarm",
    "node": "alpha",
    "public_key": "U" * 56,
    "signature": b"s" * 64,
    "encoding": "none",
    "body": msgpack.packb(GROUP),
}


def test_a_group_and_its_envelope_are_these_bytes() -> None:
    assert encode(decode(msgpack.packb(GROUP), RolloutGroup)) == msgpack.packb(GROUP)
    assert encode(decode(msgpack.packb(ENVELOPE), SignedRollouts)) == msgpack.packb(ENVELOPE)
    assert subjects.rollouts("alpha") == "swarm.rollouts.v3.alpha"
    assert signed_bytes("swarm", b"body", "zstd") == b"swarm-rollouts-v3\x00swarm\x00zstd\x00body"


def structs_within(kind: Any) -> Iterator[type]:
    """The message and every message inside it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from structs_within(hint)
    for inner in get_args(kind):
        yield from structs_within(inner)


def test_rewards_passes_and_unknowns_never_cross_the_swarm_plane() -> None:
    kinds = {*structs_within(SignedRollouts), *structs_within(RolloutGroup)}
    assert {Task, TaskRef, Part, PromptMessage, Completion, Sampling, ModelIdentity} <= kinds
    fields = {field for kind in kinds for field in kind.__struct_fields__}
    assert not [field for field in fields if any(word in field for word in ("reward", "pass", "unknown", "score", "advantage"))]


def version_2() -> dict[str, Any]:
    """A group as nodes sent it before prompts were messages."""
    task = {"ref": {key: REF[key] for key in ("dataset", "config", "seed", "index")}, "question": "gcd of 4 and 8?", "answer": "4"}
    said = {key: SAID[key] for key in ("text", "finish_reason", "token_count", "token_ids", "behaviour_logprobs")}
    return {
        **GROUP,
        "schema": 1,
        "node": "beta",
        "created_at": NOW_S - 5,
        "task": {**task, "metadata": "{}"},
        "completions": [said],
    }


def sent(body: bytes, encoding: str = "none", *, signed_as: Encoding = "none", schema: int = 3) -> bytes:
    signature = KEY.sign(signed_bytes(DEFAULT_SWARM_ID, body, signed_as))
    whole = {**ENVELOPE, "schema": schema, "node": "beta", "public_key": KEY.public_key, "signature": signature}
    packed: bytes = msgpack.packb({**whole, "encoding": encoding, "body": body})
    return packed


def refused(gate: Border, payload: bytes, subject: str = SUBJECT) -> tuple[Refusal, str]:
    verdict = gate.examine(subject, payload, NOW_S)
    assert isinstance(verdict, Refused) and verdict.blamed is None
    assert gate.reputation.suspicion(KEY.public_key, NOW_S) == 0.0
    return verdict.reason, verdict.detail


@pytest.mark.parametrize("schema", [2, 3], ids=["envelope-of-2", "envelope-of-3"])
@pytest.mark.parametrize("subject", ["swarm.rollouts.v2.beta", SUBJECT], ids=["own-subject", "our-subject"])
def test_a_group_of_version_2_is_not_read_and_blamed_on_nobody(subject: str, schema: int, tmp_path: Path) -> None:
    payload = sent(msgpack.packb(version_2()), schema=schema)
    reason, detail = refused(border(tmp_path), payload, subject)
    assert reason is Refusal.SCHEMA_VERSION and "update the older node" in detail


def test_a_subject_of_another_version_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    gate = border(tmp_path)
    for subject in ("swarm.rollouts.v2.beta", "swarm.rollouts.v4.beta"):
        told = gate.refuse_unread(subject, 10, NOW_S)
        assert told is not None and told.reason is Refusal.SCHEMA_VERSION and told.sender is None
    assert gate.refuse_unread(SUBJECT, 10, NOW_S) is None


@pytest.mark.parametrize("part", [{"kind": "image", "sha256": "0" * 64}, {"sha256": "0" * 64, "kind": "image", "text": "a cat"}])
def test_a_part_of_another_kind_is_refused_by_name_and_blamed_on_nobody(part: dict[str, Any], tmp_path: Path) -> None:
    made = msgspec.to_builtins(group(), builtin_types=(bytes,))
    made["task"]["prompt"].append({"role": "user", "parts": [{"kind": "text", "text": "What is this?"}, part]})
    reason, detail = refused(border(tmp_path), sent(msgpack.packb(made)))
    assert reason is Refusal.OUT_OF_RANGE and "'image'" in detail and "prompt[1].parts[1].kind" in detail


def test_a_part_that_says_nothing_is_no_version_of_it() -> None:
    with pytest.raises(MessageError) as error:
        decode(msgpack.packb({"kind": "text"}), Part)
    assert error.value.reason == "malformed"


def test_prompts_are_bounded() -> None:
    message = user_prompt("x")[0]
    for prompt in (
        [],
        [message] * (MAX_PROMPT_MESSAGES + 1),
        [PromptMessage(role="user", parts=[Part(text="x")] * (MAX_PARTS + 1))],
        [PromptMessage(role="user", parts=[])],
        [message, *user_prompt("x" * MAX_TEXT_CHARS)],
    ):
        packed = msgpack.packb({**TASK, "prompt": msgspec.to_builtins(prompt)})
        with pytest.raises(MessageError) as error:
            decode(packed, Task)
        assert error.value.reason == "out_of_range"


def test_the_largest_group_with_the_largest_prompt_is_read() -> None:
    prompt = [PromptMessage(role="user", parts=[Part(text="x")] * MAX_PARTS)] * MAX_PROMPT_MESSAGES
    task = decode(msgpack.packb({**TASK, "prompt": msgspec.to_builtins(prompt)}), Task)
    large = group(task=task, completions=completions()[:1] * MAX_COMPLETIONS)
    assert len(decode_foreign(encode(large), RolloutGroup).completions) == MAX_COMPLETIONS < MAX_VALUES


# How the body is packed.


def test_a_packed_body_is_read_and_its_id_is_that_of_the_bytes_as_sent(tmp_path: Path) -> None:
    body = zstandard.compress(encode(group()))
    verdict = border(tmp_path).examine(SUBJECT, sent(body, "zstd", signed_as="zstd"), NOW_S)
    assert isinstance(verdict, Candidate) and verdict.group == group()


def test_an_encoding_that_is_not_known_is_not_read(tmp_path: Path) -> None:
    reason, detail = refused(border(tmp_path), sent(encode(group()), "brotli"))
    assert reason is Refusal.OUT_OF_RANGE and "'brotli'" in detail


def test_the_signature_covers_the_encoding(tmp_path: Path) -> None:
    """Otherwise anybody could have another's group refused as malformed, and its key blamed."""
    assert refused(border(tmp_path), sent(encode(group()), "zstd"))[0] is Refusal.SIGNATURE


@pytest.mark.parametrize("states_its_size", [True, False])
def test_a_body_that_unpacks_beyond_its_bound_is_too_large(states_its_size: bool, tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=states_its_size).compress(bytes(2**28))
    assert refused(border(tmp_path), sent(bomb, "zstd", signed_as="zstd"))[0] is Refusal.TOO_LARGE


def test_a_body_that_is_not_packed_as_it_says_is_malformed(tmp_path: Path) -> None:
    for body in (encode(group()), zstandard.compress(encode(group()))[:-9], b""):
        verdict = border(tmp_path).examine(SUBJECT, sent(body, "zstd", signed_as="zstd"), NOW_S)
        assert isinstance(verdict, Refused) and (verdict.reason, verdict.blamed) == (Refusal.MALFORMED, KEY.public_key)


# Who derives a task.


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [("reasoning-gym", "0.0.1", "reasoning-gym 0.0.1"), ("wordle", "1.0", "no package 'wordle'"), ("", "", "")],
)
def test_a_task_of_another_version_or_package_is_not_taken_in(package: str, version: str, said: str, tmp_path: Path) -> None:
    gate = border(tmp_path)
    for draw in range(20):
        made = group(draw)
        ref = msgspec.structs.replace(made.task.ref, package=package, version=version)
        other = msgspec.structs.replace(made, task=msgspec.structs.replace(made.task, ref=ref))
        reason, detail = refused(gate, signed(other))
        assert reason is Refusal.TASK_NOT_ALLOWED and said in detail


# Turns.


def turns(tokens: list[int], chars: list[int]) -> dict[str, object]:
    return {"token_count": 5, "text": "12345", "turn_tokens": pack_ids(tokens), "turn_chars": pack_ids(chars)}


def test_the_ends_of_turns_are_carried_as_they_are() -> None:
    said = Completion(finish_reason="stop", **turns([2, 3, 5], [2, 2, 5]))  # type: ignore[arg-type]
    assert decode(encode(said), Completion) == said


@pytest.mark.parametrize(
    ("tokens", "chars"),
    [([2], [5]), ([6], [5]), ([5], [4]), ([5], [6]), ([3, 3, 5], [1, 2, 5]), ([4, 3, 5], [1, 2, 5]), ([0, 5], [1, 5])]
    + [([2, 5], [5]), ([2, 5], [5, 4]), ([2, 5], [3, 1]), ([], []), ([-1, 5], [1, 5])],
)
def test_ends_of_turns_that_cannot_be_are_malformed(tokens: list[int], chars: list[int]) -> None:
    packed = msgpack.packb({**SAID, "token_ids": None, "behaviour_logprobs": None, **turns(tokens, chars)})
    with pytest.raises(MessageError) as error:
        decode(packed, Completion)
    assert error.value.reason == "malformed"


def test_a_group_of_several_turns_is_not_taken_in_yet_and_one_of_one_turn_is(tmp_path: Path) -> None:
    """Scored as one text, several turns would mean something else than their author was asked."""
    one = group(completions=completions(turn_tokens=pack_ids([2]), turn_chars=pack_ids([1])))
    verdict = border(tmp_path).examine(SUBJECT, signed(one), NOW_S)
    assert isinstance(verdict, Candidate) and verdict.group.completions == one.completions
    several = group(completions=completions(turn_tokens=pack_ids([1, 2]), turn_chars=pack_ids([0, 1])))
    assert refused(border(tmp_path), signed(several))[0] is Refusal.OUT_OF_RANGE


# Task sources: what a task is known by, and prompts of messages.

HIDDEN_WORD = """
import random
class mine:
    def __init__(self, settings, seed): self._seed = seed
    def __len__(self): return 500
    def __getitem__(self, i):
        w = random.Random(f"{self._seed} {i}").choice(["apple", "grape", "melon", "lemon", "peach", "mango"])
        return {"question": "Guess my word of five letters.", "answer": w, "metadata": {"word": w, "n": i, "s": self._seed}}
"""
MESSAGES = """
class mine:
    def __init__(self, settings, seed): pass
    def __len__(self): return 500
    def __getitem__(self, i):
        asked = [{"type": "text", "text": f"What is {i} + 1?"}]
        start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
        return {"prompt": start, "answer": str(i + 1), "key": i % 7, "metadata": {"n": i}}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[TaskSpec]:
    """A package with a task source `mine` of the code that the test is called with."""
    installed_packages.install(tmp_path, monkeypatch, "swarm.task_sources", "mine", request.param)
    forget_derived()
    yield TaskSpec(dataset="mine", verifier="exact")
    monkeypatch.undo()
    installed_packages.forget()
    forget_derived()


@pytest.mark.parametrize("source", [HIDDEN_WORD], indirect=True)
def test_a_source_whose_question_is_always_the_same_holds_out_tasks_and_has_others_to_train_on(source: TaskSpec) -> None:
    held = held_out_tasks([source], 20)
    assert len(held) == len({task.key for task in held}) == 20 and len({task.text for task in held}) == 1
    drawn = [next(TaskSource([source], node="alpha", seed=1).candidates(draw, HeldOut(held))) for draw in range(50)]
    assert not {task.key for task in held} & {task.key for task in drawn}
    assert (drawn[0].ref.package, drawn[0].ref.version) == ("my-package", "1.0")


@pytest.mark.parametrize("source", [MESSAGES], indirect=True)
def test_a_sources_messages_become_the_prompt_and_its_key_the_tasks(source: TaskSpec) -> None:
    task = derive_task(task_ref("mine", seed=1, index=3))
    assert [(message.role, message.text) for message in task.prompt] == [("system", "Be brief."), ("user", "What is 3 + 1?")]
    assert task.text == "system: Be brief.\n\nuser: What is 3 + 1?"
    assert task.key == derive_task(task_ref("mine", seed=1, index=10)).key != derive_task(task_ref("mine", seed=1, index=4)).key
    assert len(held_out_tasks([source], 20)) == 7


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'"),
        ([{"role": "narrator", "content": "x"}], "'narrator'"),
        ([{"role": "user"}], "no content"),
        (["x"], "None"),
        (7, "int"),
        ([], "list"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused_by_name(prompt: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_prompt(prompt)


def test_a_question_is_the_same_task_whatever_its_case_and_spacing() -> None:
    assert text_key("What is  1 + 1?") == text_key(" what is 1 + 1? ") != text_key("What is 1 + 2?")
