"""Deltas of weight files: exact for any tensors, small where little changed, and damage is found
wherever it is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from shared.policy_store.chain import _BLOCK, Delta, DeltaError, _gaps, _positions, write_delta

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def saved(tensors: dict[str, Tensor], file: Path) -> Path:
    save_file(tensors, file)
    return file


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def delta_of(base: Path, target: Path) -> tuple[Delta, bytes]:
    file = target.with_suffix(".delta")
    info = write_delta(base, sha256(base), target, file)
    assert (info.base, info.makes, info.size_bytes) == (sha256(base), sha256(target), target.stat().st_size)
    contents = file.read_bytes()
    assert Delta(contents).info == info
    return Delta(contents), contents


def changed(value: Tensor, part: float, generator: torch.Generator) -> Tensor:
    """Another bit or more in about `part` of the bytes."""
    raw = value.contiguous().view(torch.uint8).clone() if value.dtype != torch.bool else value.to(torch.uint8)
    where = torch.rand(raw.shape, generator=generator) < part
    if value.dtype == torch.bool:
        return torch.where(where, 1 - raw, raw).to(torch.bool)
    other = torch.randint(1, 256, raw.shape, generator=generator, dtype=torch.int64).to(torch.uint8)
    return torch.where(where, raw ^ other, raw).view(value.dtype)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 700), st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0])),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**31),
)
def test_a_delta_makes_the_very_bytes_and_taken_twice_takes_itself_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, int, float]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    generator = torch.Generator().manual_seed(seed)
    old = {f"t{index}": changed(torch.zeros(size, dtype=dtype), 1.0, generator) for index, (dtype, size, _) in enumerate(kinds)}
    new = {name: changed(value, kinds[index][2], generator) for index, (name, value) in enumerate(old.items())}
    base, target = saved(old, folder / "old"), saved(new, folder / "new")
    delta, _ = delta_of(base, target)
    contents = np.fromfile(base, np.uint8)
    delta.apply(contents)
    assert contents.tobytes() == target.read_bytes()
    delta.apply(contents)
    assert contents.tobytes() == base.read_bytes()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=300, unique=True))
def test_positions_come_back_from_their_gaps(numbers: list[int]) -> None:
    positions = np.array(sorted(numbers))
    assert _positions(_gaps(positions)).tolist() == positions.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 254, 255, 256, 509, 510, 511, _BLOCK - 1, _BLOCK, _BLOCK + 255, _BLOCK + 4999])
def test_one_changed_element_anywhere_in_a_tensor_of_several_blocks(position: int, tmp_path: Path) -> None:
    old = torch.zeros(_BLOCK + 5000, dtype=torch.int8)
    new = old.clone()
    new[position] = 7
    base, target = saved({"a": old}, tmp_path / "old"), saved({"a": new}, tmp_path / "new")
    delta, written = delta_of(base, target)
    contents = np.fromfile(base, np.uint8)
    delta.apply(contents)
    assert contents.tobytes() == target.read_bytes()
    assert len(written) < 1000


@pytest.mark.parametrize(("learning_rate", "times"), [(1e-6, 50), (1e-5, 14)])
def test_a_step_at_a_small_learning_rate_takes_a_small_part_of_the_bytes(learning_rate: float, times: int, tmp_path: Path) -> None:
    """Weights and steps are drawn as those of Adam are spread; what training gives is in
    docs/models.md.
    """
    generator = torch.Generator().manual_seed(1)
    weights = 0.02 * torch.randn(2_000_000, generator=generator)
    step = learning_rate * (0.5 * torch.randn(weights.shape, generator=generator)).clamp(-1, 1)
    base = saved({"a": weights.bfloat16()}, tmp_path / "old")
    target = saved({"a": (weights + step).bfloat16()}, tmp_path / "new")
    _, written = delta_of(base, target)
    assert target.stat().st_size / len(written) > times


def test_deltas_of_a_chain_make_its_last_policy_whatever_lies_between(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {"a": torch.randn(3000, generator=generator).bfloat16(), "b": torch.randn(7, 5, generator=generator)}
    files = [saved(tensors, tmp_path / "0")]
    for version in range(1, 6):
        tensors = {name: changed(value, 0.05 * version, generator) for name, value in tensors.items()}
        files.append(saved(tensors, tmp_path / str(version)))
    contents = np.fromfile(files[0], np.uint8)
    for old, new in zip(files, files[1:], strict=False):
        delta_of(old, new)[0].apply(contents)
    assert contents.tobytes() == files[-1].read_bytes()


def test_files_of_other_tensors_have_no_delta(tmp_path: Path) -> None:
    base = saved({"a": torch.zeros(8)}, tmp_path / "base")
    others = {
        "another name": saved({"b": torch.zeros(8)}, tmp_path / "1"),
        "another shape": saved({"a": torch.zeros(2, 4)}, tmp_path / "2"),
        "another dtype": saved({"a": torch.zeros(8, dtype=torch.int32)}, tmp_path / "3"),
        "more": saved({"a": torch.zeros(9)}, tmp_path / "4"),
    }
    no_weights = {"empty": b"", "short": b"\x08\x00", "text": b"\x08" + bytes(7) + b"no json!", "a hole": bytes(100)}
    for name, contents in no_weights.items():
        (tmp_path / name).write_bytes(contents)
        others[name] = tmp_path / name
    for name, other in others.items():
        for pair in ((base, other), (other, base), (other, other) if name in no_weights else (other, base)):
            with pytest.raises(DeltaError):
                write_delta(pair[0], "0" * 64, pair[1], tmp_path / "delta")


def test_a_safetensors_header_that_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    def with_header(header: object) -> Path:
        text = msgspec.json.encode(header)
        (tmp_path / "lying").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
        return tmp_path / "lying"

    def entry(first: int, end: int, dtype: str = "F32") -> dict[str, object]:
        return {"dtype": dtype, "shape": [], "data_offsets": [first, end]}

    for header in (
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "data_offsets": [0]}},
        {"a": entry(0, 1_000_000)},
        {"a": entry(-64, 64)},
        {"a": entry(64, 0)},
        {"a": entry(0, 63)},
        {"a": entry(0, 32)},
    ):
        file = with_header(header)
        with pytest.raises(DeltaError):
            write_delta(file, "0" * 64, file, tmp_path / "delta")


@pytest.mark.slow
def test_a_delta_with_any_byte_changed_or_missing_is_refused_or_makes_something_else_than_it_says(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    old = {"a": torch.randn(500, generator=generator).bfloat16(), "b": torch.randn(60, generator=generator)}
    new = {"a": changed(old["a"], 0.02, generator), "b": changed(old["b"], 0.9, generator)}
    base, target = saved(old, tmp_path / "old"), saved(new, tmp_path / "new")
    _, written = delta_of(base, target)
    wanted = target.read_bytes()

    def made(contents: bytes) -> bytes | None:
        found = np.fromfile(base, np.uint8)
        try:
            delta = Delta(contents)
            delta.apply(found)
        except DeltaError:
            return None
        return found.tobytes()

    assert made(written) == wanted
    unharmed = 0
    for index in range(len(written)):
        for value in (0x00, 0xFF, written[index] ^ 1, written[index] ^ 0x80):
            if value != written[index]:
                # Bytes that say nothing of what is made (checksums, the base's hash) may change;
                # nothing else raises or hangs.
                unharmed += made(written[:index] + bytes([value]) + written[index + 1 :]) == wanted
    assert unharmed < len(written)
    for length in range(len(written)):
        assert made(written[:length]) is None
    assert made(written + b"more") is None


def test_a_delta_cannot_make_its_reader_hold_more_than_a_block(tmp_path: Path) -> None:
    import zstandard

    base = saved({"a": torch.zeros(16, dtype=torch.uint8)}, tmp_path / "old")
    size = base.stat().st_size
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    for how, payloads in (("planes", [bomb]), ("gaps", [bomb, bomb])):
        header = {
            "base": "0" * 64,
            "makes": "0" * 64,
            "size_bytes": size,
            "blocks": [[size - 16, 16, 1, how, [len(payload) for payload in payloads]]],
            "tensors": [],
        }
        head = msgspec.msgpack.encode(header)
        delta = Delta(b"swarm-delta-1\n" + len(head).to_bytes(4, "little") + head + b"".join(payloads))
        with pytest.raises(DeltaError, match="another size"):
            delta.apply(np.fromfile(base, np.uint8))
