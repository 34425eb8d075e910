"""The study of whether a skill crosses over, in a short form: its arms run and train, and its table
follows from its records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from lab import specialists
from lab.floors import read_floors
from lab.records import RecordWriter, read_records
from lab.runs import run_folder, write_manifest
from lab.spec import load_spec
from lab.specialists import SKILLS, register_skills, report, run

SPEC = Path(__file__).parents[2] / "experiments/specialists/q19-specialists.toml"
ARMS = ["replay", "default", "uniform", "imitation", "one", "averaging"]


@pytest.fixture(autouse=True, scope="module")
def skills_forgotten() -> Iterator[None]:
    """Other tests in this process look at all datasets of the library."""
    yield
    for name in SKILLS:
        DATASETS.pop(name, None)


def short_spec(folder: Path) -> Path:
    text = SPEC.read_text().replace("var/specialists", str(folder / "models"))
    for key, value in {"tasks": 8, "every_versions": 1, "rounds": 1}.items():
        text, count = re.subn(rf"\b{key} = \d+", f"{key} = {value}", text)
        assert count == 1, key
    (folder / "short.toml").write_text(text)
    return folder / "short.toml"


def test_each_arm_trains_from_as_many_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialists, "BASE_STEPS", 20)
    monkeypatch.setattr(specialists, "AVERAGED_EVERY", 1)
    monkeypatch.setattr(specialists, "MOST_STEPS", 40)
    monkeypatch.setattr(specialists, "TAUGHT_TO", 0.2)
    for skill in SKILLS:  # one of two answers, which a specialist soon guesses
        monkeypatch.setitem(SKILLS, skill, lambda digits: "000000" + "01"[int(digits[-1]) % 2])
    run(short_spec(tmp_path), tmp_path / "results", [231])
    floors = read_floors(tmp_path / "results") or []
    assert [(floor.dataset, floor.out) for floor in floors] == [(skill, True) for skill in SKILLS]
    steps = {}
    for arm in ARMS:
        records = run_folder(tmp_path / "results", arm, 231).records
        steps[arm] = [line for line in read_records(records) if line["kind"] == "step"]
    assert len({sum(line["generated"] for line in lines) for lines in steps.values()}) == 1
    tokens = {arm: sum(line.get("tokens", 0) for line in lines) for arm, lines in steps.items()}
    assert tokens["uniform"] > tokens["default"] > 0 and tokens["replay"] > 0
    assert 0 < tokens["imitation"] < tokens["uniform"]
    assert not any(line.get("groups_local") for line in steps["imitation"])


def test_the_table_is_computed_from_the_records(tmp_path: Path) -> None:
    register_skills()
    write_manifest(tmp_path, load_spec(short_spec(tmp_path)))
    nodes = dict(zip(("n00", "n01", "n02", "n03"), SKILLS, strict=True))
    for arm, lacking in {"replay": 0.0, "default": 0.25, "one": 0.5}.items():
        for seed in (1, 2, 3):
            folder = run_folder(tmp_path, arm, seed)
            writer = RecordWriter(folder.records)
            for number in (0, 2):
                for node, own in nodes.items() if arm != "one" else [("n00", "")]:
                    rates = {skill: 0.5 if skill == own else (lacking + seed / 100) * (number > 0) for skill in SKILLS}
                    writer.write("eval", round=number, node=node, tasks={skill: [100, rate, rate] for skill, rate in rates.items()})
                    writer.write("step", round=number, node=node, generated=16, tokens=10)
            writer.write("cost", cpu_s=7.0, own=nodes if arm != "one" else {}, passed=[{"n00": 0.5}, {"n00": 0.49}])
            writer.close()
            (folder.path / "done.json").write_text(json.dumps({"rounds": 2}))
    table = report(tmp_path)
    assert "| replay | 3 | 0.020 ± 0.025 | 0.020 ± 0.025 | 0.00 | 0.490 | -0.010 ± 0.000 |" in table
    assert "| one | 3 | 0.520 ± 0.025 | 0.520 ± 0.025 | 1.00 | 0.490 | -0.010 ± 0.000 |" in table
    assert "| 128 | 80 | 7 |" in table
    # One of four stated comparisons has runs: p 2 / 2**3, times four for those without.
    assert "| default over replay | 3 | +0.250 ± 0.000 | 0.250 | 1.000 |" in table
