"""The container beside a NATS server, with its rendered command: a Secret that is written anew is
read without anybody's doing."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from shared.transport.base import AccessDenied, NotConnected
from shared.transport.connect import connect
from swarm_cli.replace_file import replace_file
from tests.k8s.manifests import find, pod_of, render
from tests.k8s.test_nats_config import configuration, keys, secrets
from tests.nats_server import find_binary, free_port
from tests.secured_server import swarm

__all__ = ["keys"]
DEADLINE_S = 180.0


@pytest.mark.slow
async def test_a_node_whose_accounts_are_added_to_the_secret_is_let_in_by_a_running_server(tmp_path: Path, keys: Path) -> None:
    objects = render("cluster-one-server")
    file, told = configuration(objects, tmp_path)
    secrets(tmp_path, keys)
    accounts = tmp_path / "etc/nats-accounts/accounts.conf"
    whole = accounts.read_text()
    which = ("--plane", "both", "--nodes", "alpha,beta", "--node-connections", "18", "--folder", str(keys))
    accounts.write_text(swarm("nats", "config", "--accounts-only", *which))
    port = free_port()
    text = file.read_text().replace("0.0.0.0", "127.0.0.1")
    file.write_text(text.replace("port: 4222", f"port: {port}").replace(":8222", f":{free_port()}"))
    (container,) = [each for each in pod_of(find(objects, "StatefulSet", "nats"))["containers"] if each["name"] == "reload"]
    shell, flag, script = container["command"]
    script = re.sub(r"/(?=(etc|run)/nats)", f"{tmp_path}/", script)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (tmp_path / "server.log").open("wb") as log:
            server = subprocess.Popen([find_binary(), "--config", str(file)], env=os.environ | told, stdout=log, stderr=log)  # noqa: ASYNC220
        processes.append(server)
        with (tmp_path / "reload.log").open("wb") as log:
            beside = subprocess.Popen([shell, flag, script], stdout=log, stderr=log)  # noqa: ASYNC220
        processes.append(beside)
        # The server may have read older files, so it is signalled at the start.
        await until_said(tmp_path / "server.log", "Reloaded server configuration", times=2)
        with pytest.raises((AccessDenied, NotConnected)):
            await as_operator_of_gamma(port, keys)
        replace_file(accounts, whole)
        await until_said(tmp_path / "server.log", "Reloaded server configuration", times=4)
        await as_operator_of_gamma(port, keys)
        assert said(tmp_path / "reload.log").count("nats_reloaded") == 4 and beside.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def said(log: Path) -> str:
    return log.read_text(errors="replace")


async def until_said(log: Path, words: str, times: int = 1) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while said(log).count(words) < times:
        assert time.monotonic() < deadline, f"{words!r} is not in {log.name}:\n{said(log)[-3000:]}"
        await asyncio.sleep(0.1)


async def as_operator_of_gamma(port: int, keys: Path) -> None:
    transport = await connect(
        f"tls://127.0.0.1:{port}",
        name="gamma-operator",
        timeout_s=10.0,
        key_file=str(keys / "gamma/operator.nk"),
        ca_file=str(keys / "ca.crt"),
        inbox_prefix="_INBOX_gamma.operator",
    )
    await transport.close()
