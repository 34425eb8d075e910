"""Code that runs inside vLLM's worker processes: it reads a policy file into the live model, and
exits with the service.

vLLM gets it as `worker_extension_cls`; its methods are called with `collective_rpc`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

_ORPHAN_POLL_S = 1.0


class PolicyWorkerExtension:
    """Mixed into vLLM's worker class, on any device."""

    model_runner: Any

    def end_with_service(self, service_pid: int) -> None:
        """Make this process end with the service, and not before it.

        A separate process group keeps a Ctrl-C or SIGTERM for the service's group away from vLLM,
        so that the service can drain. A watch ends this process if the service was killed;
        otherwise vLLM would continue to run and keep its memory.
        """
        os.setpgid(0, 0)

        def watch() -> None:
            parent = os.getppid()
            while os.getppid() == parent and _is_alive(service_pid):
                time.sleep(_ORPHAN_POLL_S)
            os._exit(1)

        threading.Thread(target=watch, name="end-with-service", daemon=True).start()

    def unused_adapters(self, number: int) -> list[str]:
        """The names of layers in the loaded adapters `number` that this model would ignore.

        vLLM (0.32) silently skips a module that it has under another name. If it computes with a
        layer's weight directly, as multi-head latent attention does with `kv_b_proj`, an adapter on
        that layer's output has no effect.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        given = manager.list_adapters()[number].loras
        latent = any(type(module).__name__ == "MLAAttention" for module in self.model_runner.get_model().modules())
        passed_by = [name for name in given if latent and name.endswith("kv_b_proj")]
        return sorted({*(given.keys() - manager.modules.keys()), *passed_by})

    def load_policy_file(self, weights_file: str, version: int) -> int:
        """Replace the model's weights by the file's. Returns `version`, which confirms that this
        worker has done it.
        """
        with torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=_tensors(weights_file))
            for module in self.model_runner.get_model().modules():
                _repack_for_cpu(module)
        return version


def _tensors(weights_file: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(weights_file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            yield name, tensors.get_tensor(name)


def _repack_for_cpu(module: Any) -> None:
    """Recreate a module's packed CPU copy of its weight.

    vLLM (0.32) packs a matrix for oneDNN when it is loaded, and on reload repacks only the matrices
    that the file names. An output layer tied to the embedding is not named, so it would keep
    multiplying by the old weights. Layers whose unpacked weight was discarded (and is empty) were
    named and are correct.
    """
    weight = getattr(module, "weight", None)
    if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel():
        module.quant_method.process_weights_after_loading(module)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
