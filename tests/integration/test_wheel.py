"""The package as somebody installs it: what is in it, and that its commands work in a folder that
has nothing of the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.local_swarm import START_TIMEOUT_S, free_port_range
from tests.nats_server import find_binary, free_port
from tests.package import CODE, ROOT, pip, source_in, wheel_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_in(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package and nothing else; what it needs comes from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(folder), str(wheel))
    return folder


def run(installed: Path, folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(installed), **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )


def swarm(installed: Path, folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run(installed, folder, "-m", "swarm_cli", *arguments, **settings)


def test_an_experiment_without_the_repository_says_where_it_can_be_run(installed: Path, tmp_path: Path) -> None:
    ended = swarm(installed, tmp_path, "experiment", "run", "mine.toml")
    assert ended.returncode == 1 and "clone of the repository" in ended.stderr and "Traceback" not in ended.stderr


def test_the_wheel_has_the_code_and_the_files_that_it_reads_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == CODE
    beside_code = {file.relative_to(ROOT).as_posix() for name in CODE for file in (ROOT / name).rglob("*") if file.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == {name for name in beside_code if "__pycache__" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names) and "License-Expression: Apache-2.0" in metadata
    assert wheel.stat().st_size < 2_000_000


def test_the_source_archive_has_no_records_of_experiments(source: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, timeout=300, check=True)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "swarm_cli/local/defaults/demo.toml"} <= names
    assert not [name for name in names if name.startswith("experiments/")]
    assert built.stat().st_size < 2_000_000


def test_the_demos_configuration_is_shown_and_checked_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import swarm_cli; print(swarm_cli.__file__)").stdout
    assert where.startswith(str(installed))
    shown = swarm(installed, tmp_path, "config", "show")
    assert shown.stdout.startswith(f"# {installed}/swarm_cli/local/defaults/demo.toml over the defaults\n"), shown.stderr
    checked = swarm(installed, tmp_path, "config", "check")
    assert checked.returncode == 0 and "OK: 4 task sources" in checked.stdout, checked.stderr
    assert "models/base does not exist yet: `swarm up` builds it" in checked.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_servers_configuration_comes_with_the_package(installed: Path, tmp_path: Path) -> None:
    printed = swarm(installed, tmp_path, "up", "--print-procfile").stdout
    (file,) = re.findall(r"nats-server --config (\S+) ", printed)
    assert Path(file).is_relative_to(installed)
    subprocess.run([find_binary(), "-t", "-c", file], capture_output=True, timeout=180, check=True)


def test_what_needs_a_run_or_results_says_so_in_a_sentence(installed: Path, tmp_path: Path) -> None:
    for arguments in (["plot", "monday"], ["experiment", "report", "results"], ["model", "export", "monday", "alpha", "out"]):
        refused = swarm(installed, tmp_path, *arguments)
        assert refused.returncode == 1 and refused.stderr.startswith("swarm: ") and "Traceback" not in refused.stderr


def test_swarm_up_runs_from_any_folder_with_ports_and_files_where_the_configuration_says(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    shutil.copytree(ROOT / "models" / "base", folder / "models" / "base")
    base_port = free_port_range()
    demo = (installed / "swarm_cli" / "local" / "defaults" / "demo.toml").read_text()
    (folder / "node.toml").write_text(f'node.var_dir = "else where"\nhttp.base_port = {base_port}\n{demo}')
    done = swarm(
        *(installed, folder, "up", "--config", "node.toml", "--nodes", "1", "--steps", "1"),
        *("--run", "first", "--nats-port", str(free_port())),
        SWARM_EVAL__TASKS="8",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "swarm plot first --var-dir 'else where'" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["else where", "models", "node.toml"]
    written = {path.name for path in (folder / "else where" / "runs" / "first").iterdir()}
    assert {"alpha", "nats.log", "jetstream"} <= written
    log = (folder / "else where" / "runs" / "first" / "alpha" / "generator.log").read_text()
    assert re.search(rf"http_port\W+{base_port}\b", log)


def another_project(installed: Path, folder: Path) -> Path:
    """A copy of the installed package, in which another project has installed its own `shared`."""
    copied = shutil.copytree(installed, folder / "environment")
    (copied / "shared" / "text.py").write_text("VISIBLE = True\n")
    (copied / "unlucky-1.0.dist-info").mkdir()
    (copied / "unlucky-1.0.dist-info" / "RECORD").write_text("shared/__init__.py,,\nshared/text.py,,15\n")
    return copied


@pytest.mark.parametrize("module", ["swarm_cli", "services.generator", "services.verifier", "services.sampler", "services.trainer"])
def test_a_package_that_another_project_has_replaced_is_told_at_the_start_with_the_remedy(
    module: str, installed: Path, tmp_path: Path
) -> None:
    assert run(installed, tmp_path, "-m", "swarm_cli", "--version").returncode == 0
    replaced = another_project(installed, tmp_path)
    refused = run(replaced, tmp_path, "-m", module, *(["--version"] if module == "swarm_cli" else []))
    assert refused.returncode == 78 and "Traceback" not in refused.stderr, refused.stderr
    assert "shared/text.py" in refused.stderr and "unlucky-1.0" in refused.stderr and "-m venv" in refused.stderr
    (replaced / "shared" / "text.py").unlink()  # as `pip uninstall unlucky` does
    shutil.rmtree(replaced / "unlucky-1.0.dist-info")
    refused = run(replaced, tmp_path, "-m", module)
    assert refused.returncode == 78 and "shared/text.py of Swarm is missing" in refused.stderr, refused.stderr


def test_a_package_of_that_name_that_python_finds_first_is_told(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(tmp_path)!r}); import services.installed"
    refused = run(tmp_path, tmp_path, "-c", code)
    assert refused.returncode == 78 and str(tmp_path / "shared" / "__init__.py") in refused.stderr, refused.stderr
