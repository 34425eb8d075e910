"""Policies that are adapters beside the base model: what a file of them must hold, and their place in a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.generator.engines.base import PolicyLoadError
from services.generator.engines.model_folder import ModelFolder
from shared.model.adapter_file import Adapters, adapted_module, base_fingerprint, modules_of, read_adapters
from shared.model.weights import WeightsError

_NAME = "default"
_REMEDY = "publish the policy from the model that this generator was started with"


def adapters_in(weights_file: Path, model: ModelFolder, model_path: str, revision: str) -> tuple[Adapters, list[str]] | None:
    """What a policy file holds in adapters, and of which modules; None: all weights.

    Raises:
        PolicyLoadError: it is unreadable, or its adapters are not for this model.
    """
    try:
        adapters = read_adapters(weights_file)
        if adapters is None:
            return None
        shapes = _shapes(weights_file)
        modules = modules_of(shapes)
        base = base_fingerprint(model_path, revision)
    except WeightsError as error:
        raise PolicyLoadError(str(error)) from None
    if adapters.base != base:
        raise PolicyLoadError(
            f"policy file {weights_file}: its adapters were trained on a base model with other weights than {model_path} has: give "
            "trainer and generator the same files under model.path"
        )
    _check_shapes(weights_file, shapes, adapters, model)
    return adapters, modules


class AdapterSlot:
    """The adapters of a transformers model: none until some are loaded, and gone again with `clear`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: tuple[Adapters, list[str]] | None = None
        self._tuner: Any = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], adapters: Adapters, modules: list[str]) -> None:
        """Answer with these from now on. Factors that have places already are copied there.

        Raises:
            ValueError: peft cannot put adapters there; the model then answers as it did.
        """
        if self._held != (adapters, modules):
            self._make_places(adapters, modules)
        parameters = dict(self._model.named_parameters())
        for name, value in tensors.items():
            module, below = adapted_module(name)
            parameters[f"{module}.{below}"].copy_(value)

    def clear(self) -> None:
        """Answer with the base model alone."""
        if self._tuner is not None:
            self._tuner.unload()
        self._tuner = self._held = None

    def _make_places(self, adapters: Adapters, modules: list[str]) -> None:
        before = self._held
        kept = {name: value.clone() for name, value in self._model.named_parameters() if ".lora_" in name} if before else {}
        self.clear()
        try:
            self._inject(adapters, modules)
        except Exception as error:  # noqa: BLE001 (peft and each layer say in their own ways what they cannot have)
            self.clear()
            if before is not None:
                self._inject(*before)
                for name, value in self._model.named_parameters():
                    if name in kept:
                        value.copy_(kept[name])
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _inject(self, adapters: Adapters, modules: list[str]) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=modules, inference_mode=True)
        self._tuner = LoraModel(self._model, {_NAME: config}, _NAME)
        self._model.eval().requires_grad_(False)
        found = {name for name, _ in self._model.named_modules() if name.endswith(f".lora_A.{_NAME}")}
        embedded = {name for name, _ in self._model.named_parameters() if name.endswith(f".lora_embedding_A.{_NAME}")}
        if len(found) + len(embedded) != len(modules):
            raise ValueError(f"{len(modules)} modules are adapted, and {len(found) + len(embedded)} of them are in this model")
        for name, parameter in self._model.named_parameters():
            if ".lora_" in name:
                # As the trainer keeps them; peft takes the base's dtype.
                parameter.data = parameter.data.float()
        self._held = adapters, modules


def _shapes(weights_file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(str(weights_file), framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise PolicyLoadError(f"policy file {weights_file}: unreadable or truncated ({error}): fetch it again") from error


def _check_shapes(weights_file: Path, shapes: Mapping[str, tuple[int, ...]], adapters: Adapters, model: ModelFolder) -> None:
    """Every adapted module has both factors, and they make a matrix of its weight's shape."""
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, below = adapted_module(name)
        factors.setdefault(module, {})[below.split(".")[0].removeprefix("lora_").removeprefix("embedding_")] = shape
    for module, pair in factors.items():
        weight = model.tensor_shapes.get(f"{module}.weight")
        if weight is None:
            raise PolicyLoadError(f"policy file {weights_file}: adapts {module}, which this model has not: {_REMEDY}")
        first, second = pair.get("A", ()), pair.get("B", ())
        fits = len(first) == len(second) == len(weight) == 2 and first[0] == second[1] == adapters.rank
        # GPT-2's layers and embeddings keep their weights the other way round.
        if not fits or (second[0], first[1]) not in (weight, weight[::-1]):
            raise PolicyLoadError(
                f"policy file {weights_file}: the factors of {module} have shapes {first} and {second}, its weight is {weight} "
                f"and the rank {adapters.rank}: {_REMEDY}"
            )
