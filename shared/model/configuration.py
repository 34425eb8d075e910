"""A model's configuration, as transformers reads it, with bounds: one that cannot describe a
computable model is refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shared.hub_models import hub_arguments

MOST_LAYERS = 500
"""Models are trained with under 200, and a few that were put together from several have some
hundred. For that many layers the memory needs are computed within minutes; with a million, even
building the model without weights would take hours.
"""

_LAYER_NAMES = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def read_configuration(path: str | Path, revision: str = "") -> Any:
    """The transformers configuration of the folder `path`, or of a hub name at the commit
    `revision`.

    Raises:
        UnpinnedModelError: a hub name without its commit.
        ValueError: it is no JSON object, or states more layers than `MOST_LAYERS`.
        Exception: what transformers raises, of many kinds;
            `shared.model.quiet_reading.library_cause` tells them in words.
    """
    arguments = hub_arguments(str(path), revision)
    # Looked at before the model's own class sees it: some make lists as long as a model has layers.
    try:
        stated, _ = PreTrainedConfig.get_config_dict(str(path), **arguments)
    except (TypeError, AttributeError):
        stated = None
    if not isinstance(stated, dict):
        raise ValueError("its config.json holds no JSON object")
    for layers in _stated_layers(stated):
        if layers > MOST_LAYERS:
            check_layers(layers)
    return AutoConfig.from_pretrained(path, **arguments)


def check_computable(config: Any) -> None:
    """Refuse a configuration, as transformers gives it, whose layers or rotary positions no model
    can have.

    Raises:
        ValueError: with the number.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None:
        check_layers(layers)
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for each in per_layer:
        check_rope_base(each.get("rope_theta"))


def check_layers(layers: float) -> None:
    """Raise ValueError unless a model can have so many layers: 1 to `MOST_LAYERS`."""
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"it has {layers:,} layers; 1 to {MOST_LAYERS:,} are supported")


def check_rope_base(base: float | None) -> None:
    """Raise ValueError where the base of rotary positions is not above 0 and finite; None: the
    model has none.
    """
    if base is not None and not 0 < base < math.inf:
        raise ValueError(f"the base of its rotary positions is {base}; it must be above 0 and finite")


def _stated_layers(stated: Mapping[str, Any]) -> Iterator[float]:
    """The configurations of the model and of the models that it contains."""
    for name, value in stated.items():
        if isinstance(value, dict):
            yield from _stated_layers(value)
        elif name in _LAYER_NAMES and isinstance(value, int | float):
            yield value
