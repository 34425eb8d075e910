"""Checks from the headers of a folder's safetensors files that its weights are complete. No weight
is read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from shared.model.import_refused import ImportRefused

INDEX = "model.safetensors.index.json"


def check_weights_whole(folder: Path) -> None:
    """Refuse a folder without weights, with a part missing, or with a truncated file. Files in
    torch's format are not inspected.

    Raises:
        ImportRefused: naming the file.
    """
    parts = sorted(folder.glob("*.safetensors"))
    if not parts and not list(folder.glob("*.bin")):
        raise ImportRefused(f"{folder} holds no weights (*.safetensors or *.bin): copy the whole folder")
    index = folder / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise ImportRefused(f"{index} cannot be read: copy the folder again") from None
        if missing := sorted(named - {part.name for part in parts}):
            raise ImportRefused(f"{folder} lacks {missing[0][:100]} ({len(missing)} of {len(named)} parts): copy the whole folder")
    for part in parts:
        _check_whole(part)


def _check_whole(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ImportRefused(f"{file} is not a safetensors file, or its header is truncated: copy it again")
        try:
            header = json.loads(opened.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ImportRefused(f"{file} has a header that cannot be read: copy it again") from None
    if 8 + length + end > size:
        raise ImportRefused(f"{file} is truncated: its header announces {8 + length + end} bytes and it has {size}: copy it again")
