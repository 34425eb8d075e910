"""The memory of a training step, counted by torch, stays near what no trainer can do without
(`make bench` has real shapes).

The gradient of tied embeddings is held twice for a moment, by torch's own accumulation: a model
that is little else, with small micro-batches, comes to 1.4.
"""

from __future__ import annotations

import pytest

from benchmarks.memory import BAR, StepShape, measure_step, measure_width

_BODY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "shape",
    [
        StepShape({**_BODY, "vocab_size": 49_152}, prompt=32, answers=16, answer=96, budget=2048),
        pytest.param(
            StepShape({**_BODY, "vocab_size": 151_936}, prompt=64, answers=16, answer=192, budget=4096), marks=pytest.mark.long
        ),
        pytest.param(
            StepShape({**_BODY, "vocab_size": 49_152}, prompt=512, answers=8, answer=16, budget=1024), marks=pytest.mark.long
        ),
    ],
    ids=["many answers", "large vocabulary", "long prompt"],
)
def test_a_step_holds_little_more_than_it_must(shape: StepShape) -> None:
    result = measure_step("short", shape)
    assert 0.3 < result.ratio <= BAR, f"{result.product:.2f} GB of {result.plain:.2f} GB"


def test_what_a_long_answer_takes_grows_with_its_tokens_alone() -> None:
    result = measure_width("short", 1024, 8192)
    assert 0.7 < result.ratios[0] <= BAR, f"{result.product:.1f} kB a token, {result.plain:.1f} of short answers"
