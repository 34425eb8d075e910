"""The files of a folder are one dataset only if their names say so: a test split is never read
together with the training split, and no file is left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.tasks.file_formats import FileSourceError, data_files


def folder_of(folder: Path, names: str) -> Path:
    for name in names.split():
        (folder / name).write_text("{}\n")
    return folder


@pytest.mark.parametrize(
    "names",
    [
        "train_1.jsonl test_1.jsonl",
        "gsm8k_train.jsonl gsm8k_test.jsonl",
        "train.jsonl testing.jsonl",
        "TRAIN.jsonl TEST.jsonl",
        "train.0.jsonl test.0.jsonl",
        "train-00000.jsonl holdout.jsonl",
        "train1.jsonl test1.jsonl",
        "train-00000-of-00001.parquet test-00000-of-00001.parquet",
        "gsm8k-train.arrow gsm8k-test.arrow dataset_info.json",
        "train-00000-of-00001-a09b74b3ef9c3b56.parquet test-00000-of-00001-b09b74b3ef9c3b56.parquet",
        "0000.parquet test.parquet",
        "train.jsonl test.parquet",
    ],
)
def test_files_of_different_names_are_refused_with_their_names_and_the_remedy(tmp_path: Path, names: str) -> None:
    with pytest.raises(FileSourceError, match="it holds files of different names") as caught:
        data_files(folder_of(tmp_path, names))
    assert all(name in str(caught.value) for name in names.split() if not name.endswith(".json"))
    assert "name one file, or put the files of one split into a folder of their own" in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        "train-00000-of-00002.parquet train-00001-of-00002.parquet",
        "train-00000-of-00002-a09b74b3ef9c3b56.parquet train-00001-of-00002-0123456789abcdef.parquet",
        "data-00000-of-00001.arrow",
        "part-0.jsonl part-1.jsonl part-10.jsonl",
        "0000.parquet 0001.parquet",
        "train.0.jsonl train.1.jsonl",
        "TRAIN_1.jsonl train-2.jsonl",
        "gsm8k_train.jsonl gsm8k_train_2.jsonl",
        "train_or_test.jsonl",
        "träin(1).jsonl träin(2).jsonl",
    ],
)
def test_the_parts_of_one_dataset_are_read_in_the_order_of_their_names(tmp_path: Path, names: str) -> None:
    folder = folder_of(tmp_path, f"{names} README.md dataset_info.json")
    assert [file.name for file in data_files(folder)] == sorted(names.split())


@pytest.mark.parametrize(
    "names",
    ["a-1.jsonl a-2.parquet", "train.jsonl train.parquet", "a-1.arrow a-2.parquet a-3.jsonl a-4.jsonl dataset_info.json"],
)
def test_files_of_several_formats_are_refused_and_none_is_left_out_without_a_word(tmp_path: Path, names: str) -> None:
    with pytest.raises(FileSourceError) as caught:
        data_files(folder_of(tmp_path, names))
    assert all(f"{suffix}" in str(caught.value) for suffix in {Path(name).suffix for name in names.split()} - {".json"})


def test_a_saved_dataset_lists_its_own_files(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "data-00000-of-00001.arrow cache-a09b74b3ef9c3b56.arrow dataset_info.json")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    assert [file.name for file in data_files(saved)] == ["data-00000-of-00001.arrow"]
    folder_of(saved, "data-00000-of-00001.parquet data.jsonl")
    assert [file.name for file in data_files(saved)] == ["data-00000-of-00001.arrow"], "its list says which files are its own"


def test_of_many_names_the_first_are_told_and_nothing_that_moves_the_cursor(tmp_path: Path) -> None:
    with pytest.raises(FileSourceError) as caught:
        data_files(folder_of(tmp_path, " ".join(f"{letter}\x1b.jsonl" for letter in "abcdefgh")))
    assert r"(a\x1b.jsonl, b\x1b.jsonl, c\x1b.jsonl, d\x1b.jsonl, e\x1b.jsonl and 3 more)" in str(caught.value)
