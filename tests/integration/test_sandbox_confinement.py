"""What a scorer that was taken over can do: tried from inside the real processes, by a verifier
that obeys the answers.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.identity.keys import load_or_create
from shared.registry import VERIFIERS
from shared.tasks.derive import derive_task
from shared.tasks.sandbox import ScorerPool, ScoringJob
from shared.tasks.sandbox.confinement import NOBODY, PROTECTIONS, landlock_abi
from tests.integration.installed_verifier import DONE, OBEYS, REFUSED, install

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the protections are Linux's")

REF = TaskRef(dataset="gcd", seed=1, index=0)
OBEY = TaskSpec(dataset="gcd", verifier="obeys")
SENDERS = (None, "Ustranger")
"""Of a local group, and of a foreign one: each kind has its own process."""
NEVER = [
    "fork", "exec", "subprocess", "signal_parent", "signal_all", "pidfd", "unix_socket", "inet_socket", "ptrace_parent",
    "read_parents_memory", "limit_parent",
]  # fmt: skip


@pytest.fixture(autouse=True)
def obedient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "installed"
    folder.mkdir()
    install(folder, monkeypatch, "obeys", OBEYS)
    yield
    VERIFIERS.look_again()


def pool(**settings: float) -> ScorerPool:
    return ScorerPool(
        workers=1,
        answer_timeout_s=60.0,
        memory_mb=2048,
        tasks=[OBEY],
        foreign_workers=1,
        foreign_group_s=settings.get("foreign_group_s", 60.0),
    )


async def tried(scorers: ScorerPool, answers: list[str], sender: str | None) -> dict[str, float]:
    (result,) = await scorers.run([ScoringJob(ref=REF, texts=answers, expected=derive_task(REF), sender=sender)])
    assert result.reason is None, result
    return dict(zip(answers, result.rewards, strict=True))


async def test_neither_kind_of_scorer_starts_processes_signals_others_traces_them_or_opens_sockets() -> None:
    calls = [*NEVER, *(["io_uring", "unshare"] if platform.machine() == "x86_64" else [])]
    async with pool() as scorers:
        if "seccomp" in scorers.missing:
            pytest.skip(f"this system gives no seccomp filter: {scorers.missing['seccomp']}")
        for sender in SENDERS:
            assert await tried(scorers, calls, sender) == dict.fromkeys(calls, REFUSED), sender


async def test_neither_reads_a_key_of_the_same_user_or_the_systems_secrets_and_both_go_on_importing(tmp_path: Path) -> None:
    load_or_create(tmp_path / "run" / "node.nk")
    beside = tmp_path / "installed" / "var"
    beside.mkdir()
    (beside / "node.nk").write_bytes(b"secret")
    (tmp_path / "installed" / "node.toml").write_text("secret")
    secret = [tmp_path / "run" / "node.nk", beside / "node.nk", tmp_path / "installed" / "node.toml"]
    secrets = [f"read {path}" for path in (*secret, "/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/self/environ")]
    changes = [f"write {tmp_path / 'new'}", f"mkdir {tmp_path / 'folder'}", "write /tmp/of_a_scorer"]
    async with pool() as scorers:
        if "landlock" in scorers.missing:
            pytest.skip(f"this system gives no Landlock: {scorers.missing['landlock']}")
        refused = [*secrets, *changes]
        for sender in SENDERS:
            assert await tried(scorers, refused, sender) == dict.fromkeys(refused, REFUSED), sender
            assert await tried(scorers, ["import_late"], sender) == {"import_late": DONE}, sender


async def test_what_the_system_does_not_give_is_said_with_its_remedy() -> None:
    async with pool() as scorers:
        print("missing here:", scorers.missing or "nothing", "Landlock ABI:", landlock_abi())
        assert scorers.missing.keys() <= set(PROTECTIONS)
        assert ("landlock" in scorers.missing) == (landlock_abi() == 0)
        for cause in scorers.missing.values():
            assert len(cause) > 40


AS_ROOT = """
import os, sys
import shared.tasks.sandbox.worker
from shared.tasks.sandbox import confinement as confine
confine.others_can_import = lambda: sys.argv[1] == "yes"
missing = confine.confine(2**31)
print(os.getuid(), "unprivileged_user" in missing, flush=True)
try:
    open("/etc/shadow")
except OSError:
    print("refused")
"""


@pytest.mark.parametrize("readable", ["yes", "no"])
def test_a_scorer_is_not_root_where_another_user_can_import_and_says_so_where_not(readable: str) -> None:
    ended = subprocess.run([sys.executable, "-c", AS_ROOT, readable], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "refused", ended.stderr
    uid, said = ended.stdout.split()[:2]
    dropped = os.getuid() == 0 and readable == "yes"
    # In a user namespace without a mapping every user is called 65534.
    assert int(uid) in {os.getuid(), NOBODY}
    assert said == str(os.getuid() == 0 and not dropped)


async def test_a_worker_that_has_grown_is_replaced_between_groups_and_nothing_is_lost() -> None:
    async with pool() as scorers:
        assert await tried(scorers, ["keep 100"], None) == {"keep 100": DONE}
        assert scorers.replaced == 0
        jobs = [ScoringJob(ref=REF, texts=["keep 50"], expected=derive_task(REF)) for _ in range(12)]
        results = await scorers.run(jobs)
        assert [result.rewards for result in results] == [[DONE]] * 12
        assert await tried(scorers, ["keep 1"], None) == {"keep 1": DONE}
        assert scorers.replaced >= 1


async def test_a_foreign_group_has_little_memory_and_this_nodes_own_work_keeps_its_own() -> None:
    async with pool() as scorers:
        assert await tried(scorers, ["allocate 800"], "Ustranger") == {"allocate 800": REFUSED}
        assert await tried(scorers, ["allocate 800"], None) == {"allocate 800": DONE}
