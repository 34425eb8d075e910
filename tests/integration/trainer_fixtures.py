"""What files of trainer tests share: a tiny model with its tokenizer, batches for it, and a node's
plane in memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from shared.config.sections import ModelSection
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.model.reading import load_tokenizer
from shared.transport.memory.server import MemoryServer
from shared.transport.memory.transport import MemoryTransport
from tests.integration.trainer_life import NODE, mixed_batch, tiny_policy

STREAM = node_batches_stream(NODE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelSection(path=str(model)))


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport(MemoryServer())


def some_batches(tokenizer: PreTrainedTokenizerFast, count: int, first: int = 1) -> list[Batch]:
    return [mixed_batch(tokenizer, number) for number in range(first, first + count)]
