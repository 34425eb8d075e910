"""A command that writes a folder and is stopped takes away what it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra `gguf`")

from tests.forked import Forked
from tests.gguf_files import write_gguf

pytestmark = pytest.mark.slow  # starts the program

ROOT = Path(__file__).parents[2]

STOPPED_IN_VAIN = """
import os, signal, sys, time
from pathlib import Path
from shared.atomic_folder import atomic_folder
from shared.atomic_folder import unwinding_on_signals

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(1)  # the signal's exception is raised here, where Python drops it

with unwinding_on_signals(), atomic_folder(Path(sys.argv[1])) as staging:
    (staging / "begun").touch()
    swallows = Swallows()
    del swallows
    print("went on", flush=True)
    if "again" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
        print("still there", flush=True)
    try:
        pass
    finally:
        print("to the end", flush=True)
"""
TWICE_WHILE_TAKING_BACK = """
import os, signal, sys
from shared.atomic_folder import unwinding_on_signals

with unwinding_on_signals():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    finally:
        os.kill(os.getpid(), int(sys.argv[1]))
        os.kill(os.getpid(), signal.SIGTERM)
        print("taken back", flush=True)
"""

WHILE_ANOTHER_IS_HANDLED = """
import os, signal, sys, time
from shared.atomic_folder import unwinding_on_signals

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(1)

def handles(number):
    try:
        os.stat("/nowhere")
    except OSError:
        os.kill(os.getpid(), number)

with unwinding_on_signals():
    if sys.argv[2] == "in vain":
        swallows = Swallows()
        del swallows
        handles(signal.SIGTERM)
        print("still there", flush=True)
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    finally:
        handles(signal.SIGTERM)
        print("taken back", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_import_that_is_stopped_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    file, log = write_gguf(folder / "tiny.gguf"), tmp_path / "log"
    arguments = ["model", "import", str(file), str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    running = Forked("swarm_cli", arguments, environment=environment, cwd=ROOT, log=log)
    deadline = time.monotonic() + 120
    while not list(folder.glob(".out-*")) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(number)
    assert running.wait(180) == 128 + number, log.read_text()
    assert "Traceback" not in log.read_text()
    assert sorted(entry.name for entry in folder.iterdir()) == ["tiny.gguf"]


@pytest.mark.parametrize("again", [(), ("again",)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_python_drops_stops_the_work_all_the_same(
    tmp_path: Path, number: signal.Signals, again: tuple[str, ...]
) -> None:
    done = _python(STOPPED_IN_VAIN, str(tmp_path / "out"), str(int(number)), *again)

    assert "went on" in done.stdout, "the exception was dropped"
    assert ("to the end" in done.stdout) == (not again) and "still there" not in done.stdout
    assert done.returncode == (143 if again or number == signal.SIGTERM else -signal.SIGINT), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_interrupt_what_takes_the_work_back(number: signal.Signals) -> None:
    done = _python(TWICE_WHILE_TAKING_BACK, str(int(number)))

    assert done.stdout == "taken back\n"
    assert done.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_while_another_exception_is_handled_does_as_it_does_elsewhere(number: signal.Signals) -> None:
    taking_back = _python(WHILE_ANOTHER_IS_HANDLED, str(int(number)), "taken back")
    in_vain = _python(WHILE_ANOTHER_IS_HANDLED, str(int(number)), "in vain")

    assert taking_back.stdout == "taken back\n", taking_back.stderr
    assert taking_back.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert (in_vain.stdout, in_vain.returncode) == ("", 143), in_vain.stderr


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
