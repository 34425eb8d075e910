"""In bfloat16 a model gets no faster way than in float32: what is wrong is not hidden by the noise
of half precision.

The way of float32 is the table's, which `test_architectures` finds out again.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.generator.engines.batching import WAYS, UnsafeModel, choose_batching
from services.trainer.gradient.forward import plain_rows_reason, set_training_modes, silence
from services.trainer.policy_model import UntrainableModel, check_trainable
from tests.architectures.checks import CONTEXT, PAD
from tests.architectures.table import committed_outcomes
from tests.architectures.tiny import tiny_model

ORDINARY = ("gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""What most people train: bfloat16 must cost them nothing."""
ALWAYS = (
    *ORDINARY,
    "bamba",  # a chunked scan
    "bigbird_pegasus",
    "blenderbot-small",  # learnt positions
    "camembert",  # positions counted by what is padding
    "cpmant",  # not causal, by little
    "jamba",
    "plbart",
    "roformer",
    "xlm",  # not causal
    "xlm-roberta",
)
ENGINE_WAYS = [*(way.name for way in WAYS), "refused"]
TRAINER_WAYS = ["packed rows", "plain rows", "refused"]
TRIED = sorted(kind for kind, row in committed_outcomes().items() if "not tried" not in row)


@pytest.fixture(autouse=True)
def _quiet_and_single() -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)


def in_bfloat16(kind: str) -> PreTrainedModel:
    model = tiny_model(kind).bfloat16()
    model.config.dtype = torch.bfloat16
    return model


def ways(kind: str) -> tuple[str, str]:
    """Return what engine and trainer do with `kind` in bfloat16, in the words of the table."""
    model = in_bfloat16(kind)
    before = {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict().items()}
    try:
        engine = choose_batching(model, context_length=CONTEXT, pad_token_id=PAD).name
    except UnsafeModel:
        engine = "refused"
    silence(model)
    set_training_modes(model)
    try:
        check_trainable(model)
        trainer = "plain rows" if plain_rows_reason(model) else "packed rows"
    except UntrainableModel:
        trainer = "refused"
    assert {name: (value.dtype, value.data_ptr()) for name, value in model.state_dict().items()} == before
    return engine, trainer


def check(kind: str, *, same: bool) -> None:
    engine, trainer = ways(kind)
    table_engine, table_trainer = (cell.strip() for cell in committed_outcomes()[kind].split("|")[1:3])
    if same:
        assert (engine, trainer) == (table_engine, table_trainer)
    assert ENGINE_WAYS.index(engine) >= ENGINE_WAYS.index(table_engine), f"{kind}: {engine} in bfloat16, {table_engine} in float32"
    assert TRAINER_WAYS.index(trainer) >= TRAINER_WAYS.index(table_trainer), f"{kind}: {trainer}, in float32 {table_trainer}"


@pytest.mark.parametrize("kind", ALWAYS)
def test_bfloat16_takes_no_faster_way_than_float32(kind: str) -> None:
    check(kind, same=kind in ORDINARY)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(set(TRIED) - set(ALWAYS)))
def test_bfloat16_takes_no_faster_way_than_float32_for_any_architecture(kind: str) -> None:
    check(kind, same=False)
