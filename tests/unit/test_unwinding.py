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

from tests.gguf_files import write_gguf

pytestmark = pytest.mark.slow  # starts the program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_import_that_is_stopped_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "swarm_cli", "model", "import", str(file), str(tmp_path / "out")]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out-*")) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + number, said
    assert "Traceback" not in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tiny.gguf"]
