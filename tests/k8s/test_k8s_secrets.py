"""`swarm k8s secrets` prints exactly what the rendered pods mount and the repository does not have,
and never another key in place of one.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shared.identity.keys import load
from shared.identity.roster import parse_roster
from swarm_cli.app import app
from swarm_cli.k8s import certificates
from tests.k8s.manifests import REPOSITORY, Object, containers, name_of, pod_of, render, with_kind, workloads

NODES = ("alpha", "beta", "gamma")
SECURED = ["cluster", "cluster-watched"]
"""With `nats-watch` off and on; `test_semantics_config.py` holds all variants to the same list."""

Made = dict[tuple[str, str], dict[str, str]]


def swarm(*arguments: str, nodes: tuple[str, ...] = NODES) -> str:
    result = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", ",".join(nodes), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", ",".join(NODES), *arguments])
    assert result.exit_code != 0
    return " ".join(str(result.exception).split())


def objects(text: str) -> Made:
    return {(each["kind"], each["metadata"]["name"]): each["data"] for each in yaml.safe_load_all(text)}


def mounted(variant: str) -> dict[tuple[str, str], set[str]]:
    """Secrets and ConfigMaps that pods cannot start without and the overlay does not make, with the
    entries that they pick; none picked: whatever is in it.
    """
    rendered = render(variant)
    here = {("ConfigMap", name_of(each)) for each in with_kind(rendered, "ConfigMap")}
    found: dict[tuple[str, str], set[str]] = {}
    for workload in workloads(rendered):
        for kind, name, entries in _named(workload):
            if (kind, name) not in here:
                found.setdefault((kind, name), set()).update(entries)
    return found


def _named(workload: Object) -> list[tuple[str, str, set[str]]]:
    found = []
    for volume in pod_of(workload)["volumes"]:
        for source in [volume, *volume.get("projected", {}).get("sources", [])]:
            for field, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
                said: Any = source.get(field, {"optional": True})
                if not said.get("optional"):
                    entries = {item["key"] for item in said.get("items", [])}
                    found.append((kind, said.get("secretName") or said["name"], entries))
    for container in containers(workload):
        for source in container.get("envFrom", []):
            found += [(field[0].upper() + field[1:-3], said["name"], set()) for field, said in source.items()]
        for entry in container.get("env", []):
            for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                said = entry.get("valueFrom", {}).get(field, {"optional": True})
                if not said.get("optional"):
                    found.append((kind, said["name"], {said["key"]}))
    return found


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("state") / "keys"
    return folder, swarm("--keys", str(folder))


@pytest.mark.parametrize("variant", SECURED)
def test_every_secret_that_a_pod_mounts_is_printed_with_the_entries_that_it_picks(variant: str, printed: tuple[Path, str]) -> None:
    made = objects(printed[1])
    for name, entries in mounted(variant).items():
        assert name in made and entries <= made[name].keys(), f"{name}: {sorted(entries)}"


def test_nothing_is_printed_that_no_pod_mounts(printed: tuple[Path, str]) -> None:
    """The key of the watch is, for the variants that have it."""
    wanted: dict[tuple[str, str], set[str]] = {}
    for variant in SECURED:
        for name, entries in mounted(variant).items():
            wanted.setdefault(name, set()).update(entries)
    made = objects(printed[1])
    assert made.keys() == wanted.keys()
    for name, entries in wanted.items():
        assert not entries or entries == made[name].keys(), name


def test_a_second_run_prints_the_same_and_a_new_node_adds_its_own_alone(printed: tuple[Path, str], tmp_path: Path) -> None:
    folder, first = printed
    assert swarm("--keys", str(folder)) == first
    before, after = objects(first), objects(swarm("--keys", str(folder), nodes=(*NODES, "delta")))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {("Secret", "nats-accounts"), ("ConfigMap", "swarm-roster")}
    assert {name for _, name in after.keys() - before.keys()} == {
        f"delta-{role}" for role in ("generator", "verifier", "sampler", "trainer", "operator", "signing")
    }
    assert (folder / "alpha" / "trainer.nk").stat().st_mode & 0o077 == 0 == (folder / "ca.key").stat().st_mode & 0o077


def read_back() -> str:
    """The commands of the page that make the folder of keys from what the cluster has."""
    page = (REPOSITORY / "docs" / "kubernetes-start.md").read_text()
    block = page.partition("- If the folder is lost,")[2].partition("\n- ")[0].partition("\n\n")[2]
    return "".join(line.removeprefix("      ") + "\n" for line in block.splitlines())


def test_a_folder_that_was_lost_is_read_back_by_the_documented_commands_and_the_same_is_printed(
    printed: tuple[Path, str], tmp_path: Path
) -> None:
    """`kubectl` is a program here that prints the entry of the object; the control plane's test
    uses the real one.
    """
    cluster = tmp_path / "bin" / "kubectl"
    cluster.parent.mkdir()
    for (kind, name), data in objects(printed[1]).items():
        (tmp_path / kind.lower() / name).mkdir(parents=True)
        for entry, text in data.items():
            (tmp_path / kind.lower() / name / entry).write_text(text)
    cluster.write_text('#!/bin/bash\nentry=${7#*.data.}; entry=${entry%\\}}; cat "$FOLDER/$4/$5/${entry/\\\\/}"\n')
    cluster.chmod(0o755)
    environment = os.environ | {"PATH": f"{cluster.parent}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    subprocess.run(["bash", "-euc", read_back()], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert swarm("--keys", str(tmp_path / "keys")) == printed[1]


def test_the_roster_names_each_nodes_signing_key_and_keeps_the_lines_of_others(tmp_path: Path) -> None:
    swarm("--keys", str(tmp_path))
    stranger = load(tmp_path / "alpha" / "swarm.nk").public_key
    (tmp_path / "roster.txt").write_text(f"omega {stranger} another site\n")
    text = objects(swarm("--keys", str(tmp_path)))["ConfigMap", "swarm-roster"]["roster.txt"]
    entries = parse_roster(text)
    assert {*NODES, "omega"} == entries.keys() and entries["omega"].note == "another site"
    assert all(entries[node].public_key == load(tmp_path / node / "signing.nk").public_key for node in NODES)


def test_without_certificates_where_cert_manager_makes_them(tmp_path: Path) -> None:
    made = objects(swarm("--keys", str(tmp_path), "--cert-manager"))
    assert not {("Secret", "nats-server-tls"), ("ConfigMap", "nats-ca")} & made.keys()
    assert not list(tmp_path.glob("*.crt")) and ("Secret", "nats-accounts") in made


def test_a_certificate_that_ends_soon_or_lacks_a_name_is_made_anew_with_the_same_key_and_authority(tmp_path: Path) -> None:
    first = objects(swarm("--keys", str(tmp_path)))["Secret", "nats-server-tls"]
    named = objects(swarm("--keys", str(tmp_path), "--server-name", "hub.example.org"))["Secret", "nats-server-tls"]
    assert first["tls.crt"] != named["tls.crt"] and first["tls.key"] == named["tls.key"] and first["ca.crt"] == named["ca.crt"]
    said = certificates.read(base64.b64decode(named["tls.crt"]).decode())
    assert {"hub.example.org", "nats", "nats-2.nats-headless", "127.0.0.1"} <= said.names
    long_ago = datetime.now(UTC) - certificates.SERVER_LASTS + timedelta(days=20)
    pieces = [(tmp_path / name).read_text() for name in ("tls.key", "ca.crt", "ca.key")]
    (tmp_path / "tls.crt").write_text(certificates.server(pieces[0], sorted(said.names), pieces[1], pieces[2], long_ago))
    renewed = objects(swarm("--keys", str(tmp_path)))["Secret", "nats-server-tls"]
    left = certificates.read(base64.b64decode(renewed["tls.crt"]).decode()).not_after - datetime.now(UTC)
    assert left > timedelta(days=360) and renewed["tls.key"] == first["tls.key"]
    assert "hub.example.org" in certificates.read(base64.b64decode(renewed["tls.crt"]).decode()).names


def test_a_new_key_for_the_certificate_keeps_its_names_and_says_which_were_not_asked_for(tmp_path: Path) -> None:
    first = objects(swarm("--keys", str(tmp_path), "--server-name", "hub.example.org"))["Secret", "nats-server-tls"]
    (tmp_path / "tls.key").unlink()
    result = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", ",".join(NODES), "--keys", str(tmp_path)])
    second = objects(result.stdout)["Secret", "nats-server-tls"]
    key, certificate = (base64.b64decode(second[name]).decode() for name in ("tls.key", "tls.crt"))
    assert second["tls.key"] != first["tls.key"] and certificates.belongs(key, certificate)
    assert "hub.example.org" in certificates.read(certificate).names
    assert "renewed with a new key" in result.stderr and "keeps the names hub.example.org" in result.stderr


def test_a_certificate_that_was_moved_away_is_made_anew_for_the_names_of_the_command_alone(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", "alpha", "--keys", str(tmp_path), *arguments])
        assert done.exit_code == 0, done.output
        return done.stderr

    run("--namespace", "swrm", "--server-name", "hub.example.org")
    key, authority = ((tmp_path / name).read_text() for name in ("tls.key", "ca.crt"))
    said = run()
    assert "lacks the name nats.swarm.svc: renewed with the same key" in said and "keeps the names" in said
    (tmp_path / "tls.crt").unlink()
    run("--server-name", "hub.example.org")
    names = certificates.read((tmp_path / "tls.crt").read_text()).names
    assert {"nats", "nats.swarm.svc", "hub.example.org"} <= names and "nats.swrm.svc" not in names
    assert key == (tmp_path / "tls.key").read_text() and authority == (tmp_path / "ca.crt").read_text()
    after = (tmp_path / "tls.crt").read_text()
    assert not run() and (tmp_path / "tls.crt").read_text() == after


def test_a_certificate_that_lacks_a_name_and_cannot_be_signed_again_stays_and_both_remedies_are_told(tmp_path: Path) -> None:
    command = ["k8s", "secrets", "--nodes", "alpha", "--keys", str(tmp_path)]
    CliRunner().invoke(app, [*command, "--namespace", "swrm"], catch_exceptions=False)
    certificate = (tmp_path / "tls.crt").read_text()
    (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    said = CliRunner().invoke(app, command, catch_exceptions=False).stderr
    assert "lacks the name nats.swarm.svc" in said and "put ca.key into" in said and "replace tls.crt and tls.key" in said
    assert (tmp_path / "tls.crt").read_text() == certificate


def test_a_certificate_of_your_own_stays_and_what_is_missing_is_named(tmp_path: Path) -> None:
    first = objects(swarm("--keys", str(tmp_path)))["Secret", "nats-server-tls"]
    (tmp_path / "ca.key").unlink()
    assert objects(swarm("--keys", str(tmp_path)))["Secret", "nats-server-tls"] == first
    (tmp_path / "tls.key").unlink()
    assert "ca.key is missing to sign a certificate" in refused("--keys", str(tmp_path))
    (tmp_path / "tls.key").write_text("no key")
    assert "holds no PEM private key" in refused("--keys", str(tmp_path))


def test_a_node_that_is_left_out_is_said(tmp_path: Path) -> None:
    swarm("--keys", str(tmp_path))
    result = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", "alpha,gamma", "--keys", str(tmp_path)])
    assert "the servers will refuse them after the next reload: beta" in result.stderr and result.exit_code == 0


def test_a_node_outside_has_an_account_and_no_secrets_and_the_next_run_remembers_it(tmp_path: Path) -> None:
    before = objects(swarm("--keys", str(tmp_path)))
    outside = load(tmp_path / "alpha" / "signing.nk").public_key
    text = swarm("--keys", str(tmp_path), "--domain", "hub", nodes=(*NODES, f"outside={outside}"))
    made = objects(text)
    accounts = base64.b64decode(made["Secret", "nats-accounts"]["accounts.conf"]).decode()
    assert made.keys() == before.keys() and outside in accounts and "$JS.hub.API" in accounts
    assert swarm("--keys", str(tmp_path)) == text, "the next run drops neither node nor domain"
    both = CliRunner().invoke(app, ["k8s", "secrets", "--nodes", "alpha,outside", "--keys", str(tmp_path)])
    assert "lists outside as a node outside" in str(both.exception) and not (tmp_path / "outside").exists()
    (tmp_path / "guests.txt").write_text("outside\n")
    assert "outside has no public key: write `outside U...`" in refused("--keys", str(tmp_path))


def test_every_new_key_is_named(tmp_path: Path) -> None:
    swarm("--keys", str(tmp_path))
    result = CliRunner().invoke(app, ["k8s", "secrets", "--keys", str(tmp_path), "--nodes", ",".join((*NODES, "delta"))])
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("new keys: ")]
    roles = ("generator", "verifier", "sampler", "trainer", "operator", "swarm", "signing")
    assert sorted(line.removeprefix("new keys: ").split(", ")) == sorted(f"delta/{role}.nk" for role in roles)


def test_a_pipe_or_a_device_that_is_named_as_the_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    """As root, renaming a file to /dev/null would take the device from every other program."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    try:
        swarm("--keys", str(tmp_path / "keys"), "--out", str(pipe))
        assert pipe.is_fifo()
        read, _ = reader.communicate(timeout=60)
        assert objects(read) == objects(swarm("--keys", str(tmp_path / "keys")))
    finally:
        reader.kill()


@pytest.mark.slow
def test_it_runs_on_what_the_image_has_without_torch_and_its_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    lock = (REPOSITORY / "requirements" / "image-cpu.lock").read_text()
    heavy = {"torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers"}
    here = set(re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)) - heavy | {"swarm-rl"}
    program = f"""
import sys
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name
here = {{canonicalize_name(name) for name in {sorted(here)!r}}}
absent = {{top for top, owners in packages_distributions().items() if not here & {{canonicalize_name(owner) for owner in owners}}}}
class OnlyTheImage:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in absent:
            raise ModuleNotFoundError(f"{{name}} is not there")
sys.meta_path.insert(0, OnlyTheImage())
sys.argv = ["swarm", "k8s", "secrets", "--nodes", "alpha", "--out", "secrets.yaml"]
import swarm_cli.app
swarm_cli.app.main()
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "secrets.yaml").stat().st_mode & 0o777 == 0o600 and objects((tmp_path / "secrets.yaml").read_text())
