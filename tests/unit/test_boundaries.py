"""The import contracts see all there is: a folder that is no package, or a part that is not named,
would escape them.

And what must be done in one place is done in no other.
"""

from __future__ import annotations

import configparser
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


def test_tasks_are_cancelled_by_the_one_helper_that_sees_them_end() -> None:
    """vLLM's own task is no task of ours: nothing waits for it, and its process ends next. That of
    `k8s check` is a timer's thread.
    """
    allowed = {"shared/cancelling.py": 2, "services/generator/engines/vllm_process.py": 1, "swarm_cli/k8s/check/kubectl.py": 1}
    allowed["swarm_cli/model/facts.py"] = 1  # a timer
    files = (file for root in (*PRODUCT, "benchmarks") for file in (REPO / root).rglob("*.py"))
    counts = {str(file.relative_to(REPO)): file.read_text().count(".cancel()") for file in files}
    assert {file: count for file, count in counts.items() if count} == allowed, "use shared.cancelling.cancel_and_wait"
