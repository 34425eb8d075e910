"""Which key a verifier signs with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.verifier.service import VerifierService
from shared.config import NodeConfig, load_config
from shared.identity.keys import KeyFileError, create, load, new_seed
from shared.runtime import FatalError


def config(folder: Path, **verifier: str) -> NodeConfig:
    tasks = [{"dataset": "gcd"}]
    return load_config(overrides={"node": {"var_dir": folder / "var"}, "verifier": verifier, "tasks": tasks, "eval": {"tasks": 4}})


def test_a_verifier_signs_with_the_key_it_is_given_and_makes_none_of_its_own(tmp_path: Path) -> None:
    given = create(tmp_path / "signing.nk")
    chosen = config(tmp_path, signing_key_file=str(tmp_path / "signing.nk"))
    assert VerifierService(chosen)._key.public_key == given.public_key
    assert not (chosen.node.run_dir / "node.nk").exists()


def test_a_verifier_without_a_given_key_makes_one_in_its_folder_and_keeps_it(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    first, second = VerifierService(chosen)._key, VerifierService(chosen)._key
    assert first.public_key == second.public_key == load(chosen.node.run_dir / "node.nk").public_key


def test_a_given_key_that_is_missing_is_not_made_but_said(tmp_path: Path) -> None:
    with pytest.raises(FatalError, match="does not exist"):
        VerifierService(config(tmp_path, signing_key_file=str(tmp_path / "missing.nk")))
    assert not (tmp_path / "missing.nk").exists()


def test_a_key_file_of_another_owner_may_be_readable_for_the_group_as_a_mounted_secret_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user is made up: only root could give the file away."""
    path = tmp_path / "signing.nk"
    made = create(path)
    path.chmod(0o440)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert load(path).public_key == made.public_key


def test_a_key_with_a_changed_character_is_damaged_and_not_another_key(tmp_path: Path) -> None:
    file = tmp_path / "signing.nk"
    seed = bytearray(new_seed())
    seed[20] = ord("B") if seed[20] == ord("A") else ord("A")
    file.touch(mode=0o600)
    file.write_bytes(seed)
    with pytest.raises(KeyFileError, match="is damaged, as its checksum shows"):
        load(file)


def test_a_key_that_is_gone_is_not_replaced_once_the_node_has_trained(tmp_path: Path) -> None:
    """Others know its name by the lost key, and would refuse everything that a new one signs."""
    chosen = config(tmp_path)
    before = VerifierService(chosen)._key
    (chosen.node.run_dir / "checkpoints" / "step-00000012").mkdir(parents=True)
    assert VerifierService(chosen)._key.public_key == before.public_key
    kept = (chosen.node.run_dir / "node.nk").read_bytes()
    (chosen.node.run_dir / "node.nk").unlink()
    with pytest.raises(FatalError, match=r"node\.nk is gone.*12 steps.*restore"):
        VerifierService(chosen)
    assert not (chosen.node.run_dir / "node.nk").exists()
    (chosen.node.run_dir / "node.nk").write_bytes(kept)
    (chosen.node.run_dir / "node.nk").chmod(0o600)
    assert VerifierService(chosen)._key.public_key == before.public_key
