"""Memory of the trainer's GPUs, read from torch at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class GpuMemory(Collector):
    """Bytes that torch has allocated, has reserved, and had allocated at its peak, over all GPUs of
    this process; 0 without one.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """The family without samples."""
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        """Torch's current figures. Reading them does not initialise CUDA if it is not in use."""
        family = self._family()
        used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpus = range(torch.cuda.device_count()) if used else range(0)
        family.add_metric(["allocated"], sum(torch.cuda.memory_allocated(gpu) for gpu in gpus))
        family.add_metric(["reserved"], sum(torch.cuda.memory_reserved(gpu) for gpu in gpus))
        family.add_metric(["peak"], sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus))
        yield family

    @staticmethod
    def _family() -> GaugeMetricFamily:
        text = (
            "GPU memory of this process as counted by torch: allocated now, reserved now, and the peak allocated; 0 without a GPU."
        )
        return GaugeMetricFamily("swarm_trainer_gpu_memory_bytes", text, labels=["kind"])
