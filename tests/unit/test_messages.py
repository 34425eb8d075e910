"""Messages: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from random import Random

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.codec import (
    MAX_DEPTH,
    MAX_VALUES,
    content_id,
    decode,
    decode_foreign,
    encode,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from shared.contracts.control import PolicyPointer
from shared.contracts.messages import MAX_COMPLETIONS, Completion, RolloutGroup, Sampling, TaskRef
from shared.contracts.wire import MessageError, ModelIdentity
from shared.tasks.prompt import text_task


def a_group(**changes: object) -> RolloutGroup:
    fields: dict[str, object] = {
        "node": "alpha",
        "created_at": 1_700_000_000.0,
        "draw": 3,
        "task": text_task(TaskRef(dataset="gcd", seed=1, index=2), "gcd of 4 and 6?", "2"),
        "completions": [
            Completion(
                text="2",
                finish_reason="stop",
                token_count=2,
                token_ids=pack_ids([7, 1]),
                behaviour_logprobs=pack_logprobs([-0.5, -0.25]),
            ),
            Completion(text="3", finish_reason="length", token_count=1),
        ],
        "model": ModelIdentity(name="toy", tokenizer_hash="0" * 64),
        "policy_version": 5,
        "sampling": Sampling(),
    }
    return RolloutGroup(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_group_survives_the_wire() -> None:
    group = a_group()
    assert decode(encode(group), RolloutGroup) == group


def test_the_id_is_the_hash_of_the_bytes() -> None:
    assert content_id(encode(a_group())) == content_id(encode(a_group()))
    assert content_id(encode(a_group())) != content_id(encode(a_group(draw=4)))


def _completion(**changes: object) -> dict[str, object]:
    return {"text": "2", "finish_reason": "stop", "token_count": 1, **changes}


def _with(changes: dict[str, object]) -> bytes:
    fields = msgpack.unpackb(encode(a_group()))
    fields.update(changes)
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 4}, "schema_version"),
        ({"schema": 4, "draw": "another type"}, "schema_version"),
        ({"created_at": math.nan}, "out_of_range"),
        ({"created_at": math.inf}, "out_of_range"),
        ({"node": "Not A Name"}, "out_of_range"),
        ({"completions": []}, "out_of_range"),
        ({"draw": -1}, "out_of_range"),
        ({"completions": [_completion(finish_reason="tool_call")]}, "out_of_range"),
        ({"completions": [_completion(text="x" * 4_194_305)]}, "out_of_range"),
        ({"policy_version": "7"}, "malformed"),
        ({"completions": [{"text": "no reason"}]}, "malformed"),
        ({"schema": "3"}, "malformed"),
    ],
)
def test_what_does_not_fit_is_refused_under_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(MessageError) as refused:
        decode(_with(changes), RolloutGroup)
    assert refused.value.reason == reason


@pytest.mark.parametrize("reading", [decode, decode_foreign])
def test_fields_that_a_newer_version_added_are_ignored_at_every_level(reading: Callable[..., RolloutGroup]) -> None:
    fields = msgpack.unpackb(encode(a_group()))
    added = {"turns": [1, {"of": [None, 2.5, "text"]}], "encoding": "none"}
    for part in (fields, fields["task"], fields["task"]["ref"], *fields["completions"], fields["model"], fields["sampling"]):
        part |= added
    assert reading(msgpack.packb(fields), RolloutGroup) == a_group()


@given(st.randoms())
def test_the_order_of_fields_changes_neither_what_is_read_nor_why_it_is_refused(random: Random) -> None:
    def shuffled(**changes: object) -> bytes:
        pairs = [*(msgpack.unpackb(encode(a_group())) | changes).items()]
        random.shuffle(pairs)
        packed: bytes = msgpack.packb(dict(pairs))
        return packed

    assert decode_foreign(shuffled(), RolloutGroup) == a_group()
    with pytest.raises(MessageError) as refused:
        decode_foreign(shuffled(schema=4, task="another form", added=1), RolloutGroup)
    assert refused.value.reason == "schema_version"


def _added(name: str, packed: bytes) -> bytes:
    """The group's bytes with one more field, which may be one that it has."""
    whole = encode(a_group())
    return bytes([whole[0] + 1]) + whole[1:] + msgpack.packb(name) + packed


