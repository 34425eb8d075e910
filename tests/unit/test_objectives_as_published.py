"""A name alone gives what its source publishes: advantages, loss, means and clips, from rewards and
logprobs to the loss of a step. Each source's formula is written here again, in float64 and in
loops, under its published name; nothing is configured but `trainer.objective`.

The old policy of a formula is the one that sampled, so that nothing else corrects anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.gradient.forward import CompletionLogprobs
from services.trainer.gradient.rows import CompletionRows, TokenGroup
from services.trainer.gradient.update import UpdateConfig, scored_loss, step_normaliser, with_masks
from services.trainer.objectives.advantages import AdvantageConfig, batch_advantages
from services.trainer.objectives.config import departures
from services.trainer.objectives.m2po import m2_keep
from shared.config import NodeConfig, load_config
from shared.registry import OBJECTIVES
from tests.objectives import configured, with_options

MAX_NEW_TOKENS = 12
REWARDS = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0]]
"""Of three groups; the second's are all equal."""


@dataclass(frozen=True)
class Answer:
    """One answer: logprobs of its tokens under the policy, under the one that sampled, and the
    policy's where a formula holds it constant (sg).
    """

    new: np.ndarray
    old: np.ndarray
    constant: np.ndarray


Groups = list[list[Answer]]


def answers(groups: Groups) -> list[tuple[int, Answer]]:
    return [(number, answer) for number, group in enumerate(groups) for answer in group]


def deviation(rewards: list[float]) -> float:
    return float(np.std(rewards, ddof=1)) + 1e-4


def centred(rewards: list[float]) -> list[float]:
    return [reward - float(np.mean(rewards)) for reward in rewards]


