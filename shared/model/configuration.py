"""Reads a model's configuration with transformers, and refuses at once one that cannot describe a
computable model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shared.hub_models import hub_arguments
from shared.model.quiet_reading import ModelLoadError

MOST_LAYERS = 500
"""Trained models have fewer than 200 layers, and a few that were merged from several have some
hundred. For that many layers the memory needs are computed within minutes; with a million, even
building the model without weights would take hours.
"""

_LAYER_NAMES = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def read_configuration(path: str | Path, revision: str = "") -> Any:
    """The transformers configuration of the folder `path`, or of a hub name at the commit
    `revision`.

    Raises:
        UnpinnedModelError: a hub name without its commit.
        ValueError: it is not a JSON object, or states numbers that no model can have.
        Exception: any kind that transformers raises; `shared.model.quiet_reading.library_cause`
            describes it.
    """
    arguments = hub_arguments(str(path), revision)
    # Checked before the model's configuration class runs: some classes create lists with one entry
    # per layer.
    try:
        stated, _ = PreTrainedConfig.get_config_dict(str(path), **arguments)
    except (TypeError, AttributeError):
        stated = None
    if not isinstance(stated, dict):
        raise ValueError("its config.json holds no JSON object")
    for layers in _stated_layers(stated):
        if layers > MOST_LAYERS:
            check_layers(layers)
    config = AutoConfig.from_pretrained(path, **arguments)
    check_computable(config)
    return config


def check_computable(config: Any) -> None:
    """Refuse a transformers configuration with a number of layers or a rotary base that no model
    can have.

    Raises:
        ValueError: naming the number.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None:
        check_layers(layers)
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for each in per_layer:
        check_rope_base(each.get("rope_theta"))


def check_not_quantised(config: Any, origin: str) -> None:
    """Raise ModelLoadError if a configuration says that the weights are quantised."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else getattr(quantised, "quant_method", "")
        raise ModelLoadError(
            f"{origin} holds quantised weights ({method}), which cannot be trained: give the unquantised model or its GGUF file"
        )


def check_layers(layers: float) -> None:
    """Raise ValueError unless there are 1 to `MOST_LAYERS` layers."""
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"it has {layers:,} layers; 1 to {MOST_LAYERS:,} are supported")


def check_rope_base(base: float | None) -> None:
    """Raise ValueError unless the base of rotary positions is above 0 and finite, or None because
    the model has none.
    """
    if base is not None and not 0 < base < math.inf:
        raise ValueError(f"the base of its rotary positions is {base}; it must be above 0 and finite")


def _stated_layers(stated: Mapping[str, Any]) -> Iterator[float]:
    """The numbers of layers stated for the model and for the models that it contains."""
    for name, value in stated.items():
        if isinstance(value, dict):
            yield from _stated_layers(value)
        elif name in _LAYER_NAMES and isinstance(value, int | float):
            yield value
