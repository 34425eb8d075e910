"""When `swarm nats reload` tells a server to read its files again."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_cli.nats.beside_server import BETWEEN_S, SIGNALS, Reloads, digest, server_process


def told_at(reloads: Reloads, found: dict[float, str]) -> list[float]:
    times = []
    for now, content in found.items():
        if reloads.due(content, now):
            reloads.signalled(now)
            times.append(now)
    return times


def test_a_change_is_told_twice_with_time_between_and_then_no_more() -> None:
    found = {0.0: "a", 5.0: "b", 5.0 + BETWEEN_S / 2: "b", 5.0 + BETWEEN_S: "b", 60.0: "b"}
    assert told_at(Reloads("a"), found) == [5.0, 5.0 + BETWEEN_S] and SIGNALS == 2


def test_what_the_server_may_not_have_read_is_told_at_once() -> None:
    assert told_at(Reloads(None), {0.0: "a", 30.0: "a", 60.0: "a"}) == [0.0, 30.0]


def test_a_server_that_could_not_be_told_is_told_later() -> None:
    reloads = Reloads("a")
    assert reloads.due("b", 1.0) and reloads.due("b", 2.0)
    reloads.signalled(2.0)
    assert not reloads.due("b", 3.0)


def test_a_change_is_seen_when_kubernetes_exchanges_the_link(tmp_path: Path) -> None:
    for version, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "accounts.conf").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "accounts.conf").symlink_to("..data/accounts.conf")
    before = digest([tmp_path])
    assert digest([tmp_path]) == before
    (tmp_path / "next").symlink_to("..2")
    (tmp_path / "next").rename(tmp_path / "..data")
    assert digest([tmp_path]) != before


@pytest.mark.parametrize("text", ["0", "-1", "-4711", "1\n", str(2**40), "", "nats"])
def test_a_pid_file_that_names_no_server_signals_nothing_least_of_all_a_group_of_processes(text: str) -> None:
    assert server_process("4711\n") == 4711
    with pytest.raises(ValueError):
        server_process(text)
