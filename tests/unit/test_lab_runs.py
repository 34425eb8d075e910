"""Runs of an experiment that several processes make at once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from lab.base_models import fixed_phrases
from lab.jobs import make_run
from lab.runs import run_folder
from lab.spec import Spec


def test_a_run_that_another_process_completed_meanwhile_keeps_its_records(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "8-0", 1)
    folder.path.mkdir(parents=True)
    folder.records.write_bytes(b"the other's")
    folder.finish(rounds=3, seconds=1.0, arm_digest="x")
    no_spec = cast(Spec, None)  # a complete run is left alone before its spec is looked at
    assert make_run(no_spec, folder) is None
    assert folder.records.read_bytes() == b"the other's"


def test_a_run_that_another_process_is_making_is_left_to_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "8-0", 1)
    no_spec = cast(Spec, None)
    with folder.claimed() as mine, folder.claimed() as twice:
        assert mine and not twice
        assert make_run(no_spec, folder) is None
    with folder.claimed() as again:
        assert again


def test_phrases_are_what_questions_share_and_never_their_numbers() -> None:
    questions = [f"Please tell me the sum of {a} and {b}, nothing else at all." for a in range(9) for b in range(9)]
    phrases = fixed_phrases(questions)
    assert "Please tell me the sum of " in phrases
    assert any("nothing else at all." in phrase for phrase in phrases)
    assert not any(character.isdigit() for phrase in phrases for character in phrase)
