"""What the trainer's log says about groups that a step leaves out."""

from __future__ import annotations

import re

from services.trainer.figures import _SKIPPED
from services.trainer.selection.left_out import REMEDIES, remedies
from shared.config import NodeConfig
from swarm_cli.rollouts.records import _FATES


def test_every_reason_has_a_remedy_and_the_log_names_those_of_the_step_alone() -> None:
    assert set(REMEDIES) == set(_SKIPPED)
    assert list(remedies({"absurd": 1, "of a later version": 2})) == ["absurd"]


def test_remedies_name_settings_that_there_are() -> None:
    config = NodeConfig(tasks=[{"dataset": "gcd"}])
    for section, key in re.findall(r"\b(model|generator|trainer)\.([a-z_]+)", " ".join(REMEDIES.values())):
        assert hasattr(getattr(config, section), key), f"{section}.{key}"


def test_a_remedy_that_says_nothing_names_no_setting_to_raise() -> None:
    assert not [each for each in REMEDIES.values() if each.startswith("nothing") and re.search(r"\b(raise|lower|use)\b", each)]


def test_the_fate_of_a_group_that_was_left_out_is_told_in_words() -> None:
    assert set(_SKIPPED) <= set(_FATES)
