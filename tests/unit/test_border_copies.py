"""Copies under new ids: what is one, who is blamed, what many keys gain by it; and what honest
nodes never lose by it.
"""

from __future__ import annotations

import random
import string
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import services.verifier.border as border_module
from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.copies import MAX_BYTES, MAX_GROUPS, REMEMBERED_S, CopyMemory, normalised
from services.verifier.reputation import CAUGHT, CAUGHT_S, COPIERS
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import Completion, RolloutGroup, ScoredGroup
from shared.identity.keys import SigningKey, new_seed
from shared.tasks.prompt import text_task
from shared.tasks.sandbox import JobResult
from tests.unit.test_border import NOW_S, border, group, signed, taken_in, task

VICTIM, COPIER = SigningKey(new_seed()), SigningKey(new_seed())


def saying(texts: list[str], *, node: str = "beta", draw: int = 0, **changes: object) -> RolloutGroup:
    completions = [Completion(text=text, finish_reason="stop", token_count=3) for text in texts]
    return group(node=node, draw=draw, completions=completions, **changes)


def show(gate: Border, body: RolloutGroup, key: SigningKey, seq: int = 0, now_s: float = NOW_S) -> Candidate | Refused:
    return gate.examine(subjects.rollouts(body.node), signed(body, key), now_s, seq)


def take(gate: Border, body: RolloutGroup, key: SigningKey, now_s: float = NOW_S) -> None:
    taken_in(gate, subjects.rollouts(body.node), signed(body, key), now_s)


def reason(verdict: Candidate | Refused) -> Refusal | None:
    return verdict.reason if isinstance(verdict, Refused) else None


SHORT = ["<answer>4</answer>", "<answer>8</answer>", "<answer>4</answer>", "<answer>12</answer>"]


def prose(rng: random.Random, words: int = 8) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(words))


def long_texts(seed: int, count: int = 4) -> list[str]:
    rng = random.Random(seed)
    return [f"{prose(rng)} <answer>{rng.randint(1, 99)}</answer>" for _ in range(count)]


