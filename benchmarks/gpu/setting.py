"""What the parts of the check share: its size, findings, the page made of them, and models with the
shapes of real ones.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import SMOLLM2_135M, node_config, random_llama
from shared.config import NodeConfig

TITLE = "What was checked on a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device and the size of the check. model: a folder; empty for a random model with the
    shapes of SmolLM2-135M. short: takes seconds instead of minutes, with a tiny model.
    """

    device: str
    folder: Path
    model: str = ""
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the page. held: whether the bar was met; None for a figure without a bar."""

    part: str
    measured: str
    found: str
    bar: str = ""
    held: bool | None = None

    def to_builtins(self) -> dict[str, Any]:
        """The finding in plain types, to be passed from a part's process to the page."""
        return asdict(self)


def page(
    findings: Sequence[Finding], failures: Mapping[str, str], facts: Mapping[str, str], *, date: str, command: str, seconds: float
) -> str:
    """The text of `var/gpu-check.md`."""
    judged = [finding for finding in findings if finding.held is not None]
    kept = sum(1 for finding in judged if finding.held)
    lines = [
        f"# {TITLE}",
        "",
        f"Written by `{command}` on {date} in {seconds:.0f} s. {kept} of {len(judged)} bars kept"
        + (f", {len(failures)} parts not run to their end." if failures else "."),
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        "| part | measured | found | bar | |",
        "|---|---|---|---|---|",
    ]
    verdicts = {True: "kept", False: "**not kept**", None: ""}
    lines += [
        f"| {finding.part} | {finding.measured} | {finding.found} | {finding.bar} | {verdicts[finding.held]} |"
        for finding in findings
    ]
    lines += [f"| {part} | not run to its end | {cause} | | **failed** |" for part, cause in failures.items()]
    return "\n".join(lines) + "\n"


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": SMOLLM2_135M,
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
"""Shapes by name. 0.5B: Qwen2.5-0.5B's."""


def small_model(setting: Setting) -> tuple[str, Path]:
    """The name and folder of the model for most parts: the requested one, else a random one with
    SmolLM2's shapes.
    """
    if setting.model:
        given = Path(setting.model)
        folder = joined(given, setting.folder) if (given / SUMS).exists() else given
        return folder.name, folder
    return random_model(setting, "tiny" if setting.short else "SmolLM2-135M")


SUMS = "SHA256SUMS"


def joined(parts: Path, into: Path) -> Path:
    """Import a model's file from its parts, for machines that take files only up to a size; once.

    parts: a folder of `<file>.part-00`, `-01` and so on (`split -d -b 40M model.gguf
    model.gguf.part-`) and `SHA256SUMS`, one line of `sha256sum` about the whole file.

    Raises:
        ValueError: the parts do not make the file.
    """
    expected, name = (parts / SUMS).read_text().split()
    whole = into / Path(name).name
    out = whole.with_suffix("")
    if out.exists():
        return out
    with whole.open("wb") as file:
        for part in sorted(parts.glob(f"{whole.name}.part-*")):
            file.write(part.read_bytes())
    with whole.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"the parts in {parts} make {whole.stat().st_size} bytes with SHA-256 {found}, not {expected}")
    subprocess.run([sys.executable, "-m", "swarm_cli", "model", "import", str(whole), str(out)], check=True, timeout=120)
    return out


def random_model(setting: Setting, shape: str) -> tuple[str, Path]:
    """A Llama of this shape with random weights and a byte tokenizer."""
    folder = setting.folder / f"model-{shape}"
    if not (folder / "model" / "config.json").exists():
        # Far enough from uniform that the logprobs of sampled tokens are meaningful.
        random_llama(folder, SHAPES[shape], dtype="bfloat16", spread=0.04)
    return f"{shape} (random weights)", folder / "model"


def config_for(setting: Setting, folder: Path, *, device: str = "", dtype: str = "float32", **sections: Any) -> NodeConfig:
    """A node's configuration for this model, on the setting's device unless `device` is given."""
    sections["trainer"] = {"token_budget": 4096, "warmup_steps": 0, **sections.get("trainer", {})}
    sections["generator"] = {"max_new_tokens": 32, "engine": "transformers", **sections.get("generator", {})}
    model = {"path": str(folder), "device": device or setting.device, "dtype": dtype}
    return node_config(setting.folder, "nats://127.0.0.1:4222", model=model, **sections)
