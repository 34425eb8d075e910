"""Fixtures of trainer tests: a tiny model with its tokenizer, batches, and a node's plane."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from shared.config.model_section import ModelSection
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.model.reading import load_tokenizer
from shared.transport.base import Transport
from tests.integration.trainer_life import NODE, mixed_batch, tiny_policy
from tests.nats_server import own_plane

STREAM = node_batches_stream(NODE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSection(path=str(model)))


@pytest.fixture
def transport() -> Coroutine[None, None, Transport]:
    return own_plane()


def some_batches(tokenizer: PreTrainedTokenizerFast, count: int, first: int = 1) -> list[Batch]:
    return [mixed_batch(tokenizer, number) for number in range(first, first + count)]
