"""Loads the weights of any causal language model by folder or hub name: the one place where
`transformers` does that, for trainer, engines, evaluation, export and import.

`transformers` fills what it does not find with random numbers, leaves out what it does not know,
and says so on the console at most. Here each of these is refused. `shared.model.reading` reads the
tokenizer and the other facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.utils.peft_utils import find_adapter_config_file

from shared.config.model_section import ModelSection
from shared.config.section import Dtype
from shared.hub_models import hub_arguments
from shared.model.configuration import ModelLoadError, check_not_quantised, meant_attention, quietly, read_configuration, reading
from shared.model.reading import check_source
from shared.model.weight_files import local_weights, tensor_twice, tensors_of

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}
NO_NUMBERS = torch.device("meta")
"""As `device`: names and shapes are checked, and no weight is read.
`check_stored_numbers` checks the numbers in the files.
"""
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
"""Those of safetensors that a model that can be trained is stored in."""


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one, else the CPU.

    Raises: ModelLoadError: this machine does not have the device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # A torch built without CUDA raises AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).splitlines()[0]
        raise ModelLoadError(
            f"model.device {name!r} cannot be used ({cause}): set it to auto, cpu or a device of this machine"
        ) from None
    return device


def dtype_name(name: str, *, on_gpu: bool) -> str:
    """`auto` is bfloat16 on a GPU and float32 elsewhere; others are themselves."""
    if name == "auto":
        return "bfloat16" if on_gpu else "float32"
    return name


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `dtype_name` names for `device`."""
    return DTYPES[dtype_name(name, on_gpu=device.type == "cuda")]


def load_causal_lm(
    model: ModelSection, *, dtype: torch.dtype, device: torch.device, origin: str = "", gguf: tuple[str, Any] | None = None
) -> Any:
    """The model's weights in `dtype` on `device`, in eval mode; every weight is one of the file's,
    and every tensor of the file is used.

    Args:
        model: folder, or hub name at a commit.
        dtype: of the weights.
        device: where they are used; `NO_NUMBERS` to check them without keeping them.
        origin: how messages name the model; "": as `model.path`.
        gguf: name of a GGUF file in the folder, and the configuration read from it.

    Raises:
        ModelLoadError: no such folder or hub name, a hub name without a commit, not a causal
            language model, or broken, missing, unused, quantised or non-finite weights.
    """
    origin = origin or (check_source(model) if gguf is None else model.path)
    pinned = hub_arguments(model.path, model.revision)
    with reading(origin, "configuration"):
        if "revision" in pinned and find_adapter_config_file(model.path, revision=model.revision):
            # transformers would go on to the model that the adapter names, and look for this commit
            # there.
            raise ModelLoadError(
                f"{origin} at {model.revision[:12]} holds an adapter for another model, which this revision does not pin: "
                "merge the two and give the merged model's folder"
            )
        config = read_configuration(model.path, model.revision) if gguf is None else gguf[1]
    if gguf is None:
        check_not_quantised(config, origin)
        local_weights(model.path, model.revision)
    _check_layer_types(origin, config)
    attention = meant_attention(config)
    # To look at names and shapes, those in the headers are enough.
    headers = _headers(model) if device == NO_NUMBERS else None
    with reading(origin, "weights"):
        kind: Any = AutoModelForCausalLM if headers is None else _class_of(config)
        read: Any = kind.from_pretrained(
            model.path if headers is None else None,
            config=config,
            state_dict=headers,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **pinned,
            **({} if attention is None else {"attn_implementation": attention}),
            **({} if gguf is None else {"gguf_file": gguf[0]}),
            **({"device_map": {"": "meta"}} if device == NO_NUMBERS else {}),
        )
    loaded, found = read
    ties = loaded.get_expanded_tied_weights_keys(all_submodels=True)
    _check_names(origin, found["missing_keys"], found["unexpected_keys"], ties)
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise ModelLoadError(
            f"{origin}: the weight {name} has the shape {tuple(in_file)} in the file and {tuple(in_model)} by config.json: give "
            "the config.json and the weights of one model"
        )
    # transformers leaves two tensors apart where the file has two different ones.
    for name in sorted(ties.keys() - (loaded.all_tied_weights_keys or {}).keys()):
        raise ModelLoadError(_tied_and_not(origin, name, ties[name]))
    if gguf is None:  # the files of a hub name are here by now
        files = local_weights(model.path, model.revision)
        _check_not_packed(origin, loaded, files)
        _check_torch_files(origin, [file for file in files if file.suffix == ".bin"])
    if device == NO_NUMBERS:
        return loaded
    _check_numbers(origin, loaded.state_dict().items(), ties, outer_matrices(loaded), narrow=dtype == torch.float16)
    loaded = loaded.to(device).eval()
    _check_tells_tokens_apart(origin, loaded)
    return loaded


