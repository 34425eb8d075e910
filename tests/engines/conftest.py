"""Engines to try, each started once: every kind, over a model with tied and one with untied
embeddings.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen2ForCausalLM

from services.generator.engines import Engine, create_engine
from tests.engines.tiny_models import random_policy, write_model_folder, write_policy_file
from tests.forked import SERVER, Forked

CONTEXT_LENGTH = 256
BASE_SEED = 0

needs_vllm = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
TRAINABLE = [
    "transformers-tied",
    "transformers-untied",
    pytest.param("vllm-tied", marks=needs_vllm),
    pytest.param("vllm-untied", marks=[*needs_vllm, pytest.mark.long]),
]
"""vLLM over untied embeddings is an engine of its own, which takes a quarter of a minute to start.
In `make test` it answers in `test_engine_turns.py` alone.
"""
ALL = [*TRAINABLE, pytest.param("openai-tied", marks=needs_vllm)]


@dataclass
class Subject:
    """An engine with the model that it was started with."""

    engine: Engine
    base: Qwen2ForCausalLM
    tied: bool
    base_file: Path
    folder: Path
    base_url: str | None

    def other_policy(self, seed: int) -> Qwen2ForCausalLM:
        return random_policy(seed, tied=self.tied)


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Run a coroutine on the one event loop that all engines live on."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of the base models, by whether their embeddings are tied."""
    return {
        tied: write_model_folder(tmp_path_factory.mktemp(f"model-tied-{tied}"), random_policy(BASE_SEED, tied=tied))
        for tied in (True, False)
    }


@pytest.fixture(scope="session")
def started(
    request: pytest.FixtureRequest, run: Run, model_folders: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    kind, embeddings = request.param.split("-")
    tied = embeddings == "tied"
    folder = model_folders[tied]
    base = random_policy(BASE_SEED, tied=tied)
    base_file = write_policy_file(tmp_path_factory.mktemp("base") / "policy.safetensors", base)
    with _server(folder, tmp_path_factory.mktemp("server")) if kind == "openai" else _no_server() as base_url:
        engine = create_engine(
            kind,
            str(folder),
            max_model_len=CONTEXT_LENGTH,
            threads=1,
            kv_cache_bytes=64 * 1024**2,
            base_url=base_url,
            device="cpu",
        )
        run(engine.start())
        yield Subject(engine, base, tied, base_file, folder, base_url)
        run(engine.close())
        run(engine.close())
    # vLLM kills a process that does not end within five seconds, without waiting for its end.
    deadline = time.monotonic() + 60.0
    while (left := vllm_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def vllm_processes() -> list[psutil.Process]:
    """Those that this process started and that have not ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name().startswith("VLLM") and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.fixture
def subject(started: Subject, run: Run) -> Subject:
    """The engine, answering with its base policy."""
    if started.engine.policy_version != 0:
        run(started.engine.load_policy(started.base_file, 0))
    return started


@contextmanager
def _no_server() -> Iterator[None]:
    yield None


@contextmanager
def _server(folder: Path, log_folder: Path) -> Iterator[str]:
    """A real vLLM server with the OpenAI interface, forked where torch is imported already."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    template = log_folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    arguments = [
        *("--chat-template", str(template)),
        *("--model", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT_LENGTH), "--kv-cache-memory-bytes", str(64 * 1024**2)),
        *("--logprobs-mode", "processed_logprobs", "--enforce-eager", "--no-enable-chunked-prefill"),
        *("--max-num-batched-tokens", "4096", "--distributed-executor-backend", "uni"),
    ]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **SERVER,
    }
    log = log_folder / "server.log"
    server = Forked("vllm.entrypoints.openai.api_server", arguments, environment=environment, cwd=log_folder, log=log)
    try:
        give_up_at = time.monotonic() + 180
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < give_up_at, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
