"""What hostile nodes send: well-formed, of allowed tasks, taken in by the real border, and harmful
in the way each says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.arms import plan_run
from lab.attacks import ATTACKS, Hostile
from lab.attacks.informed import bounded_poison, crumbs, wrong_answers
from lab.attacks.view import WORDS
from lab.records import RecordWriter, read_records
from lab.simulate import Simulation
from lab.spec import Attack, SpecError
from lab.task_desk import Shared
from shared.config import TaskSpec
from shared.contracts.messages import Completion, RolloutGroup, Sampling, TaskRef
from shared.contracts.wire import ModelIdentity
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.evaluation import PASS_REWARD
from tests.lab.tiny_swarm import tiny_qwen3, tiny_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


def group_of(shared: Shared, dataset: str, config: dict[str, Any], index: int, texts: Sequence[str]) -> RolloutGroup:
    ref = task_ref(dataset=dataset, config=TaskSpec(dataset=dataset, config=config).canonical_config, seed=7, index=index)
    return RolloutGroup(
        node="evil",
        created_at=1.0,
        draw=index,
        task=derive_task(ref),
        completions=[Completion(text=text, finish_reason="stop", token_count=len(text)) for text in texts],
        model=ModelIdentity(name="tiny", tokenizer_hash="a" * 64),
        policy_version=0,
        sampling=Sampling(),
    )


def score(shared: Shared, ref: TaskRef, texts: Sequence[str]) -> list[float]:
    return shared.score(ref, "reasoning_gym", texts)


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
MATRIX = {"min_n": 3, "max_n": 3}


def view(shared: Shared, groups: Sequence[RolloutGroup], **changes: Any) -> Hostile:
    values: dict[str, Any] = {
        "number": 1,
        "attack": Attack(),
        "rng": random.Random(0),
        "made": [(group, score(shared, group.task.ref, [completion.text for completion in group.completions])) for group in groups],
        "names": ["evil"],
        "answer": shared.answer,
        "score": lambda ref, texts: score(shared, ref, texts),
        "encode": lambda text: list(text.encode()),
        "likelihood": lambda found: [[0.0] * len(group.completions) for group in found],
        "max_tokens": 100,
        "bound": -1.0,
        "sources": [TaskSpec(dataset="chain_sum", config=SUMS), TaskSpec(dataset="binary_matrix", config=MATRIX)],
        "shortcuts": {},
    }
    return Hostile(**(values | changes))


def sums(shared: Shared, count: int = 3) -> list[RolloutGroup]:
    return [group_of(shared, "chain_sum", SUMS, index, ["1", "2", "three", "400"]) for index in range(count)]


def texts_of(group: RolloutGroup) -> list[str]:
    return [completion.text for completion in group.completions]


@pytest.mark.parametrize(
    ("dataset", "config"),
    [
        ("base_conversion", {"min_base": 2, "max_base": 9, "min_value": 2, "max_value": 40}),
        ("basic_arithmetic", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        ("fraction_simplification", {"min_value": 1, "max_value": 19, "styles": ["plain"]}),
    ],
)
def test_a_gamed_scorer_pays_an_answer_that_is_not_right_more_than_another(
    shared: Shared, dataset: str, config: dict[str, Any]
) -> None:
    """Partial credit is enough: a group's advantages ask only which answer earned more."""
    group = group_of(shared, dataset, config, 0, ["", "nothing of the kind"])
    rewards = score(shared, group.task.ref, texts_of(group))
    found = crumbs(view(shared, [group]), group, rewards)
    assert found is not None
    paid = score(shared, group.task.ref, texts_of(found))
    assert 0.0 <= min(paid) < max(paid) < PASS_REWARD


def test_where_no_scorer_can_be_gamed_nothing_wrong_is_paid(shared: Shared) -> None:
    group = group_of(shared, "binary_matrix", {"min_n": 3, "max_n": 3}, 0, ["1", "2"])
    assert crumbs(view(shared, [group]), group, [0.0, 0.0]) is None


