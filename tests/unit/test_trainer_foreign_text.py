"""Foreign text of which nobody knows how likely its author found it: what the old policy is, what
clips, what weighs less.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.trainer.learner import Learner
from shared.contracts.messages import Batch
from tests.integration.trainer_life import batch_of, node_config, scored_group, tiny_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


def learner(model: Path, **trainer: Any) -> Learner:
    return Learner(node_config(model, model.parent, trainer=trainer))


def foreign_text(of: Learner) -> Batch:
    rng = random.Random(4)
    return batch_of(1, [scored_group(of.tokenizer, rng, origin="external", same_tokenizer=False) for _ in range(3)])


def test_by_default_it_is_trained_on_as_if_this_nodes_policy_had_written_it(model: Path) -> None:
    record = learner(model, learning_rate=1e-3).step(foreign_text(learner(model)))
    assert (record.groups_external, record.behaviour_share, record.reencoded_share) == (3, 0.0, 1.0)
    assert (record.importance_ratio, record.importance_weight, record.kl_behaviour) == (1.0, 1.0, 0.0)


def test_with_several_updates_the_own_logprobs_at_intake_are_the_old_policy_and_clipping_acts(model: Path) -> None:
    record = learner(model, learning_rate=0.02, updates_per_batch=4).step(foreign_text(learner(model)))
    assert record.updates == 4 and record.importance_ratio_max > 1.28 and record.clip_fraction > 0.0


def test_half_the_external_weight_gives_half_the_gradient(model: Path) -> None:
    whole = learner(model, learning_rate=1e-3).step(foreign_text(learner(model)))
    half = learner(model, learning_rate=1e-3, external_weight=0.5).step(foreign_text(learner(model)))
    assert half.grad_norm == pytest.approx(0.5 * whole.grad_norm, rel=1e-4)