def grpo_advantages(rewards: list[float]) -> list[float]:
    """2402.03300, section 4.1.2: (r - mean) / std."""
    return [each / deviation(rewards) if np.ptp(rewards) else 0.0 for each in centred(rewards)]


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def grpo(groups: Groups) -> float:
    """2402.03300, eq. 3, without its divergence: mean over questions of the mean over outputs of
    the mean over tokens. Symmetric clip; 0.2 is PPO's.
    """
    gains, count = 0.0, sum(map(len, groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        for answer, advantage in zip(group, grpo_advantages(rewards), strict=True):
            ratios = np.exp(answer.new - answer.old)
            gains += sum(surrogate(r, advantage, 0.2, 0.2) for r in ratios) / len(ratios) / count
    return -gains


def dr_grpo(groups: Groups) -> float:
    """2503.20783, section 3.2 and Listing 1: no division by the deviation, a constant length."""
    gains, count = 0.0, sum(map(len, groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        for answer, advantage in zip(group, centred(rewards), strict=True):
            gains += sum(surrogate(r, advantage, 0.2, 0.2) for r in np.exp(answer.new - answer.old)) / (count * MAX_NEW_TOKENS)
    return -gains


def dapo(groups: Groups) -> float:
    """2503.14476, eq. 8: over all tokens of the groups whose rewards differ; 0.2 and 0.28."""
    chosen = [(group, rewards) for group, rewards in zip(groups, REWARDS, strict=True) if np.ptp(rewards)]
    tokens = sum(len(answer.new) for group, _ in chosen for answer in group)
    gains = 0.0
    for group, rewards in chosen:
        for answer, advantage in zip(group, grpo_advantages(rewards), strict=True):
            gains += sum(surrogate(r, advantage, 0.2, 0.28) for r in np.exp(answer.new - answer.old)) / tokens
    return -gains


def gspo(groups: Groups) -> float:
    """2507.18071, eqs. 5 to 7; bounds of section 5.1."""
    gains, count = 0.0, sum(map(len, groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        for answer, advantage in zip(group, grpo_advantages(rewards), strict=True):
            gains += surrogate(math.exp(float(np.mean(answer.new - answer.old))), advantage, 3e-4, 4e-4) / count
    return -gains


def cispo(groups: Groups) -> float:
    """2506.13585, eqs. 4 and 5, with DAPO's dynamic sampling; no lower bound, and ScaleRL's upper
    one.
    """
    chosen = [(group, rewards) for group, rewards in zip(groups, REWARDS, strict=True) if np.ptp(rewards)]
    tokens = sum(len(answer.new) for group, _ in chosen for answer in group)
    gains = 0.0
    for group, rewards in chosen:
        for answer, advantage in zip(group, grpo_advantages(rewards), strict=True):
            weights = np.minimum(np.exp(answer.constant - answer.old), 5.0)
            gains += float(np.sum(weights * advantage * answer.new)) / tokens
    return -gains


def reinforce(groups: Groups) -> float:
    """Williams 1992, section 4: (r - b) times the sum of eligibilities, a mean over episodes."""
    return -sum(
        advantage * float(np.sum(answer.new)) / sum(map(len, groups))
        for group, rewards in zip(groups, REWARDS, strict=True)
        for answer, advantage in zip(group, centred(rewards), strict=True)
    )


def rloo(groups: Groups) -> float:
    """2402.14740, section 3.2: the baseline is the mean of the others' rewards; the action is the
    whole answer.
    """
    gains = 0.0
    for group, rewards in zip(groups, REWARDS, strict=True):
        for number, answer in enumerate(group):
            others = [reward for place, reward in enumerate(rewards) if place != number]
            gains += (rewards[number] - float(np.mean(others))) * float(np.sum(answer.new)) / sum(map(len, groups))
    return -gains


def paper_mask(log_ratios: list[float], advantages: list[float], threshold: float) -> list[bool]:
    """2510.01161, Algorithm 1: of the tokens with A > 0 and r > 1, or A < 0 and r < 1, the one with
    the largest second moment is masked until the mean over the rest is at most the threshold.
    """
    keep = [True] * len(log_ratios)
    left = [i for i, (lr, a) in enumerate(zip(log_ratios, advantages, strict=True)) if (a > 0 and lr > 0) or (a < 0 and lr < 0)]
    while left and sum(log_ratios[i] ** 2 for i in left) / len(left) > threshold:
        worst = max(left, key=lambda i: log_ratios[i] ** 2)
        keep[worst] = False
        left.remove(worst)
    return keep


def m2po(groups: Groups) -> float:
    """2510.01161, section 5.2: M r A over all tokens, masked ones included; threshold 0.04."""
    advantages = [each for rewards in REWARDS for each in grpo_advantages(rewards)]
    flat = [(lr, a) for (_, answer), a in zip(answers(groups), advantages, strict=True) for lr in answer.constant - answer.old]
    keep = iter(paper_mask([float(lr) for lr, _ in flat], [a for _, a in flat], 0.04))
    gains = 0.0
    for (_, answer), advantage in zip(answers(groups), advantages, strict=True):
        for new, old in zip(answer.new, answer.old, strict=True):
            gains += next(keep) * math.exp(new - old) * advantage / len(flat)
    return -gains


def gepo(groups: Groups) -> float:
    """2508.17850, section 3, and its authors' `learner_script_checkpoint.py` with `--scale_rewards
    False` and one epsilon of 0.2.
    """
    gains, count = 0.0, sum(map(len, groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        q = np.array([math.exp(float(np.mean(answer.old))) for answer in group])
        expected = float(np.sum(q / q.sum() * q))
        for answer, advantage in zip(group, centred(rewards), strict=True):
            gains += surrogate(math.exp(float(np.mean(answer.new))) / expected, advantage, 0.2, 0.2) / count
    return -gains


def vespo(groups: Groups) -> float:
    """2602.10693 and its authors' `core_algos.py`: e^l w^k e^(-l w) A lp over all tokens."""
    gains, tokens = 0.0, sum(len(answer.new) for _, answer in answers(groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        for answer, advantage in zip(group, grpo_advantages(rewards), strict=True):
            w = math.exp(float(np.sum(answer.constant - answer.old)))
            k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            gains += math.exp(rate) * w**k * math.exp(-rate * w) * advantage * float(np.sum(answer.new)) / tokens
    return -gains


def oapl(groups: Groups) -> float:
    """2602.19362: the mean of (0.001 log(p / b) - (r - V))^2 with V = ln mean exp(r), which is 0
    for equal rewards only where p = b. Deliberately without those groups' part
    (`Objective.differs`).
    """
    loss, count = 0.0, sum(map(len, groups))
    for group, rewards in zip(groups, REWARDS, strict=True):
        value = math.log(float(np.mean(np.exp(rewards))))
        for answer, reward in zip(group, rewards, strict=True):
            if np.ptp(rewards):
                loss += (1e-3 * float(np.sum(answer.new - answer.old)) - (reward - value)) ** 2 / count
    return loss


PUBLISHED: dict[str, Callable[[Groups], float]] = {
    each.__name__: each for each in (grpo, dr_grpo, dapo, gspo, cispo, reinforce, rloo, m2po, gepo, vespo, oapl)
}


def random_groups(seed: int) -> Groups:
    rng = np.random.default_rng(seed)

    def answer() -> Answer:
        old = -rng.exponential(1.0, int(rng.integers(1, MAX_NEW_TOKENS)))
        new = old + rng.normal(0.0, 0.3, len(old))
        return Answer(new, old, new)

    return [[answer() for _ in rewards] for rewards in REWARDS]


def node(**trainer: Any) -> NodeConfig:
    return load_config(
        overrides={"tasks": [{"dataset": "chain_sum"}], "trainer": trainer, "generator": {"max_new_tokens": MAX_NEW_TOKENS}},
        environment={},
    )


def token_groups(groups: Groups, config: NodeConfig) -> list[TokenGroup]:
    return [
        TokenGroup(
            prompt_ids=[1],
            completions=[[2] * len(answer.old) for answer in group],
            behaviour_logprobs=[answer.old.tolist() for answer in group],
            advantages=advantages,
        )
        for group, advantages in zip(groups, batch_advantages(REWARDS, AdvantageConfig.of(config)), strict=True)
    ]


def taken(groups: list[TokenGroup], config: UpdateConfig) -> list[int]:
    return [number for number, group in enumerate(groups) if config.takes_part(group)]


def our_loss(
    groups: Groups, config: NodeConfig, *, reference: list[list[torch.Tensor]] | None = None
) -> tuple[float, dict[tuple[int, int], torch.Tensor]]:
    """The loss of a step over these groups, and its gradient for each answer's tokens, as the
    trainer computes both once a model has given the logprobs.
    """
    update = UpdateConfig.of(config)
    made = token_groups(groups, config)
    new = [[torch.tensor(answer.new) for answer in group] for group in groups]
    old = [[torch.tensor(answer.old) for answer in group] for group in groups]
    made = with_masks(made, update, new)
    places = [(number, place) for number in taken(made, update) for place in range(len(groups[number]))]
    longest = max(len(new[g][c]) for g, c in places)
    mask = torch.arange(longest) < torch.tensor([len(new[g][c]) for g, c in places]).unsqueeze(1)
    rows = CompletionRows(mask=mask, sequences=places)
    logprobs = rows.pad(new, torch.float64).requires_grad_()
    normaliser = step_normaliser(made, update, old)
    scored = CompletionLogprobs(logprobs, torch.zeros_like(logprobs))
    loss = scored_loss(made, rows, scored, update, normaliser, old, reference).loss
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), {place: logprobs.grad[row, mask[row]] for row, place in enumerate(places)}


def test_every_objective_has_a_formula_here() -> None:
    assert set(PUBLISHED) == set(OBJECTIVES.built_in)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_name_alone_gives_the_published_loss_and_gradient(name: str) -> None:
    published = PUBLISHED[name]
    for seed in range(3):
        groups = random_groups(seed)
        loss, gradient = our_loss(groups, node(objective=name, updates_per_batch=2))
        assert loss == pytest.approx(published(groups), rel=1e-9, abs=1e-12)
        for number, group in enumerate(groups):
            for place, answer in enumerate(group):
                found = gradient.get((number, place), torch.zeros(len(answer.new)))
                expected = [slope(published, groups, number, place, token) for token in range(len(answer.new))]
                assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7), (seed, number, place)


def slope(published: Callable[[Groups], float], groups: Groups, number: int, place: int, token: int) -> float:
    """Central difference of the formula with what it holds constant held constant."""

    def moved(step: float) -> float:
        answer = groups[number][place]
        new = answer.new.copy()
        new[token] += step
        group = [replace(answer, new=new) if other == place else each for other, each in enumerate(groups[number])]
        return published([group if other == number else each for other, each in enumerate(groups)])

    return (moved(1e-6) - moved(-1e-6)) / 2e-6


def better_author(mean: float, spread: float, positive: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    log_ratios = torch.randn(2000, dtype=torch.float64, generator=generator) * spread + mean
    signs = torch.where(torch.rand(2000, generator=generator) < positive, 1.0, -1.0).double()
    return log_ratios, signs


@pytest.mark.parametrize(("mean", "spread", "positive"), [(0.0, 0.1, 0.5), (-0.5, 1.0, 1.0), (-0.5, 1.0, 0.5)])
def test_m2po_masks_the_tokens_of_the_papers_algorithm_and_no_good_but_unlikely_one(
    mean: float, spread: float, positive: float
) -> None:
    log_ratios, advantages = better_author(mean, spread, positive)
    found = m2_keep(log_ratios, advantages, 0.04)
    assert found.tolist() == paper_mask(log_ratios.tolist(), advantages.tolist(), 0.04)
    assert found[(advantages > 0) & (log_ratios < 0)].all()
    if spread == 1.0:
        assert 0.15 < 1.0 - found.double().mean() < 0.45


def test_m2po_masks_over_every_token_of_an_update_again_and_nothing_without_advantage() -> None:
    keep = partial(m2_keep, threshold=0.04)
    far = torch.tensor([3.0, -3.0, 0.1, math.nan])
    assert keep(far, torch.tensor([1.0, 1.0, 1.0, 1.0])).tolist() == [False, True, True, False]
    assert keep(far, torch.tensor([-1.0, -1.0, -1.0, -1.0])).tolist() == [True, False, True, False]
    assert keep(far, torch.zeros(4)).tolist() == [True, True, True, False]
    assert keep(torch.tensor([3.0]), torch.ones(1)).tolist() == [False]
    assert keep(torch.tensor([]), torch.tensor([])).tolist() == []


def test_an_answer_without_a_known_author_is_masked_by_its_distance_to_the_batchs_policy() -> None:
    config = UpdateConfig(objective=configured("m2po"))
    group = TokenGroup(prompt_ids=[1], completions=[[2, 3], [4]], behaviour_logprobs=[[-3.0, -1.0], None], advantages=[1.0, -1.0])
    (masked,) = with_masks([group], config, [[torch.tensor([-1.0, -1.0]), torch.tensor([-2.0])]])
    assert masked.masked == [[1.0, 0.0], [0.0]]
    assert with_masks([group], UpdateConfig(), None) == [group]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_divergence_of_almost_nothing_changes_almost_nothing(name: str) -> None:
    groups = random_groups(4)
    reference = [[torch.tensor(answer.old) - 0.2 for answer in group] for group in groups]
    without, _ = our_loss(groups, node(objective=name, updates_per_batch=2))
    found, _ = our_loss(groups, node(objective=name, updates_per_batch=2, kl_coefficient=1e-9), reference=reference)
    assert found == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_divergence_is_a_mean_of_its_own_over_all_groups(name: str) -> None:
    groups = random_groups(5)
    reference = [[torch.tensor(answer.old) - 0.2 for answer in group] for group in groups]
    with_divergence, _ = our_loss(groups, node(objective=name, updates_per_batch=2, kl_coefficient=0.5), reference=reference)
    without, _ = our_loss(groups, node(objective=name, updates_per_batch=2))
    k3 = [np.exp(d) - d - 1 for _, answer in answers(groups) for d in [answer.old - 0.2 - answer.new]]
    mean = np.mean([np.mean(each) for each in k3]) if name == "grpo" else np.mean(np.concatenate(k3))
    assert with_divergence - without == pytest.approx(0.5 * mean)


def test_overridden_pieces_are_told_and_unset_ones_are_not() -> None:
    for name in PUBLISHED:
        config = node(objective=name, updates_per_batch=2)
        assert departures(config.trainer, UpdateConfig.of(config).objective.objective) == []

    def told(**trainer: Any) -> list[str]:
        config = node(**with_options(trainer))
        found = departures(config.trainer, UpdateConfig.of(config).objective.objective)
        return [match[1] for each in found if (match := re.match(r"trainer\.(?:objective_options\.)?(\w+) = ", each))]

    assert told(objective="dr_grpo", advantage_scale="group", aggregation="token_mean") == ["aggregation", "advantage_scale"]
    assert told(objective="grpo", count_uninformative=False) == ["count_uninformative"]
    assert told(objective="gspo", clip_low=0.2, clip_high=4e-4, updates_per_batch=2) == ["clip_low"]
    assert told(objective="gspo", clip_low=0.2) == []  # with one update nothing is clipped
    assert told(objective="gepo", clip_high=0.28) == ["clip_high"]  # whose ratio is not 1 at once
    assert told(objective="rloo", advantage_scale="none") == []  # has no effect


def test_the_table_of_the_docs_has_every_objectives_means_scale_and_clips() -> None:
    page = Path("docs/training.md").read_text(encoding="utf-8")
    for name in PUBLISHED:
        objective = OBJECTIVES.load(name)
        row = re.search(rf"^\| `{name}` \|.*$", page, flags=re.MULTILINE)
        assert row is not None, name
        cells = [cell.strip() for cell in row[0].strip("|").split("|")]
        assert f"`{objective.aggregation}`" in cells[4], name
        assert ("counted" in cells[4]) == objective.counts_uninformative, name
        if objective.divides_by_deviation:
            assert ("/ std" in cells[3]) == (objective.scale == "group"), name
        low, high = objective.clip
        assert cells[5] == (f"{low:g}, {high:g}" if objective.clips else cells[5]), name
        assert (cells[5] == "none") == (not objective.clips and name != "cispo"), name
