"""Policies that consist of adapters on the base model: checks the contents of their file, and adds
them to a transformers model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.generator.engines.base import PolicyLoadError
from services.generator.engines.model_folder import WEIGHT_DTYPES, ModelFolder
from shared.model.adapter_file import Adapters, adapted_module, base_fingerprint, modules_of, read_adapters
from shared.model.weights import WeightsError, plain_name

_NAME = "default"
_REMEDY = "publish the policy from the model that this generator was started with"


def adapters_in(weights_file: Path, model: ModelFolder, model_path: str, revision: str) -> tuple[Adapters, list[str]] | None:
    """Which adapters a policy file contains, and the modules that they adapt; None: the file
    contains full weights.

    Raises:
        PolicyLoadError: it is unreadable, or its adapters are not for this model.
    """
    try:
        adapters = read_adapters(weights_file)
        if adapters is None:
            return None
        shapes = _factor_shapes(weights_file)
        modules = modules_of(shapes)
        base = base_fingerprint(model_path, revision)
    except WeightsError as error:
        raise PolicyLoadError(str(error)) from None
    if adapters.base != base:
        raise PolicyLoadError(
            f"policy file {weights_file}: its adapters were trained on a base model with other weights than {model_path}: use the "
            "same model.path files for trainer and generator"
        )
    _check_shapes(weights_file, shapes, adapters, model)
    return adapters, modules


class AdapterSlot:
    """The adapters of a transformers model: none until some are loaded, and none again after
    `clear`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: tuple[Adapters, list[str]] | None = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], adapters: Adapters, modules: list[str]) -> None:
        """Use these adapters from now on. Factors that already exist in the model are overwritten
        in place.

        Raises:
            ValueError: peft cannot add the adapters; the model then keeps the previous ones.
        """
        before, kept = self._held, self._factors()
        if before is None or _places(*before) != _places(adapters, modules):
            self._make_places(adapters, modules, kept)
        parameters = self._factors()
        wanted = {".".join(adapted_module(name)): value for name, value in tensors.items()}
        misfit = [name for name, value in wanted.items() if name not in parameters or parameters[name].shape != value.shape]
        if misfit:
            self._restore(before, kept)
            raise ValueError(f"{misfit[0]} has another shape in this model")
        for name, value in wanted.items():
            parameters[name].copy_(value)
        self._held = adapters, modules

    def clear(self) -> None:
        """Use the base model without adapters."""
        for name, module in list(self._model.named_modules()):
            if _is_adapted(module):
                parent, _, child = name.rpartition(".")
                setattr(self._model.get_submodule(parent), child, module.get_base_layer())
        if hasattr(self._model, "peft_config"):
            del self._model.peft_config
        self._held = None

    def base_tensors(self) -> dict[str, Tensor]:
        """The model's own weights under their Hugging Face names, without adapters."""
        return {plain_name(name): value for name, value in self._model.state_dict().items() if ".lora_" not in name}

    def _factors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._model.named_parameters() if ".lora_" in name}

    def _make_places(self, adapters: Adapters, modules: list[str], kept: Mapping[str, Tensor]) -> None:
        before = self._held
        self.clear()
        try:
            self._inject(adapters, modules)
        except Exception as error:  # noqa: BLE001 (peft and each layer say in their own ways what they cannot have)
            self._restore(before, kept)
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _restore(self, before: tuple[Adapters, list[str]] | None, kept: Mapping[str, Tensor]) -> None:
        """Restore the adapted modules and factors that the model had before."""
        self.clear()
        if before is None:
            return
        self._inject(*before)
        for name, value in self._factors().items():
            value.copy_(kept[name])
        self._held = before

    def _inject(self, adapters: Adapters, modules: list[str]) -> None:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel

        config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=modules, inference_mode=True)
        LoraModel(self._model, {_NAME: config}, _NAME)
        self._model.eval().requires_grad_(False)
        found = sum(_is_adapted(module) for module in self._model.modules())
        if found != len(modules):
            raise ValueError(f"{len(modules)} modules are adapted, and {found} of them are in this model")
        for factor in self._factors().values():
            # In float32 like the trainer's; peft would use the base's dtype.
            factor.data = factor.data.float()


def warn_of_dtype(adapters: Adapters, dtype: object) -> None:
    """Warn if the engine's base has another dtype than the trainer's, because rounding then makes
    it a different base.
    """
    mine = str(dtype).removeprefix("torch.")
    if mine != adapters.dtype:
        structlog.get_logger("generator").warning(
            "adapters_beside_another_dtype",
            trainer=adapters.dtype,
            generator=mine,
            consequence="samples come from a slightly different policy than the one being trained",
            remedy="use the same model.dtype for trainer and generator",
        )


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "get_base_layer") and hasattr(module, "lora_A")


def _places(adapters: Adapters, modules: list[str]) -> tuple[int, float, list[str]]:
    return adapters.rank, adapters.alpha, modules


def _factor_shapes(weights_file: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(str(weights_file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                part = tensors.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in WEIGHT_DTYPES:
                    raise PolicyLoadError(f"policy file {weights_file}: {name} is {part.get_dtype()}, not a float: {_REMEDY}")
                if not bool(tensors.get_tensor(name).isfinite().all()):
                    raise PolicyLoadError(f"policy file {weights_file}: {name} holds NaN or infinity: {_REMEDY}")
    except (OSError, SafetensorError) as error:
        raise PolicyLoadError(f"policy file {weights_file}: unreadable or truncated ({error}): fetch it again") from error
    return shapes


def _check_shapes(weights_file: Path, shapes: Mapping[str, tuple[int, ...]], adapters: Adapters, model: ModelFolder) -> None:
    """Check that every adapted module has both factors, and that their product has the shape of its
    weight.
    """
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        module, below = adapted_module(name)
        factors.setdefault(module, {})[below.split(".")[0].removeprefix("lora_").removeprefix("embedding_")] = shape
    for module, pair in factors.items():
        weight = model.tensor_shapes.get(f"{module}.weight")
        if weight is None:
            raise PolicyLoadError(f"policy file {weights_file}: adapts {module}, which this model does not have: {_REMEDY}")
        first, second = pair.get("A", ()), pair.get("B", ())
        fits = len(first) == len(second) == len(weight) == 2 and first[0] == second[1] == adapters.rank
        wanted = weight[::-1] if f"{module}.weight" in model.transposed_names else weight
        if not fits or (second[0], first[1]) != wanted:
            raise PolicyLoadError(
                f"policy file {weights_file}: the factors of {module} have shapes {first} and {second}, its weight is {weight} "
                f"and the rank {adapters.rank}: {_REMEDY}"
            )