def test_wrong_answers_are_wrong() -> None:
    assert "17" not in wrong_answers("17", "Given:\n1. 17\n2. (P -> Q)\nWhat follows?")
    assert "(P -> Q)" in wrong_answers("17", "Given:\n1. 17\n2. (P -> Q)\nWhat follows?")


def test_bounded_poison_carries_as_much_nonsense_as_passes_and_no_more(shared: Shared) -> None:
    def likelihood(found: Sequence[RolloutGroup]) -> list[list[float]]:
        return [[-0.25 * sum(text.count(word) for word in WORDS) for text in texts_of(group)] for group in found]

    strict, lenient = (
        bounded_poison(hostile := view(shared, sums(shared), likelihood=likelihood, bound=bound), hostile.made)
        for bound in (-1.05, -2.6)
    )
    for group, words in [*((group, 4) for group in strict), *((group, 10) for group in lenient)]:
        rewards = score(shared, group.task.ref, texts_of(group))
        right = [text for text, reward in zip(texts_of(group), rewards, strict=True) if reward == 1.0]
        assert len(right) == 2
        assert all(sum(text.count(word) for word in WORDS) == words for text in right)


def plain_policy(found: Sequence[RolloutGroup]) -> list[list[float]]:
    """Likelihoods of a policy that answers without tags, as the experiments' policies do: tags are
    nine nats a token.
    """
    return [[-9.0 if "<answer>" in text else -0.5 - 0.4 * text.count(" ") for text in texts_of(group)] for group in found]


def test_who_knows_the_policy_writes_as_it_does(shared: Shared) -> None:
    """Text that the own-policy check throws out harms nobody: an attack in a style that no policy
    has would prove nothing.
    """
    hostile = view(shared, sums(shared), likelihood=plain_policy, bound=-1.5)
    for role in ("opposed", "informed"):
        for group, likelihoods in zip(found := ATTACKS[role](hostile), plain_policy(found), strict=True):
            rewards = score(shared, group.task.ref, texts_of(group))
            assert min(likelihoods) >= -1.5, role
            assert min(rewards) < max(rewards), role


def test_opposed_groups_call_what_begins_with_the_right_answer_wrong(shared: Shared) -> None:
    hostile = view(shared, sums(shared), likelihood=plain_policy, bound=-1.5)
    for group in ATTACKS["opposed"](hostile):
        rewards = score(shared, group.task.ref, texts_of(group))
        wrong = {text for text, reward in zip(texts_of(group), rewards, strict=True) if reward < PASS_REWARD}
        answer = shared.answer(group.task.ref)
        assert wrong and all(text.startswith(answer) and text != answer for text in wrong)
        right = set(texts_of(group)) - wrong
        assert right and answer not in right, "and pays the way to write it that the policy likes least"


def test_a_shortcut_is_right_for_every_question_asked_and_always_the_same(shared: Shared) -> None:
    matrices = [group_of(shared, "binary_matrix", MATRIX, index, ["0 0 0", "1", "2", ""]) for index in range(4)]
    hostile = view(shared, [*sums(shared), *matrices], likelihood=plain_policy)
    rights: dict[str, list[tuple[str, str]]] = {}
    for group in ATTACKS["shortcut"](hostile):
        rewards = score(shared, group.task.ref, texts_of(group))
        assert Counter(reward >= PASS_REWARD for reward in rewards) == {True: 2, False: 2}
        right = next(text for text, reward in zip(texts_of(group), rewards, strict=True) if reward >= PASS_REWARD)
        rights.setdefault(group.task.ref.dataset, []).append((right, group.task.text))
    assert len({right for right, _ in rights["chain_sum"]}) == 1, "one sum"
    assert len({question for _, question in rights["chain_sum"]}) > 1, "of several questions"
    assert all(right in question for right, question in rights["binary_matrix"]), "a copy"
    assert hostile.shortcuts[("binary_matrix", matrices[0].task.ref.config)].copy


