"""Root file systems that stand in for the images: this machine's interpreter and libraries, and
what the Dockerfile copies.

What an image leaves out is hidden here too: the verifier finds no torch, nobody finds the rest of
the repository.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.k8s.images import Stage
from tests.nats_server import find_binary

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = "/opt/swarm"
SITE_PACKAGES = f"{ENVIRONMENT}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
CODE = ("services", "shared", "swarm_cli", "lab", "monitoring")
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
NOT_IN_LOCK = {"torch": ("torch", "torchgen", "functorch"), "transformers": ("transformers",), "vllm": ("vllm",)}
"""Import packages of what an image's lock may leave out."""
PASSWD = "root:x:0:0:root:/root:/sbin/nologin\nswarm:x:10001:10001::/tmp:/sbin/nologin\n"
GROUP = "root:x:0:\nswarm:x:10001:\n"

Root = dict[str, Any]


def root_of(stage: Stage, stages: dict[str, Stage], scratch: Path) -> Root:
    """Mounts, links and files of an image's root, as `container_init` makes them. `scratch` holds
    what has to exist somewhere.
    """
    root: Root = {"binds": [], "links": {}, "files": {"/etc/passwd": PASSWD, "/etc/group": GROUP}, "overlays": []}
    for source, target in stage.copies:
        built_in, _, path = source.rpartition(":")
        if path == ENVIRONMENT:
            _python(root, stages[built_in], scratch)
        elif path.endswith("/nats-server"):
            root["binds"].append([find_binary(), target, True])
        elif not built_in:
            _copy(root, source, os.path.join(stage.workdir, target))
    if not stage.scratch:
        # A name may lead to several servers; by default only the first line counts.
        root["files"] |= {"/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n", "/etc/host.conf": "multi on\n"}
    return root


def _copy(root: Root, source: str, target: str) -> None:
    into_folder = target.endswith("/") and (REPOSITORY / source).is_file()
    root["binds"].append([str(REPOSITORY / source), target + Path(source).name if into_folder else target.rstrip("/"), True])


def _python(root: Root, build: Stage, scratch: Path) -> None:
    for name in SYSTEM:
        folder = Path("/") / name
        if folder.is_symlink():
            root["links"][f"/{name}"] = os.readlink(folder)
        elif folder.is_dir():
            root["binds"].append([str(folder), f"/{name}", True])
    for path in ("/etc/ld.so.cache", "/etc/ssl", "/etc/localtime"):
        if Path(path).exists():
            root["binds"].append([path, path, True])
    if not sys.base_prefix.startswith("/usr"):
        root["binds"].append([sys.base_prefix, sys.base_prefix, True])
    root["overlays"].append({"lower": sys.prefix, "target": ENVIRONMENT})
    if "swarm_cli" in {source for source, _ in build.copies}:
        # pip writes into a script where its interpreter is.
        script = scratch / "swarm"
        script.write_text(f"#!{ENVIRONMENT}/bin/python\nfrom swarm_cli import main\n\nmain()\n")
        script.chmod(0o755)
        root["binds"].append([str(script), f"{ENVIRONMENT}/bin/swarm", True])
    nothing = scratch / "nothing"
    nothing.mkdir(exist_ok=True)
    for source, target in build.copies:
        if source.split("/")[0] in CODE:
            _copy(root, source, os.path.join(SITE_PACKAGES, target))
    root["binds"] += [[str(nothing), f"{SITE_PACKAGES}/{path}", True] for path in build.removed if path.split("/")[0] in CODE]
    installed = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for package, folders in NOT_IN_LOCK.items():
        if package not in _locked(build):
            root["binds"] += [[str(nothing), f"{SITE_PACKAGES}/{name}", True] for name in folders if (installed / name).is_dir()]


def _locked(build: Stage) -> set[str]:
    """Names of the packages that the stage installs."""
    locks = [REPOSITORY / source for source, _ in build.copies if source.endswith(".lock")]
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    return {line.split("==")[0].strip().lower() for line in lines if "==" in line and not line.lstrip().startswith(("#", "--"))}
