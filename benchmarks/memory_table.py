"""Computes and writes the table of memory by model size in `docs/models.md`: `python -m
benchmarks.memory_table`.

Shapes: the `config.json` of HuggingFaceTB/SmolLM2-135M-Instruct and
Qwen/Qwen2.5-{0.5B,1.5B,7B}-Instruct on the Hugging Face hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config

from benchmarks.workload import SMOLLM2_135M
from services.trainer.memory_need import MemoryNeed
from swarm_cli.model.memory import ModelMemory, TrainingMethod, model_memory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- memory: written by `python -m benchmarks.memory_table` -->", "<!-- memory: end -->"
TOKENS, WIDTH, RANK, GPUS = 16_384, 1024, 16, 4

_COLUMNS = (
    "model",
    "parameters",
    "all weights",
    "the same, recomputing",
    f"LoRA of rank {RANK}",
    "the same, recomputing",
    f"all weights, each of {GPUS} GPUs, recomputing",
    "to generate",
)


def shapes() -> dict[str, Any]:
    """The parts of the models' configurations that affect memory."""
    return {
        "SmolLM2-135M": LlamaConfig(**SMOLLM2_135M),
        "Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2, tied=True),
        "Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2, tied=True),
        "Qwen2.5-7B": _qwen(3584, 18_944, 28, 28, 4, tied=False),
    }


def _qwen(width: int, inner: int, layers: int, heads: int, key_heads: int, *, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936 if tied else 152_064,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=tied,
    )


def table_row(name: str, config: Any) -> str:
    """One line of the table."""
    found: ModelMemory = model_memory(config, torch.bfloat16, rank=RANK, tokens=TOKENS, width=WIDTH, gpus=GPUS)
    whole, adapters, split = found.methods
    cells = [name, f"{found.size.parameters / 1e6:,.0f} M", *_both(whole), *_both(adapters), _gb(split.recomputing)]
    return f"| {' | '.join([*cells, f'{found.generating / 1e9:.1f} GB'])} |"


def table() -> str:
    """The whole table in Markdown."""
    head = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"
    return "\n".join([head, *(table_row(name, config) for name, config in shapes().items())])


def write_table() -> None:
    """Replace the table between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


def _both(way: TrainingMethod) -> tuple[str, str]:
    return _gb(way.plain), _gb(way.recomputing)


def _gb(need: MemoryNeed | None) -> str:
    return "–" if need is None else f"{need.total / 1e9:.1f} GB"


if __name__ == "__main__":
    write_table()
