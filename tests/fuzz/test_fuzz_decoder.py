"""Hostile bytes at the decoders and at the border's checks: no crash, no memory growth, each
refused under a reason.
"""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from services.verifier.border import Candidate, Refused
from shared.contracts import control, messages, sampler_state
from shared.contracts.codec import decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.wire import Message, MessageError
from tests.chaos.figures import REPO, Row, note
from tests.chaos.scale import SCALE
from tests.fuzz.hostile import hostile_messages, resident_bytes
from tests.unit.test_border import NOW_S, border, group

GROWTH_BYTES = 48 * 2**20
KINDS = [
    kind
    for module in (messages, control, sampler_state)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind.__module__ == module.__name__
]


def a_group(node: str, number: int) -> RolloutGroup:
    return group(node=node, draw=number)


def test_hostile_messages_at_the_border_are_refused_under_a_reason_in_bounded_memory(tmp_path: Path) -> None:
    old = fresh = border(tmp_path)
    count, reasons, passed = SCALE.decoder_messages, Counter[str](), 0
    warm_at, warm_bytes, started = count // 5, 0, time.monotonic()
    for number, each in enumerate(islice(hostile_messages(1, a_group, 1000), count)):
        # One border sees everything, as the memory's growth is about; the reasons are those of one
        # that holds no grudge yet.
        assert isinstance(old.examine(each.subject, each.payload, NOW_S), Candidate | Refused)
        if number % 100 == 0:
            fresh = border(tmp_path / "fresh" / str(number % 1000))
        verdict = fresh.examine(each.subject, each.payload, NOW_S)
        if isinstance(verdict, Refused):
            reasons[verdict.reason.value] += 1
        else:
            assert isinstance(verdict, Candidate)
            passed += 1
        kind = KINDS[number % len(KINDS)]
        try:
            assert isinstance(decode(each.payload, kind), kind)
        except MessageError as error:
            assert error.reason in {"malformed", "out_of_range", "schema_version"}
        if number == warm_at:
            gc.collect()
            warm_bytes = resident_bytes()
    gc.collect()
    growth_bytes = resident_bytes() - warm_bytes
    seconds = time.monotonic() - started
    assert len(reasons) >= 6, reasons
    assert growth_bytes < GROWTH_BYTES
    note(
        Row(
            fault="hostile messages at the decoders and the border's checks (structure-aware mutation)",
            injected=count,
            counted="messages",
            sent=count,
            lost=0,
            refused=dict(reasons),
            remark=f"{passed} were still well-formed and go on to the sandbox; memory grew by {growth_bytes / 2**20:.1f} MB after "
            f"the first fifth; {count / seconds:.0f} a second",
        )
    )


@pytest.mark.skipif(SCALE.coverage_guided_messages == 0, reason="coverage-guided fuzzing is part of `make chaos` only")
def test_coverage_guided_messages_find_no_crash(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: pip install atheris")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    command = [sys.executable, "-m", "tests.fuzz.coverage_guided", f"-runs={SCALE.coverage_guided_messages}", "-rss_limit_mb=1024"]
    # A shell between: Linux counts the parent's memory as the peak of a program that replaces its
    # direct child.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command, "-max_len=4096", "-print_final_stats=1", str(corpus)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stats = dict(line.removeprefix("stat::").split(":", 1) for line in done.stderr.splitlines() if line.startswith("stat::"))
    executed = int(stats["number_of_executed_units"])
    assert executed >= SCALE.coverage_guided_messages
    note(
        Row(
            fault="hostile messages at the border's checks (coverage-guided, atheris)",
            injected=executed,
            counted="messages",
            sent=executed,
            lost=0,
            remark=f"inputs kept because they reached new code: {stats['new_units_added'].strip()}; "
            f"peak memory {stats['peak_rss_mb'].strip()} MB with the fuzzer's own",
        )
    )
