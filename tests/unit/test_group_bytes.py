"""What is sent of a group: as few bytes as give every receiver the tokens that were sampled."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import pytest

from services.generator.engines.base import Sample, SamplingParams
from services.generator.groups import Canonical, rollout_group
from services.generator.tasks import PromptedTask
from services.trainer.selection.group_tokens import TokenRules, foreign_tokens
from services.verifier.sharing import AUDIENCE_READ, Audience, Content, rounded_logprobs, sent_part, sign
from shared.contracts import subjects
from shared.contracts.codec import decode, encode, pack_logprobs, unpack_logprobs, unpacked
from shared.contracts.control import NodeRecord
from shared.contracts.messages import RolloutGroup
from shared.contracts.streams import ensure_swarm_streams
from shared.contracts.wire import ModelIdentity
from shared.identity.statements import sign_statement
from shared.model.prompts import answer_text, encode_answer, tokenizer_hash
from tests.nats_server import own_plane
from tests.unit.test_border import KEY, group
from tests.unit.test_foreign_tokens import byte_level_bpe

TOKENIZER: Any = byte_level_bpe()
END = int(TOKENIZER.eos_token_id)
TEXT = "the answer is 21"


def sample(ids: list[int], finish: Any = "stop") -> Sample:
    whole = [*ids, END] if finish == "stop" else ids
    return Sample(tuple(whole), answer_text(TOKENIZER, ids), finish, tuple(-0.1 * each for each in range(len(whole))))


@pytest.fixture(scope="module")
def made() -> RolloutGroup:
    """Two answers of the same text: the second was sampled in other tokens than the text gives."""
    ids = encode_answer(TOKENIZER, TEXT, ended=False, end_token_id=None)
    apart = [token for each in TEXT for token in encode_answer(TOKENIZER, each, ended=False, end_token_id=None)]
    assert len(apart) > len(ids)
    model = ModelIdentity(name="toy", tokenizer_hash=tokenizer_hash(TOKENIZER))
    prompted, params = PromptedTask(group().task, [1, 2]), SamplingParams()
    samples = [sample(ids), sample(apart), sample(ids, "length")]
    canonical = Canonical(TOKENIZER, (END,))
    return rollout_group(prompted, samples, node="beta", draw=1, model=model, params=params, created_at=1.0, canonical=canonical)


def test_ids_are_sent_where_the_text_does_not_give_them_and_a_receiver_has_all_that_were_sampled(made: RolloutGroup) -> None:
    assert [each.canonical for each in made.completions] == [True, False, True]
    signed = sign(made, KEY, Content())
    sent = decode(unpacked(signed.body, signed.encoding, 2**20), RolloutGroup)
    assert [each.token_ids is None for each in sent.completions] == [True, False, True]
    assert sent.prompt_ids is None and all(each.behaviour_logprobs is None for each in sent.completions)
    assert b"canonical" not in encode(sent)
    rules = TokenRules(
        tokenizer=TOKENIZER,
        tokenizer_hash=made.model.tokenizer_hash,
        end_token_id=END,
        vocabulary_size=len(TOKENIZER),
        max_length=512,
    )
    assert foreign_tokens(sent, rules).completions == foreign_tokens(made, rules).completions


def test_logprobs_are_sent_to_those_who_ask_with_all_ids_and_rounded_to_a_thousandth(made: RolloutGroup) -> None:
    sent = sent_part(made, Content("logprobs"))
    assert [each.token_ids for each in sent.completions] == [each.token_ids for each in made.completions]
    assert all(each.behaviour_logprobs is not None for each in sent.completions)
    values = [-1e-3, -0.3, -1.0, -7.77, -19.9, 0.0]
    for value, rounded in zip(values, unpack_logprobs(rounded_logprobs(pack_logprobs(values))), strict=True):
        assert math.isclose(value, rounded, rel_tol=5e-4)


def test_a_wish_of_a_signed_entry_counts_until_the_directory_forgets_it_and_of_whom_nobody_hears_none_counts() -> None:
    audience = Audience("alpha", "swarm", lambda name, _: name != "mallory")
    entry = NodeRecord(
        node="beta",
        public_key=KEY.public_key,
        model=ModelIdentity(name="toy", tokenizer_hash="0" * 64),
        tasks=["gcd"],
        policy_version=1,
        software="s",
        updated_at=1.0,
        swarm_schema=3,
        encodings=["zstd"],
        wants_logprobs=False,
    )
    change = msgspec.structs.replace
    for quiet in (
        entry,
        change(entry, node="alpha", encodings=[]),
        change(entry, node="mallory", encodings=[], wants_logprobs=True),
    ):
        audience.note(quiet, 0.0)
        assert audience.content(tokens=True, now_s=1.0) == Content("needed", "zstd")
    audience.note(change(entry, wants_logprobs=True), 0.0)
    audience.note(change(entry, node="gamma", encodings=[]), 100.0)
    assert audience.content(tokens=True, now_s=1.0) == Content("logprobs", "none")
    assert audience.content(tokens=False, now_s=1.0) == Content("text", "none")
    assert audience.content(tokens=True, now_s=950.0) == Content("needed", "none")
    assert audience.content(tokens=True, now_s=1001.0) == Content("needed", "zstd")


async def test_a_look_at_the_directory_costs_the_same_in_every_swarm_and_finds_each_ask_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = await own_plane()
    await ensure_swarm_streams(plane)
    model = ModelIdentity(name="toy", tokenizer_hash="0" * 64)
    for number in range(100):
        said = NodeRecord(
            node=f"node-{number}", public_key=KEY.public_key, model=model, tasks=["gcd"], policy_version=1, software="s",
            updated_at=time.time(), swarm_schema=3, encodings=["zstd"], wants_logprobs=number == 3,
        )  # fmt: skip
        await plane.kv.put(subjects.SWARM_NODES_BUCKET, said.node, encode(sign_statement(said, KEY, "swarm")))
    audience, heard = Audience("alpha", "swarm"), list[str]()
    note = audience.note
    monkeypatch.setattr(audience, "note", lambda record, now_s: (heard.append(record.node), note(record, now_s)))
    for looks in range(1, 61):
        await audience.look(plane)
        assert len(heard) <= looks * AUDIENCE_READ <= looks * 32
    assert len(set(heard)) == 100
    assert audience.content(tokens=True, now_s=time.monotonic()) == Content("logprobs", "zstd")
