"""Data sets of the hub, by name and commit: fetched by the hub's own client from a server on
loopback, and told by cause and remedy when they cannot be.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared.config import ConfigError, load_config
from shared.runtime.exits import EXIT_CONFIG
from shared.tasks.hub_files import _HubData
from tests.hub_server import HubServer, commit_of, serving

pytest.importorskip("huggingface_hub")
NO_COMMIT = "0" * 40
MODEL = Path(__file__).resolve().parents[2] / "models" / "base"


def jsonl(first: int, count: int = 24, **more: Any) -> bytes:
    rows = (
        {"question": f"What is {number} + 1?", "answer": f"It is {number + 1}.\n#### {number + 1}", **more}
        for number in range(first, first + count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(first: int, count: int = 24) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    numbers = range(first, first + count)
    out = io.BytesIO()
    table = pyarrow.table({"problem": [f"What is {n} + 1?" for n in numbers], "solution": [str(n + 1) for n in numbers]})
    writer.write_table(table, out)
    return out.getvalue()


SINGLE = {"README.md": b"# sums", ".gitattributes": b"", "sums.jsonl": jsonl(0)}
SPLITS = {
    "README.md": b"# splits",
    "main/train-00000-of-00002.parquet": parquet(0),
    "main/train-00001-of-00002.parquet": parquet(100),
    "main/test-00000-of-00001.parquet": parquet(200),
    "dataset_infos.json": b"{}",
}
CONFIGS = {**SPLITS, "socratic/train-00000-of-00001.parquet": parquet(300), "socratic/test-00000-of-00001.parquet": parquet(400)}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    files = {
        "ann/sums": [SINGLE],
        "ann/splits": [SPLITS],
        "ann/configs": [CONFIGS],
        "ann/numbered": [{f"data/{number:04d}.jsonl": jsonl(number) for number in range(3)}],
        "ann/moved": [SINGLE, {**SINGLE, "sums.jsonl": jsonl(500)}],
        "ann/secret": [SINGLE],
        "ann/asks": [SINGLE],
        "ann/code": [{"sums.py": b"", "README.md": b""}],
    }
    data = {name: {commit_of(each): each for each in commits} for name, commits in files.items()}
    with serving(HubServer(data, {"ann/secret": "hf_secret"}, frozenset({"ann/asks"}))) as server:
        yield server


READ = """
import json, sys
from shared.config.task_sections import TaskSpec
from shared.tasks.file_formats import FileSourceError
from shared.tasks.file_source import with_row_name, load_rows
for each in json.loads(sys.argv[1]):
    spec = TaskSpec.model_validate({**each, "verifier": "math"})
    try:
        print(json.dumps([with_row_name(spec).dataset, len(load_rows(spec)), spec.file_name]))
    except FileSourceError as error:
        print(json.dumps(["", 0, str(error)]))
"""


class Read(NamedTuple):
    """`name`: the file's; or why it cannot be read."""

    dataset: str
    rows: int
    name: str


def read(environment: dict[str, str], *sources: tuple[str, str] | tuple[str, str, str]) -> list[Read]:
    """What a process of a node reads of sources: path, revision and expected dataset."""
    asked = json.dumps([dict(zip(("path", "revision", "dataset"), each, strict=False)) for each in sources])
    # Without the machine's own: a token, an endpoint.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", READ, asked], capture_output=True, text=True, env=clean | environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Read(*json.loads(line)) for line in done.stdout.splitlines()]


def newest(hub: HubServer, name: str) -> str:
    return [*hub.data[name]][-1]


