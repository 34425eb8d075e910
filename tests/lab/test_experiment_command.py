"""`swarm experiment` from a spec to its report: run side by side, resumed, and mistakes told in a
sentence.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from lab.runs import run_folder, write_manifest
from lab.spec import load_spec
from tests import forked
from tests.lab.tiny_swarm import write_spec


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spec(tmp_path_factory.mktemp("experiment"))


def swarm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.run("swarm_cli", ["experiment", *map(str, arguments)], environment=os.environ, cwd=Path.cwd(), timeout=600)


def test_an_experiment_is_run_side_by_side_resumed_and_reported(spec_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    first = swarm("run", spec_file, "--out", out, "--jobs", "2", "--seeds", "1")
    assert first.returncode == 0, first.stderr
    assert "2 runs to make" in first.stderr
    assert "gcd is out: the constant `" in first.stderr
    settings = json.loads((out / "8-0" / "settings.json").read_text())
    assert (settings["nodes"][0]["count"], settings["nodes"][0]["sampler"]["local"]) == (2, 4)
    assert json.loads((out / "floors.json").read_text())[0]["dataset"] == "gcd"
    done = out / "8-0" / "seed-1" / "done.json"
    before = done.stat().st_mtime_ns
    # As an interrupted run leaves its folder: torn records, nothing that says it is complete.
    torn = out / "4-4" / "seed-2"
    torn.mkdir(parents=True)
    (torn / "records.jsonl.gz").write_bytes(b"torn")
    second = swarm("run", spec_file, "--out", out)
    assert second.returncode == 0, second.stderr
    assert "2 runs to make" in second.stderr
    assert done.stat().st_mtime_ns == before
    report = swarm("report", out)
    assert report.returncode == 0, report.stderr
    assert "No comparisons: an arm and its baseline need" in report.stdout, "gcd is out, and there is no other dataset"
    assert (out / "report" / "held_out.png").stat().st_size
    found = json.loads((out / "report" / "report.json").read_text())
    assert {arm: summary["seeds"] for arm, summary in found["arms"].items()} == {"8-0": [1, 2], "4-4": [1, 2]}
    manifest = (out / "manifest.json").read_text()
    assert "torch" in manifest
    assert os.uname().nodename not in manifest


def test_an_experiment_whose_runs_are_all_there_keeps_its_manifest(spec_file: Path, tmp_path: Path) -> None:
    spec, out = load_spec(spec_file), tmp_path / "results"
    write_manifest(out, spec)
    for arm in spec.arms:
        for seed in spec.seeds:
            folder = run_folder(out, arm, seed)
            folder.path.mkdir(parents=True)
            folder.records.write_bytes(b"")
            folder.finish(3, 1.0, spec.digest(arm))
    manifest = out / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "commit": "an earlier one", "written": "2026-01-01"}))
    before = manifest.read_bytes()
    told = swarm("run", spec_file, "--out", out)
    assert told.returncode == 0, told.stderr
    assert "no runs to make" in told.stderr
    assert "--out" in told.stderr, "how to make them again"
    assert manifest.read_bytes() == before
    assert sorted(file.name for file in out.iterdir()) == ["4-4", "8-0", "manifest.json"], "nothing is screened either"
    other = tmp_path / "other.toml"
    other.write_text(spec_file.read_text().replace("rounds = 3", "rounds = 4"))
    refused = swarm("run", other, "--out", out)
    assert refused.returncode == 1, "another spec is refused as before"


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        (('/model"', '/modle"'), (), "arm 8-0: model.path"),
        (("", ""), ("--arms", ""), "--arms names none"),
    ],
)
def test_what_can_be_found_before_screening_is(
    spec_file: Path, tmp_path: Path, changed: tuple[str, str], options: tuple[str, ...], said: str
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(spec_file.read_text().replace(*changed))
    told = swarm("run", bad, "--out", tmp_path / "results", *options)
    assert told.returncode == 1
    assert said in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "results").exists()


def test_a_mistake_in_a_spec_is_told_in_a_sentence_and_nothing_is_made(spec_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(spec_file.read_text().replace("rounds = 3", "rounds = 0"))
    told = swarm("run", bad, "--out", tmp_path / "results")
    assert told.returncode != 0
    assert "rounds" in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_what_a_run_finds_to_be_impossible_is_told_in_a_sentence(spec_file: Path, tmp_path: Path, jobs: str) -> None:
    """That answers leave no room for a prompt is known when the model is there."""
    bad = tmp_path / "bad.toml"
    text, found = re.subn(r"max_new_tokens = \d+", "max_new_tokens = 40000", spec_file.read_text())
    assert found == 1
    bad.write_text(text)
    told = swarm("run", bad, "--out", tmp_path / "results", "--jobs", jobs)
    assert told.returncode == 1
    assert "generator.max_new_tokens 40000 leaves no room for a prompt" in told.stderr
    assert "Traceback" not in told.stderr
