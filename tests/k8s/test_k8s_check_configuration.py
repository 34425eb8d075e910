"""`swarm k8s check` reads each node's configuration as its pods would, before they end with code
78: the file in the ConfigMap, and the variables that win over it.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarm_cli.k8s.check import configuration_findings as findings
from swarm_cli.k8s.overlay import Overlay
from swarm_cli.task_probe import TaskProbe
from tests.k8s.manifests import REPOSITORY, Object, find, name_of, pod_of, render, with_kind

FILE = "node.toml"
SHAPES = (
    *("single-box", "single-box-gpu", "single-box-policies-over-nats", "cluster", "cluster-without-tls", "joined", "joined-leaf"),
    *("cluster-policies-by-volume", "cluster-generator-gpus", "cluster-trainer-machines", "cluster-everything"),
)
"""Those in which a service is told something else; `test_semantics_config` loads all of them."""


def overlay_of(variant: str = "cluster") -> list[Object]:
    return copy.deepcopy(list(render(variant)))


Told = Callable[[list[Object]], list[str]]


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    """Return what is found in an overlay. One process derives the tasks of all of these tests, as
    it does those of all nodes of an overlay.
    """
    with TaskProbe() as apart:
        yield lambda objects: [str(each) for each in findings(Overlay(objects), apart)]


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def config_map(objects: list[Object], start: str) -> Object:
    return next(each for each in with_kind(objects, "ConfigMap") if name_of(each).startswith(start))


def replace(objects: list[Object], old: str, new: str, node: str = "alpha") -> None:
    data = config_map(objects, f"{node}-node")["data"]
    assert data[FILE].count(old) == 1, data[FILE]
    data[FILE] = data[FILE].replace(old, new)


@pytest.mark.parametrize("variant", SHAPES)
def test_nothing_stops_an_overlay_as_it_is(variant: str, told: Told) -> None:
    assert told(overlay_of(variant)) == []


def unknown_key(objects: list[Object]) -> str:
    replace(objects, "learning_rate = 1e-6", "learing_rate = 1e-6")
    return f"{FILE}: trainer.learing_rate: unknown key; did you mean trainer.learning_rate?"


def wrong_value(objects: list[Object]) -> str:
    replace(objects, "completions = 8", "completions = 1.5")
    return f"{FILE}: generator.completions: "


def unknown_task(objects: list[Object]) -> str:
    replace(objects, 'dataset = "gcd"', 'dataset = "gdc"')
    return f"{FILE}: [[tasks]] 3: "


def unknown_key_of_a_task(objects: list[Object]) -> str:
    replace(objects, 'dataset = "gcd"', 'dataset = "gcd"\nweigth = 2')
    return f"{FILE}: [[tasks]] 3: weigth: unknown key"


def wrong_config_of_a_task(objects: list[Object]) -> str:
    replace(objects, 'dataset = "gcd"', 'dataset = "gcd"\nconfig = { min_number = 3 }')
    return "[[tasks]] 3: "


def unknown_section(objects: list[Object]) -> str:
    replace(objects, "[eval]", "[evaluation]")
    return f"{FILE}: evaluation: unknown key"


def no_toml(objects: list[Object]) -> str:
    replace(objects, 'run = "run-1"', "run = run-1")
    return f"{FILE}: it is not valid TOML: "


def no_tasks(objects: list[Object]) -> str:
    data = config_map(objects, "alpha-node")["data"]
    data[FILE] = data[FILE].split("[[tasks]]")[0]
    return "at least one [[tasks]] entry is needed"


def settings_together(objects: list[Object]) -> str:
    replace(objects, "local = 8\nexternal = 8", "local = 0\nexternal = 0")
    return f"{FILE}: sampler.local + sampler.external is 0"


def objective(objects: list[Object]) -> str:
    replace(objects, "[trainer]", '[trainer]\nobjective = "rloo"\nobjective_options = { advantage_scale = "batch" }')
    return f"{FILE}: trainer.objective rloo centres each reward"


def no_entry(objects: list[Object]) -> str:
    config_map(objects, "alpha-node")["data"] = {"nodes.toml": ""}
    return f"there is no entry {FILE}, which SWARM_CONFIG names"


@pytest.mark.parametrize(
    "change",
    [
        *(unknown_key, wrong_value, unknown_task, unknown_key_of_a_task, unknown_section, no_toml, no_tasks, settings_together),
        *(objective, no_entry, wrong_config_of_a_task),
    ],
    ids=lambda change: change.__name__,
)
def test_what_would_end_a_nodes_pods_is_one_line_with_config_map_line_and_remedy(
    change: Callable[[list[Object]], str], told: Told
) -> None:
    objects = overlay_of()
    words = change(objects)
    said = only(told(objects))
    name = name_of(config_map(objects, "alpha-node"))
    assert said.startswith(f"stops  ConfigMap {name}, {FILE}") and words in said and "\n" not in said
    assert "alpha-generator, alpha-operator, alpha-sampler, alpha-trainer, alpha-verifier would end with code 78" in said
    assert said.endswith(": correct nodes/alpha/node.toml")


def test_every_mistake_of_every_node_is_told_and_of_the_others_nothing(told: Told) -> None:
    objects = overlay_of()
    replace(objects, "learning_rate = 1e-6", "learing_rate = 1e-6")
    replace(objects, 'dataset = "gcd"', 'dataset = "Gdc"')
    replace(objects, "[trainer]", "[trainer]\nwarm = 1", node="gamma")
    found = told(objects)
    assert [re.search(r"nodes/(\w+)", each).group(1) for each in found] == ["alpha", "alpha", "gamma"], found  # type: ignore[union-attr]


def test_a_nodes_name_that_is_not_its_folders_is_told_with_its_line(told: Told) -> None:
    objects = overlay_of()
    replace(objects, 'id = "alpha"', 'id = "alhpa"')
    said = only(told(objects))
    assert said.startswith("stops") and "node.id is alhpa" in said
    assert "those of node alpha" in said and "denied by the servers" in said
    objects = overlay_of("single-box")  # without keys it runs
    replace(objects, 'id = "alpha"', 'id = "alhpa"')
    assert told(objects) == []


def settings(objects: list[Object]) -> dict[str, str]:
    data: dict[str, str] = config_map(objects, "alpha-settings")["data"]
    return data


def test_variables_count_and_are_told_with_the_object_that_sets_them(told: Told) -> None:
    objects = overlay_of()
    settings(objects)["SWARM_TRAINER__LEARNING_RATE"] = "fast"
    said = only(told(objects))
    place = f"stops  ConfigMap {name_of(config_map(objects, 'alpha-settings'))}, SWARM_TRAINER__LEARNING_RATE: "
    assert said.startswith(place) and said.endswith(": correct the kustomization that sets it")
    objects = overlay_of()
    environment = pod_of(find(objects, "StatefulSet", "alpha-trainer"))["containers"][0]["env"]
    environment.append({"name": "SWARM_TRANER__LEARNING_RATE", "value": "1e-6"})
    said = only(told(objects))
    assert said.startswith("stops  StatefulSet alpha-trainer, SWARM_TRANER__LEARNING_RATE: no section 'traner'")
    assert "; alpha-trainer would end with code 78" in said


def test_a_variable_mends_what_the_file_has_wrong_as_it_does_in_the_pod(told: Told) -> None:
    objects = overlay_of()
    replace(objects, "learning_rate = 1e-6", 'learning_rate = "fast"')
    settings(objects)["SWARM_TRAINER__LEARNING_RATE"] = "1e-6"
    assert told(objects) == []


def test_a_port_or_an_address_at_which_no_probe_finds_the_service_is_told(told: Told) -> None:
    objects = overlay_of("single-box")
    settings(objects)["SWARM_HTTP__PORT"] = "9401"
    found = told(objects)
    assert len(found) == 4 and all("SWARM_HTTP__PORT: http.port makes the " in each for each in found)
    assert all("listen on 9401, but its startupProbe asks 9400" in each and "never becomes ready" in each for each in found)
    del settings(objects)["SWARM_HTTP__PORT"]
    replace(objects, "[eval]", '[http]\nport = 9400\nhost = "127.0.0.1"\n[eval]')
    del settings(objects)["SWARM_HTTP__HOST"]
    found = told(objects)
    assert len(found) == 4 and all(f"{FILE}: http.host is 127.0.0.1" in each for each in found), found


def test_a_file_that_only_the_pod_has_is_not_looked_at_and_the_other_sources_keep_their_number(told: Told) -> None:
    objects = overlay_of()
    data = config_map(objects, "alpha-node")["data"]
    data[FILE] = data[FILE].replace("[[tasks]]", '[[tasks]]\nsource = "file"\npath = "/data/mine.jsonl"\n\n[[tasks]]', 1)
    assert told(objects) == []
    replace(objects, 'dataset = "gcd"', 'dataset = "gdc"')
    assert "[[tasks]] 4: " in only(told(objects))


@pytest.mark.slow
def test_the_command_tells_it_without_a_cluster_and_without_torch_and_ends_with_1(tmp_path: Path) -> None:
    objects = overlay_of("single-box")
    replace(objects, 'dataset = "gcd"', 'dataset = "gdc"')
    (tmp_path / "rendered.yaml").write_text(yaml.safe_dump_all(objects))
    program = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers"}:
            raise ModuleNotFoundError(f"{name} is not there")
sys.meta_path.insert(0, NoTorch())
import swarm_cli.app
swarm_cli.app.main()
"""
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0"}
    environment["SWARM_NONSENSE"] = "of this machine, not of the pods"
    command = [sys.executable, "-c", program, "k8s", "check", "rendered.yaml", "--no-cluster"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    assert "[[tasks]] 2: " in done.stdout and "correct nodes/alpha/node.toml" in done.stdout
    assert "1 of 1 findings would stop it" in done.stderr and "Traceback" not in done.stderr