@pytest.mark.parametrize(
    "changed",
    [
        lambda body: msgspec.structs.replace(body, draw=77),
        lambda body: msgspec.structs.replace(body, created_at=body.created_at + 1),
        lambda body: saying([text.replace(">", "> ").upper() for text in SHORT], draw=0),
        lambda body: saying([*SHORT[:3], "<answer>13</answer>"]),
        lambda body: saying(SHORT[::-1]),
        lambda body: saying([f"\u200b{text}\u00a0" for text in SHORT]),
    ],
    ids=["draw", "time", "case and spaces", "one of four", "order", "invisible"],
)
def test_one_group_again_and_again_under_new_ids_is_taken_in_once(changed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The proof of concept of `duplicate` and `flood`: a new draw or time makes a new id of the
    same experience.
    """
    gate = border(tmp_path)
    body = saying(SHORT)
    take(gate, body, VICTIM)
    refused = show(gate, changed(body), VICTIM)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.blamed, refused.quarantined_s) == (Refusal.REPEATED, VICTIM.public_key, 0.0)


def test_a_sender_has_two_groups_of_a_task_whatever_they_say(tmp_path: Path) -> None:
    gate = border(tmp_path)
    verdicts = []
    for number in range(4):
        body = saying(long_texts(number), created_at=NOW_S - number)
        verdicts.append(reason(show(gate, body, VICTIM)))
        if verdicts[-1] is None:
            take(gate, body, VICTIM)
    assert verdicts == [None, None, Refusal.REPEATED, Refusal.REPEATED]


def test_the_same_item_through_another_seed_index_or_config_is_the_same_task(tmp_path: Path) -> None:
    gate = border(tmp_path)
    take(gate, saying(SHORT, task=task(seed=9, index=3)), VICTIM)
    for ref in ({"seed": 8, "index": 4}, {"seed": 9, "index": 3, "config": '{"size":501}'}):
        assert reason(show(gate, saying(SHORT, draw=1, task=task(**ref)), VICTIM)) is Refusal.REPEATED


def test_short_answers_that_honest_nodes_have_in_common_are_no_copies(tmp_path: Path) -> None:
    gate = border(tmp_path)
    for draw in range(50):
        for key, node in ((VICTIM, "beta"), (COPIER, "gamma")):
            take(gate, saying(SHORT, node=node, draw=2 * draw + (node == "gamma")), key)


def test_different_answers_to_one_task_are_no_copies(tmp_path: Path) -> None:
    gate = border(tmp_path)
    for number in range(8):
        take(gate, saying(long_texts(number), node=f"n{number}"), SigningKey(new_seed()))


def test_a_copy_of_anothers_long_text_is_refused_blamed_lightly_and_the_author_never(tmp_path: Path) -> None:
    gate = border(tmp_path)
    take(gate, saying(long_texts(1)), VICTIM)
    near = [text.replace("answer>", "Answer >", 1) + " so" for text in long_texts(1)]
    refused = show(gate, saying(near, node="gamma"), COPIER, seq=8)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.blamed, refused.quarantined_s) == (Refusal.COPIED, COPIER.public_key, 0.0)
    assert gate.reputation.suspicion(VICTIM.public_key, NOW_S) == 0.0


def test_a_copy_of_short_answers_is_refused_and_nobody_is_blamed(tmp_path: Path) -> None:
    gate = border(tmp_path)
    take(gate, saying(SHORT), VICTIM)
    refused = show(gate, saying(SHORT, node="gamma"), COPIER)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.blamed) == (Refusal.COPIED, None)


def test_who_gets_in_first_with_anothers_group_does_not_keep_the_author_out_and_is_blamed(tmp_path: Path) -> None:
    """The copy is looked at first, because the author's line is long; but the stream says whose
    group came first.
    """
    gate = border(tmp_path)
    copy, original = saying(long_texts(1), node="gamma"), saying(long_texts(1))
    first = show(gate, copy, COPIER, seq=12)
    assert isinstance(first, Candidate)
    assert gate.conclude(first, _scored(4), NOW_S) is None
    late = show(gate, original, VICTIM, seq=11)
    assert isinstance(late, Candidate)
    assert gate.conclude(late, _scored(4), NOW_S + 1) is None
    assert gate.reputation.suspicion(COPIER.public_key, NOW_S) > 0
    assert gate.reputation.suspicion(VICTIM.public_key, NOW_S) == 0.0


def test_an_original_is_taken_however_long_after_its_copy_it_is_looked_at_and_each_copy_counts_once(tmp_path: Path) -> None:
    """A sampled stream is looked at in no order: what lies earlier in it may come an hour later."""
    gate = border(tmp_path)
    for number in range(CAUGHT):
        assert gate.senders.by_key(COPIER.public_key, NOW_S).account != COPIERS
        copy, original = (saying(long_texts(number), node=node, draw=number) for node in ("gamma", "beta"))
        for body, key, seq, wait_s in ((copy, COPIER, 2 * number + 2, 0.0), (original, VICTIM, 2 * number + 1, 1700.0)):
            shown = show(gate, body, key, seq=seq, now_s=NOW_S + wait_s)
            assert isinstance(shown, Candidate), shown
            assert gate.conclude(shown, _scored(4), NOW_S + wait_s) is None
    assert gate.senders.by_key(COPIER.public_key, NOW_S + 1700).account == COPIERS
    assert gate.senders.by_key(VICTIM.public_key, NOW_S + 1700).account == VICTIM.public_key
    assert gate.reputation.suspicion(VICTIM.public_key, NOW_S + 1700) == 0.0


def test_an_original_is_taken_after_its_copy_under_another_reference(tmp_path: Path) -> None:
    gate = border(tmp_path)
    copy, original = saying(long_texts(1), node="gamma", task=task(seed=90)), saying(long_texts(1), task=task(seed=1))
    for body, key, seq in ((copy, COPIER, 12), (original, VICTIM, 11)):
        shown = show(gate, body, key, seq=seq)
        assert isinstance(shown, Candidate), shown
        assert gate.conclude(shown, _scored(4), NOW_S) is None


def test_where_position_and_time_in_the_stream_disagree_nobody_is_blamed() -> None:
    """A stream that was made anew counts from 1 again: a copy in it lies at an earlier position
    than its original of before.
    """
    memory = CopyMemory()
    made = memory.fingerprint_of(saying(long_texts(1)))
    memory.remember(made, "UA", 5000, 100.0, stored_at_s=90.0)
    found, copiers = memory.look(made, "UB", 7, 110.0, stored_at_s=105.0)
    assert found is not None
    assert (found.kind, found.telling, copiers) == ("copied", False, [])
    found, copiers = memory.look(made, "UB", 4999, 110.0, stored_at_s=89.0)
    assert (found, copiers) == (None, ["UA"])


def test_a_copy_of_a_local_group_is_refused(tmp_path: Path) -> None:
    gate = border(tmp_path)
    gate.note_own(saying(long_texts(1), node="alpha"))
    refused = show(gate, saying(long_texts(1), node="gamma"), COPIER, seq=1)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.blamed) == (Refusal.COPIED, COPIER.public_key)


def test_two_copies_in_work_at_the_same_time_come_in_once(tmp_path: Path) -> None:
    gate = border(tmp_path)
    both = [show(gate, saying(SHORT, created_at=NOW_S - number), VICTIM) for number in range(2)]
    outcomes = [gate.conclude(each, _scored(4), NOW_S) for each in both if isinstance(each, Candidate)]
    assert outcomes[0] is None
    assert outcomes[1] is not None
    assert outcomes[1].reason is Refusal.REPEATED


def test_many_keys_that_send_the_same_material_share_one_senders_quota_and_the_author_keeps_his(tmp_path: Path) -> None:
    gate = border(tmp_path)
    cluster = [SigningKey(new_seed()) for _ in range(5)]
    # Once in some hundred copies, the hashes of this memory show too little for blame.
    for number in range(CAUGHT + 3):
        take(gate, saying(long_texts(number), draw=number), VICTIM)
        for place, key in enumerate(cluster):
            body = saying([f"{text} ok" for text in long_texts(number)], node=f"m{place}", draw=number)
            assert reason(show(gate, body, key, seq=100)) is Refusal.COPIED
    shares = {gate.senders.by_key(key.public_key, NOW_S).account for key in cluster}
    assert shares == {COPIERS}
    assert gate.senders.by_key(VICTIM.public_key, NOW_S).account == VICTIM.public_key
    assert gate.senders.by_key(cluster[0].public_key, NOW_S + CAUGHT_S + 1).account == cluster[0].public_key, "there is a way back"


def test_a_padded_copy_is_a_copy(tmp_path: Path) -> None:
    gate = border(tmp_path)
    take(gate, saying(long_texts(1, 2)), VICTIM)
    assert reason(show(gate, saying(long_texts(1, 2) + long_texts(2, 2), node="gamma"), COPIER, seq=9)) is Refusal.COPIED


def test_a_node_that_is_started_anew_and_draws_its_tasks_again_is_let_in_after_an_hour(tmp_path: Path) -> None:
    gate = border(tmp_path)
    for number in range(2):
        take(gate, saying(long_texts(number)), VICTIM)
    again = [saying(long_texts(9), created_at=NOW_S + wait_s) for wait_s in (0, REMEMBERED_S + 1)]
    assert reason(show(gate, again[0], VICTIM)) is Refusal.REPEATED
    assert reason(show(gate, again[1], VICTIM, now_s=NOW_S + REMEMBERED_S + 1)) is None


def test_memory_is_bounded_in_groups_and_bytes_and_what_is_repeated_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.verifier.copies.MAX_GROUPS", 50)
    memory = CopyMemory()
    repeated = memory.fingerprint_of(saying(SHORT))
    memory.remember(repeated, "UK", 0, 0.0)
    for draw in range(1, 300):
        memory.remember(memory.fingerprint_of(saying(SHORT, draw=draw)), "UK", 0, 0.0)
        found, _ = memory.look(repeated, "UK", 0, 0.0)
        assert found is not None
        assert len(memory) <= 50
    monkeypatch.setattr("services.verifier.copies.MAX_BYTES", 20_000)
    for draw in range(300, 400):
        memory.remember(memory.fingerprint_of(saying(SHORT * 16, draw=draw)), "UK", 0, 0.0)
    assert len(memory) <= 4
    assert MAX_GROUPS * 600 < MAX_BYTES


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_group_is_always_like_itself_and_normalising_twice_changes_nothing(texts: list[str], rng: random.Random) -> None:
    memory = CopyMemory(salt=b"test")
    body = saying(texts)
    memory.remember(memory.fingerprint_of(body), "UA", 1, 0.0)
    shuffled = memory.fingerprint_of(saying(rng.sample(texts, len(texts))))
    found, copiers = memory.look(shuffled, "UA", 2, 0.0)
    assert found is not None
    assert (found.kind, found.of, copiers) == ("repeated", "UA", [])
    found, copiers = memory.look(shuffled, "UB", 2, 0.0)
    if 2 * len({normalised([text])[0].tobytes() for text in texts}) > len(texts):
        assert found is not None
        assert (found.kind, found.of, copiers) == ("copied", "UA", [])
    for text in texts:
        plain = normalised([text])[0]
        assert list(normalised(["".join(map(chr, plain))])[0]) == list(plain)


SLOW = {
    "marks that NFKC sorts": "\u0344" * 8100 + "\u0f73" * 8100,
    "a sign that NFKC makes 18 of": "\ufdfa" * 16_384,
    "letters that grow when folded": "\u0390" * 16_384,
    "one shingle": "a" * 16_384,
    "two shingles": "ab" * 8192,
    "any": "".join(random.Random(1).choices(string.ascii_letters + " é", k=16_384)),
    "any sign": "".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9000), k=16_384))),
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_no_text_that_the_border_lets_through_holds_the_verifier_up(text: str) -> None:
    """Measured: 18 ms for 64 such answers; NFKC alone took two seconds for one of the first
    kind.
    """
    memory = CopyMemory()
    body = saying([f"{text[:-2]}{number:02}" for number in range(64)])
    started = time.process_time()
    memory.fingerprint_of(body)
    assert time.process_time() - started < 2.0


def dressed(body: str, number: int) -> str:
    return f"Let me work it out, step by step. The answer is <answer>{body}{number}</answer>, I am sure."


@pytest.mark.parametrize("dress", [lambda number: dressed("4", number), lambda number: f"<answer>{number}</answer>"])
def test_who_writes_likely_answers_to_a_nodes_task_first_does_not_keep_it_out(dress, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Neither a turn of phrase that all answers have nor short answers tell a copy: the node had
    them from its own policy.
    """
    gate = border(tmp_path, max_completions=16)
    rng = random.Random(7)
    for draw in range(20):
        own = [dress(rng.choice([1, 1, 2, 3, 5])) for _ in range(8)]
        likely = [dress(number) for number in (1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 5, 1, 2)]
        take(gate, saying(likely, node="gamma", draw=2 * draw, task=task(seed=1000 * draw)), COPIER)
        take(gate, saying(own, draw=2 * draw + 1, task=task(seed=1000 * draw)), VICTIM)
    assert gate.reputation.suspicion(VICTIM.public_key, NOW_S) == 0.0
    assert gate.senders.by_key(VICTIM.public_key, NOW_S).account == VICTIM.public_key


def test_other_answers_in_one_turn_of_phrase_are_no_copy(tmp_path: Path) -> None:
    gate = border(tmp_path, max_completions=16)
    take(gate, saying([dressed("1", number) for number in range(10, 18)], node="gamma"), COPIER)
    take(gate, saying([dressed("7", number) for number in range(30, 38)]), VICTIM)


def test_long_text_is_a_copy_under_another_reference_of_the_question_too(tmp_path: Path) -> None:
    gate = border(tmp_path)
    take(gate, saying(long_texts(1), task=task(seed=1)), VICTIM)
    for number, key in enumerate((COPIER, VICTIM)):
        body = saying([f"{text} ok" for text in long_texts(1)], node=("gamma", "beta")[number], draw=3, task=task(seed=90))
        refused = show(gate, body, key, seq=9)
        assert isinstance(refused, Refused)
        assert refused.blamed is None
    take(gate, saying(long_texts(2), node="gamma", draw=4, task=task(seed=90)), COPIER)


def _scored(count: int) -> JobResult:

    return JobResult([0.5] * count, None, None, "", 0, 0.1)


class Counted:
    """How often the border does what takes long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for owner, name in ((border_module.keys, "verify"), (CopyMemory, "fingerprint_of"), (CopyMemory, "look")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return plain(*arguments)

        return counted


@pytest.mark.parametrize("texts", [SHORT, long_texts(1)], ids=["nobody blamed", "blamed"])
def test_a_refused_copy_that_comes_again_costs_a_hash(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = border(tmp_path)
    take(gate, saying(texts), VICTIM)
    copy = saying(texts, node="gamma")
    refused = show(gate, copy, COPIER, seq=9)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.costly) == (Refusal.COPIED, True), "looked at once, which is not given back"
    counted = Counted(monkeypatch)
    for seq in range(10, 20):
        again = show(gate, copy, COPIER, seq=seq)
        assert isinstance(again, Refused)
        assert (again.reason, again.costly, again.blamed) == (Refusal.REPLAYED, False, None)
    assert not counted.calls


def test_a_group_that_somebody_stored_in_the_wrong_place_is_taken_in_from_the_right_one(tmp_path: Path) -> None:
    """Were it remembered as refused, anybody could keep anybody out."""
    gate = border(tmp_path)
    body = saying(long_texts(1))
    wrong = gate.examine(subjects.rollouts("gamma"), signed(body, VICTIM), NOW_S, 1)
    assert reason(wrong) is Refusal.AUTHOR
    assert isinstance(show(gate, body, VICTIM, seq=2), Candidate)


FILLER = random.Random(5)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 3.0])
def test_a_copy_with_something_else_said_around_it_is_a_copy(share: float, tmp_path: Path) -> None:
    """Resemblance falls with what is added; how much of the original is in there does not."""
    gate = border(tmp_path, max_chars=2000)
    original = [f"{prose(FILLER, 40)} <answer>{number}</answer>" for number in range(4)]
    take(gate, saying(original), VICTIM)
    added = round(40 * share)
    for dressing in (
        lambda text: text.replace(" <answer>", f" {prose(FILLER, added)} <answer>"),
        lambda text: f"{prose(FILLER, added)} {text}",
        lambda text: f"{text[:120]} {prose(FILLER, added)} {text[120:]}",
    ):
        copy = saying([dressing(text) for text in original], node="gamma")
        refused = show(gate, copy, COPIER, seq=9)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.COPIED
        assert refused.blamed == COPIER.public_key


@pytest.mark.parametrize("rewritten", [0, 1, 2])
def test_a_copy_of_most_answers_of_a_group_is_a_copy(rewritten: int, tmp_path: Path) -> None:
    gate = border(tmp_path, max_completions=16)
    original = long_texts(1, 8)
    take(gate, saying(original), VICTIM)
    texts = [*original[rewritten:], *long_texts(2, 8 - rewritten), *long_texts(3, rewritten)]
    assert reason(show(gate, saying(texts, node="gamma"), COPIER, seq=9)) is Refusal.COPIED


@pytest.mark.parametrize("most", [False, True], ids=["all", "more than half"])
def test_a_copy_that_says_several_of_anothers_answers_in_each_of_its_own_is_a_copy(most: bool, tmp_path: Path) -> None:
    """Text that most answers of a group have in common is no evidence of who wrote it, and no place
    to hide what another wrote.
    """
    gate = border(tmp_path, max_chars=9000, max_completions=16)
    original = [f"{prose(FILLER, 40)} <answer>{number}</answer>" for number in range(8)]
    take(gate, saying(original), VICTIM)
    together = [original[-number:] + original[:-number] for number in range(8)]
    copy = saying([" ".join(texts[:5] if most else texts) for texts in together], node="gamma")
    refused = show(gate, copy, COPIER, seq=9)
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.COPIED
    assert refused.blamed == COPIER.public_key


STEPS = (
    "take the larger number {0} and divide it by {1}, which leaves {2}",
    "{0} divided by {1} has the remainder {2}",
    "so {0} = {1} * {3} + {2}",
    "now look at {1} and {2}",
    "the remainder of {0} by {1} is {2}",
    "we know that {0} minus {3} times {1} is {2}",
)


def reasoning(rng: random.Random, question: int) -> str:
    """Steps to the greatest common divisor, in the words of a policy that has a few for each."""
    numbers = random.Random(question)
    a, b = numbers.randint(100, 999), numbers.randint(10, 99)
    steps = []
    while b:
        steps.append(rng.choice(STEPS).format(a, b, a % b, a // b))
        a, b = b, a % b
    return f"{'. '.join(steps)}. <answer>{a}</answer>"


@pytest.mark.parametrize(
    ("questions", "references", "most"), [(range(1600, 1800), 2, 3), (range(100, 300), 1, 6)], ids=["other reference", "same task"]
)
def test_independent_nodes_that_reason_in_the_same_words_are_not_blamed_and_hardly_ever_refused(
    questions: range, references: int, most: int, tmp_path: Path
) -> None:
    """Eight answers of each of two nodes to the same question, of 200 questions. In each case a few
    pairs coincide far enough for a refusal, so that a blame would be seen. The questions of one
    task have none that coincides by `TELLING` characters: measured on 3,000 questions, 2 in a
    thousand do, and would be blamed there; honest nodes hardly ever meet in one task.
    """
    gate, refused = border(tmp_path, max_completions=16, max_chars=1000), 0
    gate.copies = CopyMemory(salt=b"test")
    for number in questions:
        for draw, (key, node) in enumerate(((VICTIM, "beta"), (COPIER, "gamma"))):
            rng = random.Random(1000 * number + draw)
            asked = text_task(task(seed=2 * number + draw % references).ref, f"gcd {number}?", "4")
            body = saying([reasoning(rng, number) for _ in range(8)], node=node, draw=2 * number + draw, task=asked)
            shown = show(gate, body, key, seq=2 * number + draw + 1)
            if isinstance(shown, Refused):
                assert (shown.reason, shown.blamed) == (Refusal.COPIED, None)
                refused += 1
            else:
                assert gate.conclude(shown, _scored(8), NOW_S) is None
    assert 2 <= refused <= most, "none at all would prove nothing about blame"
    for key in (VICTIM, COPIER):
        assert gate.reputation.suspicion(key.public_key, NOW_S) == 0.0
        assert gate.senders.by_key(key.public_key, NOW_S).account == key.public_key


def test_what_a_comparison_costs_is_bounded_by_answers_and_remembered_groups(tmp_path: Path) -> None:
    """Sixteen groups of the task are remembered; the seventeenth has 64 answers of any length."""
    gate = border(tmp_path, max_completions=64, max_chars=1000)
    rng = random.Random(1)
    for number in range(16):
        take(gate, saying([prose(rng, 12) for _ in range(64)], node=f"n{number}"), SigningKey(new_seed()))
    for words in (1, 12, 150):
        made = gate.copies.fingerprint_of(saying([prose(rng, words) for _ in range(64)], node="gamma"))
        seconds = []
        for _ in range(5):
            began = time.process_time()
            gate.copies.look(made, COPIER.public_key, 99, NOW_S)
            seconds.append(time.process_time() - began)
        assert min(seconds) < 0.01, words


def accepted(body: RolloutGroup, key: str, seq: int, scored_at: float = NOW_S) -> ScoredGroup:
    """As another of the node's verifiers has stored it."""
    return ScoredGroup(
        group_id=content_id(encode(body)),
        origin="external" if key else "local",
        group=body,
        rewards=[0.5] * len(body.completions),
        scored_by="alpha",
        score_seconds=0.1,
        scored_at=scored_at,
        public_key=key,
        swarm_seq=seq,
        swarm_stored_at=float(seq),
    )


def test_what_another_verifier_of_the_node_accepted_is_known_here(tmp_path: Path) -> None:
    gate, body = border(tmp_path), saying(long_texts(1))
    gate.learn(accepted(body, VICTIM.public_key, 5), gate.copies.fingerprint_of(body), NOW_S)
    assert reason(show(gate, body, VICTIM, seq=5)) is Refusal.REPLAYED
    copied = show(gate, saying(long_texts(1), node="gamma"), COPIER, seq=9)
    assert isinstance(copied, Refused)
    assert (copied.reason, copied.blamed) == (Refusal.COPIED, None), "its time in the stream says that it was first"
    assert reason(show(gate, saying(long_texts(2), node="delta"), VICTIM, seq=10)) is Refusal.UNKNOWN_KEY
    own = saying(long_texts(3), node="alpha")
    gate.learn(accepted(own, "", 0), gate.copies.fingerprint_of(own), NOW_S)
    assert reason(show(gate, saying(long_texts(3), node="gamma"), COPIER, seq=11)) is Refusal.COPIED


@pytest.mark.parametrize(
    ("scored_s_ago", "known_s"), [(3000.0, REMEMBERED_S - 3000.0), (-5000.0, REMEMBERED_S)], ids=["past", "future"]
)
def test_what_a_restarted_verifier_learns_again_is_known_for_an_hour_from_when_it_was_scored(
    scored_s_ago: float, known_s: float, tmp_path: Path
) -> None:
    """And not for another hour after each start. A clock that was ahead does not make it longer."""
    gate, body = border(tmp_path), saying(long_texts(1))
    gate.learn(accepted(body, VICTIM.public_key, 5, NOW_S - scored_s_ago), gate.copies.fingerprint_of(body), NOW_S)
    for wait_s, other, own in ((known_s - 1, Refusal.COPIED, Refusal.REPEATED), (known_s + 1, None, None)):
        for key, node, expected in ((COPIER, "gamma", other), (VICTIM, "beta", own)):
            again = saying(long_texts(1), node=node, created_at=NOW_S + wait_s)
            assert reason(show(gate, again, key, seq=9, now_s=NOW_S + wait_s)) is expected


def test_a_copy_that_two_verifiers_took_at_the_same_moment_is_blamed_when_they_learn_of_each_other(tmp_path: Path) -> None:
    gate = border(tmp_path)
    copy, original = saying(long_texts(1), node="gamma"), saying(long_texts(1))
    first = gate.examination(subjects.rollouts("gamma"), signed(copy, COPIER), NOW_S, 12, 12.0)
    shown = driven(first)
    assert isinstance(shown, Candidate)
    assert gate.conclude(shown, _scored(4), NOW_S) is None
    gate.learn(accepted(original, VICTIM.public_key, 11), gate.copies.fingerprint_of(original), NOW_S)
    assert gate.reputation.suspicion(COPIER.public_key, NOW_S) > 0
    assert gate.reputation.suspicion(VICTIM.public_key, NOW_S) == 0.0


def driven(examination: Any) -> Candidate | Refused:
    result = None
    while True:
        try:
            result = examination.send(result)()
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