DEEP = b"\x91" * MAX_DEPTH + b"\x00"


def _counted(value: object) -> int:
    """Count maps and lists, entries and elements in it."""
    within = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if within is None else 1 + len(within) + sum(map(_counted, within))


def _holding(count: int, *, each: object) -> bytes:
    """A group with one more field, a list of `each` and of numbers for the rest, that has `count`
    values altogether.
    """
    free = count - _counted(msgpack.unpackb(_added("added", msgpack.packb([]))))
    many, rest = divmod(free, 1 + _counted(each))
    payload = _added("added", msgpack.packb([each] * many + [0] * rest))
    assert _counted(msgpack.unpackb(payload)) == count
    return payload


@pytest.mark.parametrize(
    "payload",
    [
        _added("draw", b"\x07"),
        _added("added", b"\x01\x00"),
        _added("added", b"\x82\xa1a\x01\xa1a\x01"),
        _added("added", DEEP),
        _added("added", b"\x91" * 100_000 + b"\x00"),
        _added("added", msgpack.packb([0] * MAX_VALUES)),
        _added("added", msgpack.packb([[{}] * 128] * 128)),
        _holding(MAX_VALUES + 1, each=0),
        _holding(MAX_VALUES + 1, each=[]),
        _holding(MAX_VALUES + 1, each={"a": 1, "b": [2]}),
        _added("added", b"\xdd\xff\xff\xff\xff"),
        _added("added", b"\xc1"),
    ],
    ids=[
        "twice",
        "trailing",
        "twice-within",
        "deep",
        "endless",
        "many",
        "many-maps",
        "one-above",
        "one-list-above",
        "one-map-above",
        "claimed",
        "none",
    ],
)
def test_what_unknown_fields_hold_is_bounded_and_no_field_comes_twice(payload: bytes) -> None:
    with pytest.raises(MessageError) as refused:
        decode_foreign(payload, RolloutGroup)
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize("each", [0, [], {"a": 1, "b": [2]}], ids=["numbers", "lists", "maps"])
def test_unknown_fields_hold_exactly_as_many_values_as_the_bound_says(each: object) -> None:
    assert decode_foreign(_holding(MAX_VALUES, each=each), RolloutGroup) == a_group()


def test_the_bounds_leave_room_for_the_largest_group_and_for_further_fields() -> None:
    fields = msgpack.unpackb(encode(a_group()))
    fields["completions"] = [_completion(token_ids=b"", behaviour_logprobs=b"", turns=3)] * MAX_COMPLETIONS
    fields["added"] = msgpack.unpackb(DEEP[2:])
    assert len(decode_foreign(msgpack.packb(fields), RolloutGroup).completions) == MAX_COMPLETIONS


def test_a_torn_message_of_another_version_is_malformed() -> None:
    with pytest.raises(MessageError) as refused:
        decode(_with({"schema": 4})[:-1], RolloutGroup)
    assert refused.value.reason == "malformed"


def test_a_truncated_message_is_refused() -> None:
    payload = encode(a_group())
    for cut in range(0, len(payload), 7):
        with pytest.raises(MessageError):
            decode(payload[:cut], RolloutGroup)


def test_deep_nesting_is_refused_and_does_not_end_the_process() -> None:
    with pytest.raises(MessageError):
        decode(b"\x91" * 100_000, RolloutGroup)


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_never_crash(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode(payload, PolicyPointer)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(-50, 0, width=32), max_size=50))
def test_logprobs_survive_packing(logprobs: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


@pytest.mark.parametrize("packed", [b"\x00", pack_logprobs([0.5]), pack_logprobs([math.nan]), pack_logprobs([-math.inf])])
def test_torn_infinite_or_positive_logprobs_are_refused(packed: bytes) -> None:
    with pytest.raises(MessageError):
        unpack_logprobs(packed)


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(MessageError):
        unpack_ids(pack_ids([-1]))


@pytest.mark.slow
def test_contracts_load_without_torch_or_transformers() -> None:
    script = (
        "import sys, shared.contracts.streams, shared.identity.permissions, shared.config, shared.transport.connect\n"
        "import shared.runtime\n"
        "heavy = {'torch', 'transformers', 'vllm', 'reasoning_gym'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
