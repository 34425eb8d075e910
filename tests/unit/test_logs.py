"""What a log tells of a crash."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from shared.identity.keys import new_seed
from shared.runtime.exits import FILE_VARIABLE
from shared.runtime.logs import configure_logging


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def fails_with(seed: str) -> None:
    raise LookupError(f"a key of {len(seed)} characters")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_crash_is_told_with_its_lines_and_without_what_was_in_variables(tmp_path: Path, log_format: str) -> None:
    stream, file, seed = io.StringIO(), tmp_path / "verifier.log", new_seed().decode()
    configure_logging(level="info", log_format=log_format, file=file, stream=stream)  # type: ignore[arg-type]
    try:
        fails_with(seed)
    except LookupError:
        structlog.get_logger("verifier").exception("crashed")
    for told in (stream.getvalue(), file.read_text()):
        assert "a key of 58 characters" in told and "fails_with" in told
        assert seed not in told


def test_under_swarm_up_a_line_is_a_sentence_without_pythons_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`swarm up` writes the time and the process's name before it."""
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "deaths.json"))
    stream = io.StringIO()
    configure_logging(level="info", log_format="console", stream=stream)
    log = structlog.get_logger("trainer").bind(node="alpha", role="trainer")
    log.warning(
        "groups_skipped", reason="too long", remedy="raise trainer.max_length", counts={"too_long": 3, "empty": 1}, steps=[4, 5]
    )
    try:
        raise LookupError("no such thing")
    except LookupError:
        log.exception("crashed")
    first, *rest = stream.getvalue().splitlines()
    assert first == "warning: groups_skipped: too long; raise trainer.max_length (counts too_long 3, empty 1; steps 4, 5)"
    assert rest[0] == "error: crashed" and rest[-1] == "LookupError: no such thing"


def test_lines_that_a_full_disk_loses_are_told_once_and_again_after_it_had_space(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`/dev/full` is a disk without space."""
    file = tmp_path / "trainer.log"
    file.symlink_to("/dev/full")
    configure_logging(level="info", log_format="json", file=file, stream=io.StringIO())
    log = structlog.get_logger("trainer")
    for _ in range(3):
        log.info("step")
    assert capsys.readouterr().err == f"lines for {file} are lost: No space left on device\n"
    [handler] = [each for each in logging.getLogger().handlers if isinstance(each, logging.FileHandler)]
    full, handler.stream = handler.stream, io.StringIO()
    log.info("step")
    assert capsys.readouterr().err == ""
    handler.stream = full
    log.info("step")
    assert capsys.readouterr().err.count("are lost") == 1


def test_a_line_for_people_has_no_name_without_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that is late says nothing, so its `detail` is empty."""
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "deaths"))
    stream = io.StringIO()
    configure_logging(level="info", log_format="console", stream=stream)
    structlog.get_logger("verifier").warning("reward_unknown", cause="timeout", task="gcd", detail="", answers=0)
    assert stream.getvalue().rstrip().endswith("reward_unknown: timeout (task gcd; answers 0)"), stream.getvalue()
