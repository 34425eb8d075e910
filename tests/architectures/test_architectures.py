"""Every architecture is computed right or refused, and `docs/models.md` says which.

Right is: the logprobs that the engine gives for its own samples, and the trainer's gradients, are
those of one plain forward pass for each sequence, by the same weights under the plainest attention,
to 1e-5.
"""

from __future__ import annotations

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.architectures.table import committed_outcomes, outcome
from tests.architectures.tiny import ARCHITECTURES

ALWAYS = (
    "bart",  # learnt positions that an encoder and a decoder count
    "bert-generation",  # positions that count
    "bloom",  # alibi
    "cpmant",  # not causal, by little
    "deepseek_v4",  # compressed attention, each prompt by itself
    "doge",  # chooses its keys
    "gemma2",  # a window in every other layer, a soft cap on attention
    "gpt_neo",  # a window under another name, its own attention
    "gpt_oss",  # sinks and experts
    "llama",
    "llama4_text",  # chunked attention
    "mamba",  # no attention at all
    "minimax",  # linear attention, each prompt by itself
    "moshi",
    "openai-gpt",  # its own attention
    "opt",  # functional dropout
    "phimoe",
    "prophetnet",  # computes no rows of tokens
    "qwen3",
    "qwen3_next",  # linear attention
    "recurrent_gemma",
    "roformer",
    "roberta",  # positions counted by what is padding
    "whisper",
    "xlm",  # not causal
)
"""One of each family and of each answer of the table."""


@pytest.fixture(autouse=True)
def _quiet_and_single() -> None:
    transformers_logging.set_verbosity_error()
    # Matrices this small gain nothing from a second thread, and lose seconds to it when the machine
    # is busy.
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_family_is_computed_right_or_refused_as_the_table_says(kind: str) -> None:
    assert outcome(kind) == committed_outcomes()[kind]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(ARCHITECTURES) - set(ALWAYS)))
def test_an_architecture_is_computed_right_or_refused_as_the_table_says(kind: str) -> None:
    assert outcome(kind) == committed_outcomes()[kind]


def test_the_short_form_tries_every_answer_of_the_table() -> None:
    answers = {kind: cells for kind, cells in committed_outcomes().items() if "not tried" not in cells}
    assert {answers[kind] for kind in ALWAYS} == set(answers.values())


def test_the_table_has_every_architecture_that_transformers_builds() -> None:
    assert sorted(committed_outcomes()) == sorted(ARCHITECTURES)