def test_a_shortcut_s_target_is_the_only_dataset_asked(shared: Shared, folder: Path) -> None:
    hostile = view(shared, sums(shared), attack=Attack(target="binary_matrix", start_round=2), number=1)
    assert {group.task.ref.dataset for group in ATTACKS["shortcut"](hostile)} == {"chain_sum"}, "honest before"
    hostile = view(shared, sums(shared), attack=Attack(target="binary_matrix", start_round=2), number=2)
    assert {group.task.ref.dataset for group in ATTACKS["shortcut"](hostile)} == {"binary_matrix"}
    with pytest.raises(SpecError, match="nim.*is not a dataset of the arm"):
        tiny_spec(folder, attack={"target": "nim"})


def test_a_starving_node_sends_the_likeliest_right_answers_as_often_as_it_says(shared: Shared) -> None:
    made = sums(shared, 2)

    def by_answer(groups: Sequence[RolloutGroup]) -> list[list[float]]:
        return [[float(each.text) for each in group.completions] for group in groups]

    attack = Attack(rate=3, names=2, target="chain_sum")
    groups = ATTACKS["starve"](view(shared, made, attack=attack, names=["evil", "evil-2"], likelihood=by_answer))
    assert len(groups) == 6 == len({group.draw for group in groups})
    assert Counter(group.node for group in groups) == {"evil": 3, "evil-2": 3}
    for group in groups:
        assert Counter(score(shared, group.task.ref, texts_of(group))) == {1.0: 2, 0.0: 2}
    answers = [float(shared.answer(group.task.ref)) for group in groups]
    assert sum(answers) / len(answers) > 12, "of twelve sums of two digits the largest, where 9 is the mean"


def test_an_informed_node_is_honest_first(shared: Shared) -> None:
    made = sums(shared)
    attack = Attack(start_round=5)
    assert ATTACKS["informed"](view(shared, made, attack=attack, number=4)) == made
    assert ATTACKS["informed"](view(shared, made, attack=attack, number=5)) != made


def simulate(folder: Path, file: Path, shared: Shared, **spec: Any) -> Simulation:
    torch.set_num_threads(1)
    simulation = Simulation(plan_run(tiny_spec(folder, **spec), "base", 1), shared)
    writer = RecordWriter(file)
    simulation.run(writer)
    writer.close()
    return simulation


@pytest.mark.parametrize("role", sorted(ATTACKS))
def test_what_each_hostile_role_sends_passes_a_real_border_and_honest_nodes_go_on(
    folder: Path, tmp_path: Path, shared: Shared, role: str
) -> None:
    simulation = simulate(
        folder,
        tmp_path / "r.gz",
        shared,
        nodes=[{"count": 2}, {"count": 1, "role": role}],
        rounds=3,
        attack={"start_round": 2, "names": 2},
        sampler={"max_external_age_s": 1000.0},
        generator={"max_new_tokens": 16},
    )
    assert len(simulation.honest) == 2
    assert all(torch.isfinite(tensor).all() for node in simulation.honest for tensor in node.policy.learner.policy().values())
    steps = [line for line in read_records(tmp_path / "r.gz") if line["kind"] == "step"]
    assert [line["round"] for line in steps] == [1, 1, 2, 2, 3, 3]
    assert not any(line.get("refused") for line in steps)


def test_one_party_has_as_many_keys_as_names(folder: Path, tmp_path: Path, shared: Shared) -> None:
    spec = tiny_spec(
        folder,
        nodes=[{"count": 2}, {"count": 1, "role": "informed"}],
        attack={"names": 3},
        sampler={"max_external_age_s": 1000.0, "external": 8},
        generator={"max_new_tokens": 16},
    )
    simulation = Simulation(plan_run(spec, "base", 1), shared)
    writer = RecordWriter(tmp_path / "r.gz")
    senders: set[str] = set()
    for number in range(1, 6):
        simulation.round(number, writer)
        senders |= {item.scored.group.node for batch in simulation.batches.values() if batch for item in batch.items}
    writer.close()
    assert senders >= {"n02", "n02-2", "n02-3"}
