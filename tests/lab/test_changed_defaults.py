"""Runs under other defaults are not mixed into an arm, though its text is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.arms import plan_run
from lab.runs import RunFolder, resolved_settings, run_folder, runs_to_make, settings_digest
from lab.spec import Spec, SpecError, merged, parse_spec


def spec_of(**changes: Any) -> Spec:
    source = {
        "name": "x",
        "seeds": [1, 2],
        "rounds": 3,
        "nodes": 2,
        "settings": "shipped",
        "tasks": [{"dataset": "gcd"}],
        "arms": {"8-0": {}, "4-4": {"sampler": {"local": 4}}},
    }
    return parse_spec(merged(source, changes))


def finished(out: Path, spec: Spec, arm: str, settings: dict[str, Any] | None, commit: str | None = None) -> RunFolder:
    folder = run_folder(out, arm, 1)
    folder.path.mkdir(parents=True)
    folder.records.write_bytes(b"records")
    folder.finish(3, 1.0, spec.digest(arm), settings)
    if commit is not None:
        done = folder.path / "done.json"
        done.write_text(json.dumps(json.loads(done.read_text()) | {"commit": commit}))
    return folder


def names(runs: list[RunFolder]) -> list[tuple[str, int]]:
    return [(run.arm, run.seed) for run in runs]


def test_resolved_settings_are_a_nodes_defaults_too_and_no_names_or_places() -> None:
    settings = resolved_settings(spec_of(), "4-4")
    config = plan_run(spec_of(), "4-4", 2).nodes[0].config
    (kind,) = settings["nodes"]
    assert (kind["count"], kind["sampler"]["local"]) == (2, 4)
    assert kind["trainer"]["constants"]["drop_foreign_negatives"] == config.trainer.constants.drop_foreign_negatives
    assert not kind.keys() & {"node", "nats", "http", "log", "policy_store"}
    assert settings["attack"]["right_share"] == 0.5
    nodes = [{"count": 2}, {"role": "starve"}, {}]
    kinds = resolved_settings(spec_of(nodes=nodes), "8-0")["nodes"]
    assert [(kind["count"], kind["role"]) for kind in kinds] == [(2, "honest"), (1, "starve"), (1, "honest")]
    digests = {settings_digest(resolved_settings(spec_of(held_out="per seed", seeds=seeds), "8-0")) for seeds in ([1], [2])}
    assert len(digests) == 1


def test_a_run_under_other_defaults_is_refused_and_what_made_the_others_is_named(tmp_path: Path) -> None:
    spec = spec_of()
    before = resolved_settings(spec, "4-4")
    before["nodes"][0]["trainer"]["constants"]["importance_cap"] = 7.5
    del before["nodes"][0]["trainer"]["constants"]["drop_local_negatives"]
    folder = finished(tmp_path, spec, "4-4", before, commit="0123456789ab")
    kept = folder.path.parent / "settings.json"
    assert json.loads(kept.read_text()) == before
    with pytest.raises(SpecError) as told:
        runs_to_make(spec, tmp_path, seeds=[2])
    said = str(told.value)
    assert said.startswith("arm 4-4: ") and "0123456789ab" in said and str(kept) in said
    assert "another name" in said
    # What is finished may be asked for again, and another arm made.
    assert runs_to_make(spec, tmp_path, ["4-4"], [1]) == []
    assert names(runs_to_make(spec, tmp_path, ["8-0"])) == [("8-0", 1), ("8-0", 2)]


def test_a_run_under_the_same_settings_joins_its_arm_whatever_commit_made_the_others(tmp_path: Path) -> None:
    spec = spec_of()
    finished(tmp_path, spec, "4-4", resolved_settings(spec, "4-4"), commit="0123456789ab")
    assert names(runs_to_make(spec, tmp_path, ["4-4"])) == [("4-4", 2)]


def test_runs_of_before_settings_were_recorded_are_joined_where_nothing_can_have_changed(tmp_path: Path) -> None:
    shipped, bare = spec_of(), spec_of(settings="bare")
    finished(tmp_path / "other", shipped, "4-4", None, commit="0123456789ab")
    with pytest.raises(SpecError, match="made by commit 0123456789ab.*another name"):
        runs_to_make(shipped, tmp_path / "other", ["4-4"])
    finished(tmp_path / "bare", bare, "4-4", None, commit="0123456789ab")
    assert names(runs_to_make(bare, tmp_path / "bare", ["4-4"])) == [("4-4", 2)]