def _check_tells_tokens_apart(origin: str, model: Any) -> None:
    """Refuse a model whose logits are all equal for several tokens, whatever numbers do that: it
    answers with noise.
    """
    tokens = torch.arange(min(8, vocabulary_size(model)), device=model.device)[None]
    try:
        with quietly(), torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception:  # noqa: BLE001 (a model that needs more than tokens; it is tried with that when it is used)
        return
    if logits.shape[-1] > 1 and bool((logits.amin(-1) == logits.amax(-1)).all()):
        raise ModelLoadError(
            f"{origin}: the model gives every token the same logit, so every answer would be noise: its output layer or its norms "
            "are constant, as a conversion that failed leaves them: copy or convert the weights again"
        )


def check_stored_numbers(model: ModelSection, loaded: Any, *, most_bytes: int | None = None) -> None:
    """Check the numbers in the files of a model that was loaded without them (`NO_NUMBERS`), unless
    the files are larger than `most_bytes`, or not here.

    Raises:
        ModelLoadError: a number is NaN or infinite, matrices are wholly 0 that never are in a
            trained model, or two tensors that are one in the model differ.
    """
    files = local_weights(model.path, model.revision)
    if not files or (most_bytes is not None and sum(file.stat().st_size for file in files) > most_bytes):
        return
    origin, ties = str(files[0].parent), dict(loaded.all_tied_weights_keys or {})
    held: dict[str, torch.Tensor] = {}

    def stored() -> Iterator[tuple[str, torch.Tensor]]:
        for file in files:
            with reading(str(file), "weights"):
                tensors = _tensors_in(file)
            for name, value in tensors:
                if name in ties or name in ties.values():
                    held[name] = value
                yield name, value

    _check_numbers(origin, stored(), ties, outer_matrices(loaded))
    for name, other in ties.items():
        if name in held and other in held and not torch.equal(held[name], held[other]):
            raise ModelLoadError(_tied_and_not(origin, name, other))


def _tensors_in(file: Path) -> Iterable[tuple[str, torch.Tensor]]:
    if file.suffix == ".safetensors":
        opened: Any = safe_open(str(file), framework="pt")
        return ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 (not a dict)
    tensors: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    return tensors.items()


