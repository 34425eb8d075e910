"""What a person sees when something is wrong: cause and remedy, a fitting exit code, in time, and
no traceback.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared.runtime import EXIT_CONFIG
from tests.forked import Forked

REPO = Path(__file__).resolve().parents[2]
TASKS = '[[tasks]]\ndataset = "gcd"\nconfig = { max_value = 20 }\n'
NOBODY = "nats://127.0.0.1:1"


def _run(role: str, config: Path, *, timeout_s: float = 60.0, **environment: str) -> tuple[int, str]:
    """The exit code of a service that is not to start, and what it said."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    settings = {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_NODE__VAR_DIR": str(config.parent / "var"),
        "SWARM_NATS__CONNECT_TIMEOUT_S": "1",
        "SWARM_LOG__FORMAT": "console",
    }
    said = config.parent / "said"
    whole = {**clean, **settings, **environment}
    service = Forked(f"services.{role}", ["--config", str(config)], environment=whole, cwd=REPO, log=said)
    try:
        return service.wait(timeout_s), said.read_text()
    finally:
        service.kill()


def _refused(done: tuple[int, str], *words: str) -> None:
    code, said = done
    assert code == EXIT_CONFIG, said
    assert "Traceback" not in said, said
    for word in words:
        assert word in said, f"{word!r} is not in what was said:\n{said}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(TASKS)
    return file


@pytest.mark.parametrize("role", ["generator", "verifier", "sampler", "trainer"])
def test_no_server_is_said_within_the_deadline_by_every_service(role: str, config: Path) -> None:
    done = _run(role, config, SWARM_NATS__NODE_URL=NOBODY, SWARM_NATS__SWARM_URL=NOBODY)
    _refused(done, NOBODY, "nats.node_url")


@pytest.mark.parametrize(("role", "key"), [("sampler", "sampler.locl"), ("trainer", "trainer.learning_rat")])
def test_an_unknown_key_is_named_with_its_file(role: str, key: str, config: Path) -> None:
    section, _, name = key.partition(".")
    config.write_text(TASKS + f"[{section}]\n{name} = 1\n")
    _refused(_run(role, config), key, "unknown key", str(config))


def test_sharing_without_a_swarm_plane_is_impossible(config: Path) -> None:
    _refused(_run("sampler", config, SWARM_NATS__SWARM_URL="none"), "sampler.external is 6", "set sampler.external = 0")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_named_with_the_setting_that_moves_it(config: Path, taken_port: int, nats_url: str) -> None:
    done = _run("sampler", config, SWARM_HTTP__PORT=str(taken_port), SWARM_NATS__NODE_URL=nats_url)
    _refused(done, str(taken_port), "http.base_port")


@pytest.mark.parametrize("role", ["generator", "trainer"])
def test_a_missing_model_is_named_with_how_to_get_one(role: str, config: Path, nats_url: str) -> None:
    done = _run(role, config, SWARM_NODE__ID=f"missing-{role}", SWARM_NATS__NODE_URL=nats_url, SWARM_MODEL__PATH="models/none")
    _refused(done, "models/none", "swarm model import")


@pytest.mark.parametrize("role", ["generator", "trainer"])
def test_a_device_that_is_not_there_is_named(role: str, config: Path, nats_url: str) -> None:
    done = _run(role, config, SWARM_NODE__ID=f"device-{role}", SWARM_NATS__NODE_URL=nats_url, SWARM_MODEL__DEVICE="cuda:7")
    _refused(done, "cuda:7", "model.device")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ('dataset = "chain_sums"', ["chain_sums", "chain_sum"]),
        ('dataset = "gcd"\nconfig = { max_valu = 20 }', ["gcd", "max_valu"]),
        ('dataset = "gcd"\nconfig = { min_value = 30, max_value = 20 }', ["gcd", "max_value"]),
    ],
)
def test_a_dataset_that_does_not_work_is_refused_at_the_start(tasks: str, words: list[str], config: Path, nats_url: str) -> None:
    config.write_text(f"[[tasks]]\n{tasks}\n")
    _refused(_run("generator", config, SWARM_NODE__ID="wrong-tasks", SWARM_NATS__NODE_URL=nats_url), *words)


def test_an_answer_longer_than_the_model_is_refused(config: Path, nats_url: str) -> None:
    done = _run(
        "generator",
        config,
        SWARM_NODE__ID="too-long",
        SWARM_NATS__NODE_URL=nats_url,
        SWARM_GENERATOR__MAX_NEW_TOKENS="100000",
        SWARM_MODEL__PATH="models/base",
    )
    _refused(done, "generator.max_new_tokens")
