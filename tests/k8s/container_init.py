"""Becomes one container's process: `python container_init.py SPEC.json`, as root, in the pod's
network namespace.

What a container runtime does with namespaces and mounts is done here by hand: a root file system of
its own that cannot be written, the volumes, process ids, host name and IPC of its own, the user, no
capabilities, no new privileges. Not done: seccomp, cgroups. The outer process waits for the inner
one, which is number 1 in its own namespace unless the pod's containers share one, and ends with its
code.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x4000000, 0x8000000, 0x20000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
DEVICES = ("null", "zero", "full", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    own = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC
    if spec["process_ids"]:
        with open(spec["process_ids"]) as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWPID):
                raise OSError(ctypes.get_errno(), "setns")
    else:
        own |= CLONE_NEWPID
    if libc.unshare(own):
        raise OSError(ctypes.get_errno(), "unshare")
    inner = os.fork()
    if inner == 0:
        try:
            become(spec)
        except BaseException as error:
            print(f"container_init: {error!r}", file=sys.stderr, flush=True)
            os._exit(125)
    Path(spec["pid_file"]).write_text(str(inner))
    _, status = os.waitpid(inner, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def become(spec: dict[str, Any]) -> None:
    root = Path(spec["root"])
    mount("--make-rprivate", "/")
    build_root(root, spec)
    socket.sethostname(spec["hostname"])
    os.chroot(root)
    os.chdir(spec["workdir"])
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setgroups(spec["groups"])
    os.setresgid(spec["gid"], spec["gid"], spec["gid"])
    os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    program = shutil.which(spec["command"][0], path=spec["environment"].get("PATH", "/usr/bin:/bin"))
    if program is None:
        raise FileNotFoundError(f"{spec['command'][0]} is not on the image's PATH")
    os.execve(program, spec["command"], spec["environment"])


def build_root(root: Path, spec: dict[str, Any]) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    at(root, spec["workdir"]).mkdir(parents=True, exist_ok=True)
    for path, target in spec["links"].items():
        at(root, path).parent.mkdir(parents=True, exist_ok=True)
        at(root, path).symlink_to(target)
    for path, text in spec["files"].items():
        at(root, path).parent.mkdir(parents=True, exist_ok=True)
        at(root, path).write_text(text)
    for overlay in spec["overlays"]:
        above = root.with_name(root.name + "-above")
        above.mkdir()
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(above))
        for name in ("upper", "work"):
            (above / name).mkdir()
        at(root, overlay["target"]).mkdir(parents=True)
        layers = f"lowerdir={overlay['lower']},upperdir={above / 'upper'},workdir={above / 'work'}"
        mount("-t", "overlay", "-o", layers, "overlay", str(at(root, overlay["target"])))
    read_only = []
    for source, target, read_only_mount in spec["binds"]:
        bind(Path(source), at(root, target))
        if read_only_mount:
            read_only.append(at(root, target))
    for target, size in spec["tmpfs"]:
        at(root, target).mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(at(root, target)))
    for name in ("proc", "sys"):
        (root / name).mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    bind(Path("/sys"), root / "sys")
    for device in DEVICES:
        bind(Path("/dev") / device, root / "dev" / device)
    for path, target in {"dev/fd": "/proc/self/fd", "dev/stdout": "/proc/self/fd/1", "dev/stderr": "/proc/self/fd/2"}.items():
        (root / path).symlink_to(target)
    for target in [*read_only, root / "sys"]:
        mount("-o", "remount,bind,ro", str(target))
    for overlay in spec["overlays"]:
        mount("-o", "remount,ro", str(at(root, overlay["target"])))
    if spec["read_only_root"]:
        mount("-o", "remount,ro", str(root))


def bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.touch()
    mount("--bind", str(source), str(target))


def at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
