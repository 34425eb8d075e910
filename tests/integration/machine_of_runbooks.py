"""A machine on which the runbooks' commands are typed: a run of `swarm up`, or a secured server of
somebody's own, with `swarm` and `nats-server` on the PATH, and a shell.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from shared.contracts.codec import encode
from shared.dead_letters import bury, read_letters
from shared.transport.connect import connect
from swarm_cli.k8s import certificates
from swarm_cli.observe.run_files import read_evaluations, read_steps
from tests.forked_commands import Commands
from tests.integration.local_swarm import START_TIMEOUT_S, free_port_range
from tests.integration.running_verifier import group
from tests.nats_server import find_binary, free_port
from tests.secured_server import SecuredServer

ROOT = Path(__file__).parents[2]
COMMAND_S = 240.0
RUN, NODE = "first", "alpha"


class Machine:
    """A folder in which commands are typed, and what stands for the pages' placeholders."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.home, programs = folder / "home", folder / "bin"
        for each in (self.home, programs):
            each.mkdir(parents=True)
        self._commands = Commands(folder)
        self._commands.program(programs / "swarm", "swarm_cli")
        (programs / "nats-server").symlink_to(find_binary())
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        self.environment = {**clean, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **settings}
        self.places: dict[str, str] = {"HOST": "127.0.0.1"}
        """What to type for a placeholder, such as NODE; and for a port of the pages."""

    def end(self) -> str:
        """End all that runs there; what `swarm up` said."""
        self._commands.close()
        return ""

    def filled(self, command: str) -> str:
        for word, meant in self.places.items():
            command = re.sub(rf"\b{word}\b(?!=)", meant, command)
        return command

    def type(self, command: str) -> tuple[int, str]:
        """Run a line in the shell; its exit code and all it said."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.filled(command)],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return done.returncode, done.stdout

    def watch(self, command: str, word: str) -> tuple[int, str]:
        """Run a line that goes on until Ctrl-C, which comes once it has said `word`."""
        log = self.home / "watched.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.filled(command)}"], cwd=self.home, env=self.environment, stdout=output, stderr=output
            )
        try:
            until(lambda: word in log.read_text() or process.poll() is not None, lambda: log.read_text())
            process.send_signal(signal.SIGINT)
            return process.wait(COMMAND_S), log.read_text()
        finally:
            process.kill()


class RunningMachine(Machine):
    """One on which `swarm up` runs a node that trains alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            SWARM_SAMPLER__EXTERNAL="0",
            SWARM_EVAL__TASKS="8",
            SWARM_EVAL__EVERY_VERSIONS="2",
            SWARM_TRAINER__CHECKPOINT_EVERY="2",
            SWARM_VERIFIER__WORKERS="1",
        )
        (self.home / "models").symlink_to(ROOT / "models")
        (self.home / "node.toml").write_text((ROOT / "swarm_cli/local/defaults/demo.toml").read_text())
        self.nats_port, self.base_port = free_port(), free_port_range()
        self.node_dir = self.home / "var" / "runs" / RUN / NODE
        self._log = folder / "up.log"
        # As users start it: its services are processes of their own.
        up = f"{sys.executable} -m swarm_cli up --nodes 1 --run {RUN} --nats-port {self.nats_port} --base-port {self.base_port}"
        with self._log.open("wb") as output:
            self._up = subprocess.Popen(
                up.split(), cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.places |= {
            "RUN": RUN,
            "NODE": NODE,
            "ROLE": "sampler",
            "NAME": "mallory",
            "MODEL": "models/base",
            "PORT": str(self.base_port + 3),
        }
        self.places |= {"4222": str(self.nats_port), "9400": str(self.base_port + 3), "9498": str(free_port())}

    def until_it_trains(self) -> None:
        """Until there are steps, a checkpoint, and an evaluation of a trained policy."""

        def trains() -> bool:
            assert self._up.poll() is None, self._log.read_text()[-6000:]
            evaluated = [each.policy_version for each in read_evaluations(self.node_dir)]
            return len(read_steps(self.node_dir)) > 4 and max(evaluated, default=0) > 0

        until(trains, lambda: self._log.read_text()[-6000:])
        monitoring = re.search(r"Starting http monitor on [\d.]+:(\d+)", self.text("nats.log"))
        assert monitoring, self.text("nats.log")
        self.places["8222"] = monitoring[1]

    def rest(self) -> None:
        """Suspend the generator, so that the trainer, which takes steps as fast as it can, leaves
        the processor to what is typed.
        """
        os.kill(int(self.pid(f"{NODE}/generator.log")), signal.SIGSTOP)
        steps: list[int] = []

        def has_come_to_rest() -> bool:
            steps.append(read_steps(self.node_dir)[-1]["step"])
            return len(steps) > 20 and len(set(steps[-20:])) == 1

        until(has_come_to_rest, lambda: str(steps))
        self.places["N"] = str(steps[-1])

    def pid(self, log: str) -> str:
        """Of the newest process that wrote a log, as a person reads it there."""
        pattern = r"^\[(\d+)\]" if log == "nats.log" else r'"pid": (\d+).*"event": "started"'
        found: list[str] = re.findall(pattern, self.text(log), re.MULTILINE)
        assert found, self.text(log)[-2000:]
        return found[-1]

    def text(self, name: str) -> str:
        """A log of the run."""
        return (self.node_dir.parent / name).read_text()

    def bury_a_group(self) -> int:
        """A new dead letter of the node; its number."""

        async def buried() -> int:
            transport = await connect(f"nats://127.0.0.1:{self.nats_port}", name="test")
            try:
                number = len(await read_letters(transport, NODE)) + 1
                payload = encode(group(NODE, int(time.time()) % 100_000))
                await bury(transport, NODE, payload, "of the test", message_id=f"letter-{number}-{time.time()}")
                return (await read_letters(transport, NODE))[-1].seq
            finally:
                await transport.close()

        return asyncio.run(buried())

    def end(self) -> str:
        with suppress(AssertionError, OSError):
            os.kill(int(self.pid(f"{NODE}/generator.log")), signal.SIGCONT)
        self._up.send_signal(signal.SIGINT)
        try:
            self._up.wait(COMMAND_S)
        finally:
            self._up.kill()
            super().end()
        return self._log.read_text()


class SecuredMachine(Machine):
    """One with a server with TLS and users, whose certificate is good for a year."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        monitoring = free_port()
        self.server = SecuredServer(folder / "server", [NODE], keys=self.home / "keys")
        now, tls = datetime.now(UTC), folder / "server" / "tls"
        authority_key, key = certificates.new_key(), certificates.new_key()
        authority = certificates.authority(authority_key, "test", now)
        (tls / "ca.pem").write_text(authority)
        (tls / "server.key").write_text(key)
        (tls / "server.pem").write_text(certificates.server(key, ["127.0.0.1"], authority, authority_key, now))
        (self.home / "ca.crt").write_text(authority)
        self.server.configure(f"\nhttp: 127.0.0.1:{monitoring}\n")
        self.server.start()
        self.places |= {"4222": str(self.server.port), "8222": str(monitoring), "PID": str(self.server.pid)}

    def end(self) -> str:
        self.server.kill()
        return super().end()


def until(holds: Callable[[], object], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)
