"""The simulator's rules: what is generated, taken again or refused, and what hostile nodes send."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lab.attacks import ATTACKS, Hostile
from lab.base_models import fixed_phrases
from lab.sim_node import groups_to_make, groups_to_reuse, local_part
from lab.spec import Attack, LocalRule
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import Completion, ModelIdentity, RolloutGroup, Sampling, Task, TaskRef
from shared.tasks.answers import extract_answer

FLAGS = st.lists(st.booleans(), max_size=40)


def view(made: list[RolloutGroup], attack: Attack, first: RolloutGroup | None = None) -> Hostile:
    """What a hostile node knows that needs no policy."""
    return Hostile(
        number=0,
        attack=attack,
        rng=random.Random(0),
        made=[(each, [0.0] * len(each.completions)) for each in made],
        overheard=[],
        first=first,
        names=["mallory"],
        answer=lambda ref: "7",
        score=lambda ref, texts: [0.0] * len(texts),
        encode=lambda text: list(text.encode()),
        held_out=[],
        likelihood=lambda groups: [[0.0] * len(each.completions) for each in groups],
        max_tokens=1000,
        bound=-100.0,
        sources=[],
        shortcuts={},
    )


def group(draw: int = 0) -> RolloutGroup:
    return RolloutGroup(
        node="n00",
        created_at=1.0,
        draw=draw,
        task=Task(ref=TaskRef(dataset="gcd", seed=1, index=draw), question="?", answer="7"),
        completions=[Completion(text=str(number), finish_reason="stop", token_count=2) for number in range(8)],
        model=ModelIdentity(name="m", tokenizer_hash="0" * 64),
        policy_version=0,
        sampling=Sampling(),
    )


@given(made=FLAGS, local=st.integers(1, 12), unfiltered=st.integers(0, 4))
def test_drawing_until_enough_are_informative_ends_and_takes_them(made: list[bool], local: int, unfiltered: int) -> None:
    rule = LocalRule(filter="informative_until", unfiltered=min(unfiltered, local), max_groups=30)
    coming = iter(made)
    flags: list[bool] = []
    while (more := groups_to_make(rule, local, flags)) > 0:
        flags += [next(coming, False) for _ in range(more)]
    assert len(flags) <= 30
    chosen = local_part(rule, list(range(len(flags))), flags, local, random.Random(0))
    assert len(chosen) == min(local, len(flags)) == len(set(chosen))
    assert chosen[: rule.unfiltered] == list(range(rule.unfiltered))
    filtered = chosen[rule.unfiltered :]
    assert sum(flags[index] for index in filtered) == min(len(filtered), sum(flags[rule.unfiltered :]))


@given(flags=st.lists(st.booleans(), min_size=12, max_size=12), seed=st.integers(0, 100))
def test_a_pool_gives_its_informative_groups_first(flags: list[bool], seed: int) -> None:
    rule = LocalRule(filter="informative_of_pool", pool=10, unfiltered=2)
    assert groups_to_make(rule, 6, []) == 12
    assert groups_to_make(rule, 6, flags) == 0
    chosen = local_part(rule, list(range(12)), flags, 6, random.Random(seed))
    assert chosen[:2] == [0, 1]
    assert len(chosen) == 6
    assert sum(flags[index] for index in chosen[2:]) == min(4, sum(flags[2:]))


def test_without_a_rule_all_groups_are_taken_as_drawn() -> None:
    assert groups_to_make(LocalRule(), 4, []) == 4
    assert local_part(LocalRule(), [3, 1, 2], [True, False, True], 4, random.Random(0)) == [3, 1, 2]


def test_only_earlier_groups_that_are_not_too_old_are_used_again() -> None:
    rule = LocalRule(reuse=2, reuse_rounds=3)
    earlier = [(1, "one"), (2, "two"), (5, "five")]
    assert groups_to_reuse(rule, earlier, 5, random.Random(0)) == ["two"]
    assert set(groups_to_reuse(rule, earlier, 4, random.Random(0))) == {"one", "two"}
    assert groups_to_reuse(LocalRule(), earlier, 4, random.Random(0)) == []


def test_poison_is_right_to_a_verifier_in_the_share_asked_for() -> None:
    (spoiled,) = ATTACKS["wrong"](view([group()], Attack(right_share=0.25)))
    answers = [extract_answer(completion.text) for completion in spoiled.completions]
    assert answers.count("7") == 2
    assert all(len(completion.text) > 30 and completion.token_ids is None for completion in spoiled.completions)


def test_repeats_are_the_same_bytes_or_the_same_answers_under_a_new_id() -> None:
    first = group(1)
    sent = ATTACKS["duplicate"](view([group(number) for number in range(2, 20)], Attack(), first))
    ids = [content_id(encode(each)) for each in sent]
    assert 1 < len(set(ids)) < len(ids)
    assert all(each.completions == first.completions for each in sent)


def test_a_flood_is_many_groups_of_different_ids() -> None:
    sent = ATTACKS["flood"](view([group(1), group(2)], Attack(flood_factor=5)))
    assert len({content_id(encode(each)) for each in sent}) == 10


def test_phrases_are_what_questions_share_and_never_their_numbers() -> None:
    questions = [f"Please tell me the sum of {a} and {b}, nothing else at all." for a in range(9) for b in range(9)]
    phrases = fixed_phrases(questions)
    assert "Please tell me the sum of " in phrases
    assert any("nothing else at all." in phrase for phrase in phrases)
    assert not any(character.isdigit() for phrase in phrases for character in phrase)
