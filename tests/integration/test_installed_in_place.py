"""A user's own verifier and task source, installed with `pip install -e` as their pages say, in the
confined processes that score; and a verifier in a folder of PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that has this one's packages too, and both examples in place."""
    folder = tmp_path_factory.mktemp("in-place")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    sources = [shutil.copytree(ROOT / "docs" / "examples" / name, folder / name) for name in ("verifier", "task_source")]
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *(each for source in sources for each in ("-e", source))], check=True, timeout=300)
    return folder / "venv" / "bin" / "python"


def swarm(python: Path, *arguments: str, cwd: Path | None = None, path: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {} if path is None else {"PYTHONPATH": path}
    command = [python, "-m", "swarm_cli", "task", *arguments]
    folder = cwd or python.parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_verifier_that_is_one_module_scores(python: Path) -> None:
    assert "right answers paid 3/3" in swarm(python, "audit", "gcd", "--verifier", "brief")


def test_a_task_source_that_is_one_module_makes_tasks(python: Path) -> None:
    assert "cents" in swarm(python, "show", "change_due")


@pytest.mark.parametrize(("folder", "path"), [("libs", f"libs:{ROOT}"), (".", f":{ROOT}")])
def test_a_verifier_of_a_relative_pythonpath_scores(tmp_path: Path, folder: str, path: str) -> None:
    """The process that scores starts in another folder than the one where it was set."""
    shutil.copytree(ROOT / "docs" / "examples" / "verifier", tmp_path / folder, dirs_exist_ok=True)
    described = tmp_path / folder / "mine-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[swarm.verifiers]\nbrief = swarm_example_verifier:brief\n")
    told = swarm(Path(sys.executable), "audit", "gcd", "--verifier", "brief", cwd=tmp_path, path=path)
    assert "right answers paid 3/3" in told
