"""Every architecture is computed right or refused, and `docs/models.md` says which.

Right is: the logprobs that the engine gives for its own samples, and the trainer's gradients, are
those of one plain forward pass for each sequence, by the same weights under the plainest attention,
to 1e-5.
"""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.architectures.table import committed_rows, table_row
from tests.architectures.tiny import ARCHITECTURES

ALWAYS = (
    "bert-generation",  # positions that count
    "big_bird",
    "bloom",  # alibi
    "gemma2",  # a window in every other layer, a soft cap on attention
    "gpt_neo",  # a window under another name, its own attention
    "gpt_oss",  # sinks and experts
    "gptj",
    "llama4_text",  # chunked attention
    "mamba",  # no attention at all
    "mpt",
    "opt",  # functional dropout
    "phimoe",
    "qwen3_next",  # linear attention
    "recurrent_gemma",
    "roberta",  # positions counted by what is padding
)
"""One of each family; the others are slow only because they are many."""


@pytest.fixture(autouse=True)
def _quiet_and_single() -> None:
    transformers_logging.set_verbosity_error()
    # Matrices this small gain nothing from a second thread, and lose seconds to it when the machine
    # is busy.
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_family_is_computed_right_or_refused_as_the_table_says(kind: str) -> None:
    assert table_row(kind) == committed_rows()[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(ARCHITECTURES) - set(ALWAYS)))
def test_an_architecture_is_computed_right_or_refused_as_the_table_says(kind: str) -> None:
    assert table_row(kind) == committed_rows()[kind]


def test_the_table_has_every_architecture_that_transformers_builds() -> None:
    assert list(committed_rows()) == list(ARCHITECTURES)
