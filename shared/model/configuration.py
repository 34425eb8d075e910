"""Reads a model's configuration with transformers, refuses one that cannot describe a computable
model, and says what follows from it: attention windows, lengths of rotary positions.

`reading` is the block in which libraries read any part of a model: it suppresses their output and
turns all their errors into `ModelLoadError`, the one error for a model that cannot be used.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from shared.hub_models import MODEL_INSTEAD, hub_arguments, hub_unreached
from shared.runtime.exits import FatalError

_MOST_CHARACTERS = 240


class ModelLoadError(FatalError):
    """A model or tokenizer cannot be used, and a restart would not help; the message names the
    cause and the remedy.
    """


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress progress bars, reports and advice meant for people who load models by hand."""
    before = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def reading(origin: str, part: str) -> Iterator[None]:
    """Read the `part` of the model that `origin` names; any error of the libraries becomes
    ModelLoadError.
    """
    try:
        with quietly():
            yield
    except ModelLoadError:
        raise
    except MemoryError:
        raise ModelLoadError(f"{origin}: not enough memory to read its {part}: use a larger machine") from None
    # The file comes from somebody else and may contain anything. Its readers pass on the errors of
    # all their layers, including plain Exception.
    except Exception as error:  # noqa: BLE001
        if unreached := hub_unreached(error, MODEL_INSTEAD):
            raise ModelLoadError(f"the {part} of {origin} cannot be read: {unreached}") from None
        raise ModelLoadError(
            f"the {part} of {origin} cannot be read ({library_cause(error)}): check that the files are complete and of a "
            "causal language model, and for a hub name its spelling and the connection"
        ) from None


def library_cause(error: Exception) -> str:
    """A library's error in one line, with its kind; arithmetic errors are put into words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # Some announce the cause in one line and state it in the next.
    said = f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])[:_MOST_CHARACTERS]}"
    return f"a number in it is 0 or too large; {said}" if isinstance(error, ArithmeticError) else said


MOST_LAYERS = 500
"""Trained models have fewer than 200 layers, and a few that were merged from several have some
hundred. For that many layers the memory needs are computed within minutes; with a million, even
building the model without weights would take hours.
"""

_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "max_position_embeddings": ("at least 1", lambda value: 1 <= value < math.inf),
    "sliding_window": ("above 0, or null", lambda value: 0 < value < math.inf),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), ("at least 0 and below 1", lambda value: 0 <= value < 1)),
    **dict.fromkeys(
        ("factor", "attention_factor", "short_factor", "long_factor"), ("above 0 and finite", lambda value: 0 < value < math.inf)
    ),
}
"""Numbers that a model computes nothing with outside of these; NaN is in no range."""
_PARTS = frozenset({".json", ".jinja", ".model", ".safetensors", ".bin"})
_LAYER_NAMES = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


def read_configuration(path: str | Path, revision: str = "") -> Any:
    """The transformers configuration of the folder `path`, or of a hub name at the commit
    `revision`.

    Raises:
        UnpinnedModelError: a hub name without its commit.
        ValueError: a file beside it is none or is not UTF-8, or it is not a JSON object, or states
            numbers that no model can have or a key twice.
        Exception: any kind that transformers raises; `shared.model.configuration.library_cause`
            describes it.
    """
    arguments = hub_arguments(str(path), revision)
    if Path(path).is_dir():
        _check_files(Path(path))
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
    _check_ranges(stated)
    _check_keys(cached_file(str(path), "config.json", **{name: arguments[name] for name in ("revision",) if name in arguments}))
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


def _check_files(folder: Path) -> None:
    """Refuse a part of a model that libraries would pass over, or fail to read without saying why:
    what is no file, and JSON in another encoding than UTF-8.
    """
    for part in sorted(each for each in folder.iterdir() if each.suffix in _PARTS):
        if not part.is_file():
            raise ValueError(f"{part.name} is a folder, a pipe or a link to nothing, and must be a file")
        if part.suffix == ".json":
            with part.open("rb") as opened:
                start = opened.read(4)
            if start.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
                raise ValueError(f"{part.name} is saved as UTF-16 or with a byte order mark: save it as UTF-8 without one")


def _check_ranges(stated: Mapping[str, Any]) -> None:
    """Refuse a number outside its range in a configuration or in one inside it."""
    for name, value in stated.items():
        if isinstance(value, dict):
            _check_ranges(value)
        # Qwen2 leaves a number there that it does not use.
        elif name in _RANGES and not (name == "sliding_window" and stated.get("use_sliding_window") is False):
            meant, within = _RANGES[name]
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, int | float) and not within(each):
                    raise ValueError(f"{name} is {each} in its config.json; it must be {meant}: take the original model's number")


def _check_keys(file: str | None) -> None:
    """Refuse a key that stands twice in one object, of which every reader would take another."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} stands twice in its config.json: remove one of the two")
        return found

    if file is not None:
        json.loads(Path(file).read_text(encoding="utf-8"), object_pairs_hook=once)


def _stated_layers(stated: Mapping[str, Any]) -> Iterator[float]:
    """The numbers of layers stated for the model and for the models that it contains."""
    for name, value in stated.items():
        if isinstance(value, dict):
            yield from _stated_layers(value)
        elif name in _LAYER_NAMES and isinstance(value, int | float):
            yield value


def steady_rope_length(config: Any) -> int | None:
    """The largest number of tokens for which the rotation of positions stays the same; None if it
    always stays the same.

    `longrope` rotates all tokens of a text differently once that text, or another one in the batch,
    exceeds the original length; vLLM chooses by the longest text that it may see. `dynamic` scales
    with the longest text seen so far. Beyond the returned length, the logprob that a token had when
    it was sampled, in a text that was still short, differs from the one computed for the whole
    text.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    lengths = [
        each.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
        for each in per_layer
        if each.get("rope_type") in ("longrope", "dynamic")
    ]
    return min((int(length) for length in lengths if length), default=None)


def rope_problem(config: Any, length: int) -> str:
    """Why texts of `length` tokens have no single set of logprobs; empty if they do."""
    steady = steady_rope_length(config)
    if steady is None or length <= steady:
        return ""
    return (
        f"beyond {steady} tokens this model rotates positions by the length of the text (longrope or dynamic scaling), so that "
        f"sampled and trained logprobs would differ: set model.max_length to {steady} or less"
    )


_WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_window",
    "attention_chunk_size",
    "local_attention",
    # Doge's: with more keys than this every token keeps the highest-scoring ones, and the choice
    # also considers later keys.
    "keep_window_size",
)

LONGEST_PROBE = 1024
"""Widest attention window, in tokens, past which a model is tried when it is loaded: a wider one
would take too long.
"""


def attention_windows(config: Any) -> list[int]:
    """Widths, in tokens, of every kind of local attention that `config` names, ascending. A named
    kind need not be used by any layer.
    """
    text = config.get_text_config()
    named = [getattr(text, name, None) for name in _WINDOWS]
    # MPT keeps its attention settings in a nested configuration.
    named.append(getattr(getattr(text, "attn_config", None), "sliding_window", None))
    return sorted({width for width in named if isinstance(width, int) and not isinstance(width, bool) and width > 0})


def meant_attention(config: Any) -> str | None:
    """The only attention implementation that computes what `config` describes; None if transformers
    may choose.

    `sdpa` silently leaves out a soft cap on attention scores; only `eager` applies it.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
