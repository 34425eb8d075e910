"""The import contracts see all there is: a folder that is no package, or a part that is not named,
would escape them.

And what must be done in one place is done in no other.
"""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PRODUCT = ("services", "shared", "swarm_cli", "lab", "monitoring")


@pytest.mark.parametrize("root", [*PRODUCT, "benchmarks"])
def test_every_folder_with_code_is_a_package(root: str) -> None:
    folders = {file.parent for file in (REPO / root).rglob("*.py")}
    assert folders
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_all_of_shared_but_the_model_is_kept_free_of_torch() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(REPO / ".importlinter")
    kept = set(contracts["importlinter:contract:contracts-without-torch"]["source_modules"].split())
    parts = {
        f"shared.{each.stem}"
        for each in (REPO / "shared").iterdir()
        if each.stem != "__init__" and (each.suffix == ".py" or (each / "__init__.py").exists())
    }
    assert kept == parts - {"shared.model"} | {"services.verifier", "services.sampler"}


IMPORT_ALL = """
import importlib, pkgutil, sys
roots = [importlib.import_module(name) for name in ("services.sampler", "services.verifier", "shared")]
found = [module.name for root in roots for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
kept = [name for name in found if name.rpartition(".")[2] != "__main__" and not f"{name}.".startswith("shared.model.")]
for name in kept:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
print(len(kept))
"""


@pytest.mark.slow
def test_no_module_that_is_kept_free_of_torch_brings_it_in_when_it_is_imported() -> None:
    """The contract sees who imports a package called torch, not packages that import it in turn."""
    ran = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 100


def torch_parts(text: str) -> list[str]:
    """Modules called torch inside of other packages, such as `safetensors.torch`, that a file
    imports anywhere, in functions too.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names]
    return [name for name in found if "torch" in name.split(".")[1:]]


def test_no_part_of_another_package_that_is_made_for_torch_is_imported_later_either() -> None:
    for line in ("from safetensors.torch import load_file", "from safetensors import torch", "import safetensors.torch as st"):
        assert torch_parts(f"def read():\n    {line}")
    assert torch_parts("from shared.torchless import a\nimport numpy") == []
    files = [file for root in ("services/sampler", "services/verifier", "shared") for file in (REPO / root).rglob("*.py")]
    kept = [file for file in files if not file.is_relative_to(REPO / "shared/model")]
    assert len(kept) > 100
    assert {str(file): parts for file in kept if (parts := torch_parts(file.read_text()))} == {}


def cancels(text: str) -> int:
    """Return how often an attribute `cancel` is named: called with or without arguments, or handed
    on.
    """
    if "cancel" not in text:
        return 0
    return sum(isinstance(node, ast.Attribute) and node.attr == "cancel" for node in ast.walk(ast.parse(text)))


def test_tasks_are_cancelled_by_the_one_helper_that_sees_them_end() -> None:
    """vLLM's own task is no task of ours: nothing waits for it, and its process ends next."""
    assert cancels('task.cancel(msg="late")\nstop = task.cancel\nstop()\ncancel_and_wait(task)  # .cancel()') == 2
    allowed = {"shared/cancelling.py": 2, "services/generator/engines/vllm_engine.py": 1}
    allowed |= {"swarm_cli/model/facts.py": 1, "swarm_cli/console.py": 1}  # timers
    files = (file for root in (*PRODUCT, "benchmarks", "docs/examples") for file in (REPO / root).rglob("*.py"))
    counts = {str(file.relative_to(REPO)): cancels(file.read_text()) for file in files}
    assert {file: count for file, count in counts.items() if count} == allowed, "use shared.cancelling.cancel_and_wait"


@pytest.mark.parametrize(
    ("written", "home"),
    [
        (r'"float32", "bfloat16"', "shared/config/section.py"),
        (r'"[^"\n]*\bcode 78\b[^"\n]*"', ""),  # shared.runtime.exits.EXIT_CONFIG
        (r'\bin \("generator", "verifier"\) or', ""),  # shared.roles.SEVERAL
    ],
)
def test_what_has_a_home_is_written_nowhere_else(written: str, home: str) -> None:
    files = (file for root in PRODUCT for file in (REPO / root).rglob("*.py"))
    assert [str(file.relative_to(REPO)) for file in files if re.search(written, file.read_text())] == [home] * bool(home)
