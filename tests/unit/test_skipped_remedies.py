"""What the trainer's log says about groups that a step leaves out."""

from __future__ import annotations

import re

from services.trainer.figures import _SKIPPED
from services.trainer.selection.remedies import REMEDIES, remedies
from shared.config import NodeConfig


def test_every_reason_has_a_remedy_and_the_log_names_those_of_the_step_alone() -> None:
    assert set(REMEDIES) == set(_SKIPPED)
    assert list(remedies({"absurd": 1, "of a later version": 2})) == ["absurd"]


def test_remedies_name_settings_that_there_are() -> None:
    config = NodeConfig(tasks=[{"dataset": "gcd"}])
    for section, key in re.findall(r"\b(model|generator|trainer)\.([a-z_]+)", " ".join(REMEDIES.values())):
        assert hasattr(getattr(config, section), key), f"{section}.{key}"