@pytest.mark.slow
def test_a_data_set_is_read_at_its_commit_and_from_the_cache_when_the_network_is_gone(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_bytes(SINGLE["sums.jsonl"])
    commit, here = newest(hub, "ann/sums"), hub.environment(tmp_path / "home")
    first, same = read(here, ("hub:ann/sums/sums", commit), (str(tmp_path / "same.jsonl"), ""))
    assert (first.rows, first.name) == (24, "ann/sums/sums")
    assert same.dataset == first.dataset, "the same rows, wherever they are from"
    asked = len(hub.asked)
    assert read(here | {"HF_ENDPOINT": "http://127.0.0.1:9"}, ("hub:ann/sums/sums", commit)) == [first]
    others = ("hub:ann/sums", commit), ("hub:ann/splits/main/train", newest(hub, "ann/splits"))
    again, without_part, missing = read(here | {"HF_HUB_OFFLINE": "1"}, ("hub:ann/sums/sums", commit), *others)
    assert again == first and without_part.dataset == first.dataset
    assert "cache" in missing.name and "HF_HUB_OFFLINE" in missing.name
    (unreached,) = read(here | {"HF_ENDPOINT": "http://127.0.0.1:9"}, others[1])
    assert all(word in unreached.name for word in ("http://127.0.0.1:9 ", "refused", "HF_ENDPOINT", "--data FILE"))
    assert len(hub.asked) == asked, "a commit's files do not change, so the hub is not asked again"


@pytest.mark.slow
def test_splits_are_never_mixed_and_only_a_training_split_is_proposed(hub: HubServer, tmp_path: Path) -> None:
    commit = newest(hub, "ann/splits")
    whole, train, test, near, several, nothing = read(
        hub.environment(tmp_path / "home"),
        ("hub:ann/splits", commit),
        ("hub:ann/splits/main/train", commit),
        ("hub:ann/splits/test", commit),
        ("hub:ann/splits/main/tran", commit),
        ("hub:ann/configs/train", newest(hub, "ann/configs")),
        ("hub:ann/code", newest(hub, "ann/code")),
    )
    assert "main/test" in whole.name and 'path = "hub:ann/splits/main/train"' in whole.name
    assert (train.rows, test.rows) == (48, 24), "of the training split both files"
    assert "did you mean main/train?" in near.name
    assert "main/train" in several.name and "socratic/train" in several.name and 'path = "' not in several.name
    assert ".jsonl" in nothing.name and "save_to_disk" in nothing.name


@pytest.mark.slow
def test_half_a_data_set_in_the_cache_is_not_taken_for_the_whole(hub: HubServer, tmp_path: Path) -> None:
    here, train = hub.environment(tmp_path / "home"), ("hub:ann/splits/main/train", newest(hub, "ann/splits"))
    assert read(here, train)[0].rows == 48
    (half,) = (tmp_path / "home").rglob("snapshots/*/main/train-00001-of-00002.parquet")
    half.unlink()
    assert read(here | {"HF_HUB_OFFLINE": "1"}, train)[0].rows == 0
    assert read(here, train)[0].rows == 48, "it is fetched again"


@pytest.mark.slow
def test_what_cannot_be_fetched_is_told_by_its_cause(hub: HubServer, tmp_path: Path) -> None:
    secret = ("hub:ann/secret", newest(hub, "ann/secret"))
    asked = {
        ("hub:ann/nobody", NO_COMMIT): "check the spelling",
        secret: "HF_TOKEN",
        ("hub:ann/asks", newest(hub, "ann/asks")): "conditions",
        ("hub:ann/sums", NO_COMMIT): "no such commit",
    }
    here = hub.environment(tmp_path / "home")
    for (source, told), found in zip(asked.items(), read(here, *asked), strict=True):
        assert found.rows == 0 and source[0] in found.name and told in found.name, found
    assert read(here | {"HF_TOKEN": "hf_secret"}, secret)[0].rows == 24


@pytest.mark.slow
def test_another_commit_with_other_rows_is_refused_where_the_rows_are_named(hub: HubServer, tmp_path: Path) -> None:
    here, (old, new) = hub.environment(tmp_path / "home"), hub.data["ann/moved"]
    (first,) = read(here, ("hub:ann/moved", old))
    same, other = read(here, ("hub:ann/moved", old, first.dataset), ("hub:ann/moved", new, first.dataset))
    assert same == first and other.rows == 0 and first.dataset in other.name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_files_that_another_program_fetched_are_not_taken_for_the_whole(hub: HubServer, tmp_path: Path) -> None:
    commit, here = newest(hub, "ann/numbered"), hub.environment(tmp_path / "home")
    fetch = "import sys, huggingface_hub as h; h.hf_hub_download(*sys.argv[1:3], repo_type='dataset', revision=sys.argv[3])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | here
    subprocess.run([sys.executable, "-c", fetch, "ann/numbered", "data/0000.jsonl", commit], env=clean, check=True, timeout=120)

    offline = here | {"HF_HUB_OFFLINE": "1"}
    whole, guessed, one = read(offline, *(("hub:ann/numbered" + part, commit) for part in ("/data", "", "/data/0000.jsonl")))
    assert (whole.rows, guessed.rows, one.rows) == (0, 0, 24), (whole, guessed, one)
    assert "cache" in whole.name and "cache" in guessed.name
    (fetched,) = read(here, ("hub:ann/numbered/data", commit))
    assert fetched.rows == 72
    again, guessed = read(offline, ("hub:ann/numbered/data", commit), ("hub:ann/numbered", commit))
    assert (again, guessed.dataset) == (fetched, fetched.dataset)


@pytest.mark.parametrize("revision", ["", "main", "abc123"])
def test_a_name_without_its_commit_is_refused_with_the_way_to_find_it(tmp_path: Path, revision: str) -> None:
    line = f'revision = "{revision}"' if revision else ""
    (tmp_path / "node.toml").write_text(f'[[tasks]]\npath = "hub:ann/sums"\n{line}\n')
    with pytest.raises(ConfigError, match=r"dataset_info\('ann/sums'\).*swarm new --data ann/sums"):
        load_config(tmp_path / "node.toml", environment={})


def test_files_with_numbers_are_one_part_only_if_they_count_on() -> None:
    names = [
        "aime2024.jsonl",
        "aime2025.jsonl",
        "v1.jsonl",
        "v2.jsonl",
        "data/train-0.jsonl",
        "data/train-1.jsonl",
        "default/test/0000.parquet",
        "dapo-17k.parquet",
        "sums.csv",
        "sums.json",
    ]
    assert _HubData.parts(names) == {
        "aime2024": ["aime2024.jsonl"],
        "aime2025": ["aime2025.jsonl"],
        "v1": ["v1.jsonl"],
        "v2": ["v2.jsonl"],
        "data/train": ["data/train-0.jsonl", "data/train-1.jsonl"],
        "default/test": ["default/test/0000.parquet"],
        "dapo-17k": ["dapo-17k.parquet"],
        "sums": ["sums.csv"],
        "sums.json": ["sums.json"],
    }


@pytest.mark.slow
def test_swarm_new_writes_the_commit_and_the_training_split_and_the_configuration_can_be_checked(
    hub: HubServer, tmp_path: Path
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = clean | hub.environment(tmp_path / "home")

    def swarm(*words: str, cwd: Path = tmp_path, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "swarm_cli", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment | more, cwd=cwd, timeout=300, check=False)

    made = swarm("new", "mine", "--model", str(MODEL), "--data", "ann/splits")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "mine/node.toml").read_text()
    assert 'path = "hub:ann/splits/main/train"' in text and f'revision = "{newest(hub, "ann/splits")}"' in text
    checked = swarm("config", "check", cwd=tmp_path / "mine", HF_HUB_OFFLINE="1")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    one = swarm("new", "one", "--model", str(MODEL), "--data", "ann/sums")
    assert one.returncode == 0 and 'path = "hub:ann/sums/sums"' in (tmp_path / "one/node.toml").read_text()
    several = swarm("new", "other", "--model", str(MODEL), "--data", "ann/configs")
    assert several.returncode != 0 and "socratic/train" in several.stderr
    (tmp_path / "mine/node.toml").write_text(text.replace(newest(hub, "ann/splits"), NO_COMMIT))
    refused = swarm("config", "check", cwd=tmp_path / "mine")
    assert refused.returncode == EXIT_CONFIG and "no such commit" in refused.stderr
