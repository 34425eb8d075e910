"""vLLM counts in a registry that no service of ours serves; the generator shows its counts beside
its own.
"""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from monitoring.metrics_doc import role_registry
from services.generator.engines.base import SamplingParams
from shared.runtime.metrics import DefaultRegistryMetrics
from tests.engines.conftest import TRAINABLE, Run, Subject


@pytest.mark.parametrize("started", TRAINABLE, indirect=True)
def test_vllms_own_metrics_are_shown_beside_the_generators_once_each(subject: Subject, run: Run) -> None:
    if subject.engine.name != "vllm":
        pytest.skip("this engine has no metrics of its own")  # among all engines, so that each is started once for all tests
    registry = role_registry("generator")
    DefaultRegistryMetrics("vllm:", registry)

    def counted(name: str) -> float:
        lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith(f"{name}{{")]
        assert len(lines) == 1, f"{name}: {lines}"
        return float(lines[0].split()[-1])

    tokens, requests = counted("vllm:generation_tokens_total"), counted("vllm:e2e_request_latency_seconds_count")
    run(subject.engine.generate([[5, 6, 7], [8, 9]], 2, SamplingParams(max_new_tokens=4), seed=1))
    assert counted("vllm:generation_tokens_total") > tokens
    assert counted("vllm:e2e_request_latency_seconds_count") >= requests + 2
    assert counted("vllm:num_requests_running") == 0.0
    shown = generate_latest(registry).decode()
    types = [line for line in shown.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a family is there twice"
    assert "swarm_ready 1.0" in shown
