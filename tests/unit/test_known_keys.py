"""One name a key and one key a name: nobody can use the names up, take another's, or be more than
one sender with one key.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.verifier.border import Refusal, Refused
from services.verifier.trust import IDLE_S, KEPT_GROUPS, RENAME_AFTER_S, KnownKeys
from shared.contracts import subjects
from shared.identity.keys import SigningKey, new_seed
from shared.tasks.sandbox import JobResult
from tests.unit.test_border import KEY, NOW_S, OTHER_KEY, THIRD_KEY, border, group, signed, taken_in

OWN = ("alpha", "UOWN")


def known_keys(folder: Path, **settings: float) -> KnownKeys:
    return KnownKeys(folder / "known_keys.txt", OWN, **settings)


def names_of_one_key(count: int) -> list[str]:
    return [f"mallory-{number}" for number in range(count)]


def test_one_key_with_thousands_of_names_locks_no_newcomer_out_also_after_a_restart(tmp_path: Path) -> None:
    """The proof of concept: 19,999 names of one key in four seconds filled the list of names for
    good.
    """
    gate = border(tmp_path)
    for number, name in enumerate(names_of_one_key(300)):
        verdict = gate.examine(subjects.rollouts(name), signed(group(node=name, draw=number), KEY), NOW_S)
        if not isinstance(verdict, Refused):
            gate.conclude(verdict, _scored(), NOW_S)
    assert len(gate._trust) == 2, "the node itself, and one name"  # type: ignore[arg-type]
    for number, each in enumerate((gate, border(tmp_path))):
        newcomer = SigningKey(new_seed())
        name = f"honest-{newcomer.public_key[-6:].lower()}"
        taken_in(each, subjects.rollouts(name), signed(group(node=name, draw=1000 + number), newcomer))


def test_a_file_with_lines_that_nobody_finished_or_that_are_none_is_read_and_written_on(tmp_path: Path) -> None:
    lines = [f"beta {OTHER_KEY.public_key} 5 1", "no line", f"beta {OTHER_KEY.public_key}", f"gamma {KEY.public_key} 7 2"]
    (tmp_path / "known_keys.txt").write_text("".join(f"{line}\n" for line in lines) + "torn-na")
    known = known_keys(tmp_path)
    assert [known.key_of(name) for name in ("beta", "gamma")] == [OTHER_KEY.public_key, KEY.public_key]
    assert len(known) == 3
    assert known.bind("honest", THIRD_KEY.public_key, time.time())
    assert known_keys(tmp_path).key_of("honest") == THIRD_KEY.public_key, "a torn line before it does not swallow it"


def test_a_key_that_has_a_name_is_refused_under_another_and_not_blamed(tmp_path: Path) -> None:
    gate = border(tmp_path)
    taken_in(gate, subjects.rollouts("beta"), signed(group()))
    refused = gate.examine(subjects.rollouts("delta"), signed(group(node="delta", draw=1)), NOW_S)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.blamed, refused.quarantined_s) == (Refusal.UNKNOWN_KEY, None, 0.0)


def test_two_names_of_a_key_that_are_scored_at_the_same_time_become_one(tmp_path: Path) -> None:
    gate = border(tmp_path)
    verdicts = [
        gate.examine(subjects.rollouts(name), signed(group(node=name, draw=number)), NOW_S)
        for number, name in enumerate(("beta", "delta"))
    ]
    outcomes = [gate.conclude(each, _scored(), NOW_S) for each in verdicts if not isinstance(each, Refused)]
    assert outcomes[0] is None
    assert outcomes[1] is not None
    assert outcomes[1].reason is Refusal.UNKNOWN_KEY


def test_a_name_is_free_again_when_idle_and_a_key_may_take_another_when_its_name_is_not_used(tmp_path: Path) -> None:
    known = known_keys(tmp_path, idle_s=10_000.0)
    assert known.bind("beta", "UB", 0.0)
    assert not known.bind("beta", "UC", 10_000.0)
    assert not known.bind("gamma", "UB", RENAME_AFTER_S)
    assert known.bind("gamma", "UB", RENAME_AFTER_S + 1)
    assert known.key_of("beta") is None, "its old name is nobody's"
    assert known.bind("gamma", "UC", RENAME_AFTER_S + 10_002)
    assert not known.bind("alpha", "UC", 1e9)
    assert not known.bind("omega", "UOWN", 1e9), "nor does anyone speak with this node's key"
    assert known_keys(tmp_path, idle_s=10_000.0).key_of("gamma") == "UC"


def test_full_lists_make_room_for_newcomers_and_keep_the_names_that_brought_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.trust.MAX_NAMES", 20)
    known = known_keys(tmp_path)
    for _ in range(KEPT_GROUPS):
        assert known.bind("honest", "UHONEST", 0.0)
    for number in range(2000):
        assert known.bind(f"n{number}", f"U{number}", 10.0 + number), "there is room for everybody new"
        assert len(known) <= 21
    assert known.key_of("honest") == "UHONEST", "although it was not heard of for longest"
    assert known.key_of("n1999") == "U1999"
    lines = (tmp_path / "known_keys.txt").read_text().split()
    assert len(lines) <= 4 * 41, "the file is bounded"
    assert known_keys(tmp_path).key_of("honest") == "UHONEST"


@contextmanager
def full_disk(room_bytes: int = 0) -> Iterator[None]:
    """No file grows beyond `room_bytes`: the system refuses the write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_no_name_and_what_was_not_written_is_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, file = border(tmp_path), tmp_path / "known_keys.txt"
    with full_disk():
        for draw in range(3):
            taken_in(gate, subjects.rollouts("beta"), signed(group(draw=draw), KEY), NOW_S)
    assert not file.exists() or not file.read_bytes()
    assert gate._trust.key_of("beta") == KEY.public_key
    assert capsys.readouterr().out.count("kind=names") == 1  # of three failures, all for one cause
    taken_in(gate, subjects.rollouts("beta"), signed(group(draw=3), KEY), NOW_S)
    assert known_keys(tmp_path).key_of("beta") == KEY.public_key


