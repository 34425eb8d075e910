"""Plans an import and checks it before any weights are read: headers, configuration, sizes, free
memory and disk space.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from shared.hub_models import hub_arguments
from shared.model.configuration import check_not_quantised, read_configuration
from shared.model.gguf_header import GgufHeader, read_gguf_header
from shared.model.gguf_readable import check_readable
from shared.model.import_source import ImportSource
from shared.model.loading import DTYPES
from shared.model.model_size import ModelSize, available_memory_bytes, model_size
from shared.model.quiet_reading import ModelLoadError, reading
from shared.model.weight_files import tensors_of, weight_files

# Measured peak for 134 million parameters: 9.2, without the process itself. It is the model in
# float32 and the pages of its file and of a published policy's.
_BYTES_PER_PARAMETER = 9.5
_BESIDE_WEIGHTS_BYTES = 200e6
_BESIDE_WEIGHTS_ON_DISK_BYTES = 32e6
_STORED = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Plan of what is read and written. size: the model's. dtype: that of the written weights, a
    name in `DTYPES`.
    """

    source: ImportSource
    config: Any
    size: ModelSize
    dtype: str
    header: GgufHeader | None = None

    @property
    def folder_bytes(self) -> int:
        """Approximate size of the folder."""
        return int(self.size.parameters * DTYPES[self.dtype].itemsize + _BESIDE_WEIGHTS_ON_DISK_BYTES)

    @property
    def disk_bytes(self) -> int:
        """The same with a policy in bfloat16, which is published for the test."""
        return self.folder_bytes + 2 * self.size.parameters

    @property
    def memory_bytes(self) -> int:
        """Approximate memory for reading and trying the model, in addition to this
        process's own.
        """
        return int(self.size.parameters * _BYTES_PER_PARAMETER + _BESIDE_WEIGHTS_BYTES)


def plan_import(source: ImportSource, dtype: str | None = None) -> ImportPlan:
    """Plan an import from headers and configuration.

    Args:
        source: where the model is.
        dtype: dtype of the weights in the new folder; None: the source's, or bfloat16 if it is
            quantised.

    Raises:
        ModelLoadError: the source cannot be read, is incomplete, or is not a causal language model.
    """
    header, files = None, []
    with reading(source.origin, "configuration"):
        if source.kind == "gguf":
            header = read_gguf_header(source.path)
            check_readable(header)
            config = AutoConfig.from_pretrained(
                source.path.parent, gguf_file=source.path.name, **hub_arguments(str(source.path.parent), "")
            )
        else:
            config = read_configuration(source.path)
            check_not_quantised(config, source.origin)
            files = weight_files(source.path)
        size = model_size(config)
    if header is not None:
        _check_tensors_used(header, size)
    return ImportPlan(source, config, size, dtype or (header.plain_dtype or "bfloat16" if header else _own_dtype(files)), header)


def check_room(plan: ImportPlan, out: Path, *, memory_bytes: int | None = None) -> None:
    """Refuse a model that does not fit in memory or on disk. `memory_bytes`: the free memory, to be
    used instead of the machine's.

    Raises:
        ModelLoadError: naming the size that would fit.
    """
    free = available_memory_bytes() if memory_bytes is None else memory_bytes
    if free is not None and plan.memory_bytes > free:
        fits = max(0.0, (free - _BESIDE_WEIGHTS_BYTES) / _BYTES_PER_PARAMETER)
        raise ModelLoadError(
            f"{plan.source.origin} has {_count(plan.size.parameters)} parameters: importing it takes about "
            f"{_gigabytes(plan.memory_bytes)} of memory, and {_gigabytes(free)} are free: a model of up to {_count(int(fits))} "
            "parameters fits here, or import it on a larger machine and copy the folder"
        )
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if plan.disk_bytes > (left := shutil.disk_usage(parent).free):
        raise ModelLoadError(
            f"{plan.source.origin} becomes a folder of about {_gigabytes(plan.folder_bytes)}, and importing it takes "
            f"{_gigabytes(plan.disk_bytes)} for a while; the disk of {parent} has {_gigabytes(left)} left: make room there or "
            "choose another folder"
        )


def _check_tensors_used(header: GgufHeader, size: ModelSize) -> None:
    # transformers ignores tensors that it has no name for. The head of a tied model may be stored
    # twice.
    doubled = sum(tensor.elements for tensor in header.tensors if tensor.name == "output.weight")
    if header.parameters in (size.parameters, size.parameters + doubled):
        return
    extra = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]
    about = f", among them {extra[0]}" if extra else ""
    raise ModelLoadError(
        f"{header.path} holds {header.parameters} numbers{about}, and the {size.architecture} model that transformers makes of it "
        f"has {size.parameters}: it would be another model; give the model's Hugging Face folder instead"
    )


def _own_dtype(files: Sequence[Path]) -> str:
    """Return the dtype of most stored weights, whatever config.json states."""
    stored: Counter[str] = Counter()
    for file in files:
        for entry in tensors_of(file).values() if file.suffix == ".safetensors" else ():
            begin, end = entry["place"]
            stored[entry["dtype"]] += end - begin
    return _STORED.get(stored.most_common(1)[0][0] if stored else "", "float32")


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"