def _check_numbers(
    origin: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tied: Mapping[str, str],
    needed: Collection[str],
    *,
    narrow: bool = False,
) -> None:
    """Refuse numbers that are none, and zeros where none can be. narrow: as read, in float16."""
    zero: dict[str, bool] = {}
    broken_off = ""
    for name, value in tensors:
        if value.dtype not in _TYPES.values() or not value.is_floating_point() or not value.numel():
            continue
        least, most = torch.aminmax(value)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise ModelLoadError(_not_finite(origin, name, narrow=narrow))
        if value.ndim >= 2 and name not in tied:
            zero[name] = bool(least == 0) and bool(most == 0)
            if least == most and least != 0 and _is_one_of(name, needed):
                raise ModelLoadError(
                    f"{origin}: the weight {name} holds the number {float(least):g} only, so every answer would be noise: copy the "
                    "weights again"
                )
            # More than a vocabulary is padded by.
            if not zero[name] and _is_one_of(name, needed) and not value[-(len(value) // 4 + 1) :].any():
                broken_off = broken_off or name
    if broken_off:
        raise ModelLoadError(
            f"{origin}: the last quarter of the weight {broken_off} is 0, as a download that broke off leaves it: copy the weights "
            "again"
        )
    if problem := _zero_problem(origin, zero, needed):
        raise ModelLoadError(problem)


def _zero_problem(origin: str, zero: Mapping[str, bool], needed: Collection[str]) -> str:
    """Why a model's matrices cannot be trained ones; empty if they can. zero: of each, whether it
    is wholly 0. needed: names of its embedding and output layer in the model; a file may leave out
    how they begin.

    A download that broke off leaves zeros. A model may have some such matrices from its start, but
    neither its embedding nor its output layer, nor many; one with nothing but zeros is a stand-in.
    """
    found = sorted(name for name, is_zero in zero.items() if is_zero)
    first = next((name for name in found if _is_one_of(name, needed)), "")
    if len(found) == len(zero) or not (first or len(found) * 4 > len(zero)):
        return ""
    return (
        f"{origin}: the weight {first or found[0]} is wholly 0 ({len(found)} of {len(zero)} matrices are), as a download that "
        "broke off leaves it: copy the weights again"
    )


def _is_one_of(name: str, needed: Collection[str]) -> bool:
    return any(f".{each}".endswith(f".{name}") for each in needed)


def _not_finite(origin: str, tensor: str, *, narrow: bool = False) -> str:
    """Describe a weight that is no number. narrow: as it is read, in float16."""
    remedy = "set model.dtype to bfloat16 or float32, " if narrow else ""
    return (
        f"{origin}: the weight {tensor} holds NaN or infinity{' in float16' * narrow}, so every answer would be noise: {remedy}"
        "take an earlier checkpoint, or copy the file again"
    )


def _tied_and_not(origin: str, tensor: str, other: str) -> str:
    """Describe a file with two different tensors where the configuration has one."""
    return (
        f"{origin}: config.json says that {tensor} is {other} (tie_word_embeddings), and the file holds two different tensors, so "
        "that trainer and engines would compute different models: set tie_word_embeddings to false in config.json if the "
        f"model was trained with both, else remove {tensor} from the file"
    )


def _check_layer_types(origin: str, config: Any) -> None:
    """Refuse types of layers that transformers knows and this architecture does not compute.
    Nothing but a pass tells; it is made without numbers.
    """
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if types <= {"full_attention"}:
        return
    try:
        with quietly(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            skeleton: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            skeleton(input_ids=torch.zeros((1, 4), dtype=torch.long), use_cache=False)
    except KeyError as error:
        if unknown := types.intersection(error.args):
            raise ModelLoadError(
                f"{origin}: config.json has layers of the type {unknown.pop()!r} (layer_types), which the architecture "
                f"{config.model_type} does not compute: take the original model's config.json"
            ) from None
    except Exception:  # noqa: BLE001 (a model that decides by its numbers; it is tried with them when it is used)
        return


def outer_matrices(model: Any) -> list[str]:
    """Names of the weights of a model's embedding and output layer, which are never wholly 0."""
    outer = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None}
    return [name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in outer]


def vocabulary_size(model: Any) -> int:
    """Rows of the input embedding; every token id must be below this."""
    return int(model.get_input_embeddings().weight.shape[0])


def _class_of(config: Any) -> Any:
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]


def _headers(model: ModelSection) -> dict[str, torch.Tensor] | None:
    """A tensor without numbers for each in the files; None: the files must be read for that."""
    files = local_weights(model.path, model.revision)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return None
    return {
        name: torch.empty(entry["shape"], dtype=_TYPES.get(entry["dtype"], torch.uint8), device="meta")
        for file in files
        for name, entry in tensors_of(file).items()
    }


def _check_names(origin: str, missing: Collection[str], unexpected: Collection[str], ties: Mapping[str, str]) -> None:
    """Refuse names that the file lacks or that the architecture does not use; `transformers` has
    left out those that the architecture declares to be of no matter.
    """
    missing = {name for name in missing if ties.get(name, name) in missing}
    if not missing and not unexpected:
        return
    if wrapper := _wrapper(missing, unexpected):
        raise ModelLoadError(
            f"{origin}: the names of its weights contain {wrapper!r}, such as {min(unexpected)}, as wrappers of training code "
            "leave it, so the weights would not be found and be random: save the model inside the wrapper, or rename the tensors "
            "without it"
        )
    if adapters := sorted(name for name in unexpected if "lora_" in name or ".base_layer." in name):
        raise ModelLoadError(
            f"{origin} holds {len(adapters)} tensors of adapters beside its weights, such as {adapters[0]}, which would be left "
            "out: merge them (peft's merge_and_unload) and save the model again"
        )
    if missing:
        head = "; if its output layer is its embedding, set tie_word_embeddings to true in config.json" if len(missing) == 1 else ""
        raise ModelLoadError(
            f"{origin} lacks {len(missing)} weights of its model, such as {min(missing)}, which would be random: give the complete "
            f"model, with its own config.json{head}"
        )
    raise ModelLoadError(
        f"{origin} holds {len(unexpected)} tensors that its architecture does not use, such as {min(unexpected)}: it would be "
        "another model; give the config.json of the model that was saved, or take the tensors out"
    )


def _wrapper(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return what the file's names have more than the model's, at their start or at one other
    place; empty if that is not how they differ.
    """
    found: Counter[str] = Counter()
    for name in unexpected:
        parts = name.split(".")
        for place in range(len(parts)):
            if place and ".".join(parts[place:]) in missing:
                found[".".join(parts[:place]) + "."] += 1
            elif ".".join(parts[:place] + parts[place + 1 :]) in missing:
                found[parts[place] + "."] += 1
    return found.most_common(1)[0][0] if found else ""


def _check_not_packed(origin: str, model: nn.Module, files: Sequence[Path]) -> None:
    """Refuse integers that would be read as weights: they are quantised, and the numbers that they
    stand for are elsewhere.
    """
    floats = {name for name, value in model.state_dict().items() if value.is_floating_point()}
    for file in files:
        for name, entry in tensors_of(file).items() if file.suffix == ".safetensors" else ():
            if name in floats and not _TYPES.get(entry["dtype"], torch.uint8).is_floating_point:
                raise ModelLoadError(
                    f"{origin}: the weight {name} is stored as {entry['dtype']}, so it is quantised and cannot be trained: give "
                    "the unquantised model"
                )


def _check_torch_files(origin: str, files: Sequence[Path]) -> None:
    """Refuse a tensor that is in two of torch's own files, of which transformers takes the last."""
    held: dict[str, str] = {}
    for file in files if len(files) > 1 else ():
        with reading(str(file), "weights"):
            names: Iterable[str] = torch.load(file, map_location="meta", weights_only=True).keys()
        for name in names:
            if name in held:
                raise ModelLoadError(tensor_twice(origin, name, held[name], file.name))
            held[name] = file.name