@pytest.mark.usefixtures("capsys")  # the log goes to no file that the limit bounds
def test_a_line_of_which_a_full_disk_took_a_part_swallows_no_other(tmp_path: Path) -> None:
    known, file = known_keys(tmp_path), tmp_path / "known_keys.txt"
    assert known.bind("beta", "UB", NOW_S)
    with full_disk(file.stat().st_size + 6):
        assert known.bind("gamma", "UC", NOW_S)
    assert file.read_bytes().endswith(b"\n\ngamma")
    assert known.bind("delta", "UD", NOW_S) and known.bind("gamma", "UC", NOW_S)
    again = known_keys(tmp_path)
    assert [again.key_of(name) for name in ("beta", "gamma", "delta")] == ["UB", "UC", "UD"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 4000), st.booleans()), max_size=60))
def test_names_and_keys_stay_one_to_one_and_a_restart_knows_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, float, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("known")
    replicas, now_s = [known_keys(folder, idle_s=IDLE_S), known_keys(folder, idle_s=IDLE_S)], 0.0
    for name, key, pause_s, second in steps:
        now_s += pause_s
        each = replicas[second]
        if each.bind(f"n{name}", f"U{key}", now_s):
            assert each.may_use(f"n{name}", f"U{key}", now_s)
            assert each.key_of(f"n{name}") == f"U{key}"
        held = [key for number in range(6) if (key := each.key_of(f"n{number}")) is not None]
        assert len(held) == len(set(held))
    last = {f"n{number}": replicas[0].key_of(f"n{number}") for number in range(6)}
    if not any(second for *_, second in steps):
        restarted = known_keys(folder)
        assert {name: restarted.key_of(name) for name in last} == last


def _scored() -> JobResult:

    return JobResult([0.5, 0.5], None, None, "", 0, 0.1)
