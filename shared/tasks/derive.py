"""Derives a task (prompt, key, reference answer and metadata) from its reference, by reasoning-gym
in this process, by an installed package (`swarm.task_sources`), or from the rows of a file in this
process's own configuration (`file_rows`).

The same reference gives the same task on every node. Six of reasoning-gym's datasets iterate over
sets of strings, so their items depend on Python's hash seed; they are derived only if
`PYTHONHASHSEED=0` (`HASH_ORDERED`).
"""

from __future__ import annotations

import decimal
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shared.contracts.codec import decode, encode
from shared.contracts.limits import MAX_TEXT_CHARS
from shared.contracts.messages import Task, TaskRef
from shared.registry import PACKAGE_FAILURES, TASK_SOURCES, failure, plugin_errors
from shared.suggestions import did_you_mean
from shared.tasks.file_rows import FileRows, find_rows, is_file_name
from shared.tasks.prompt import content_key, read_prompt, row_task, text_task

HASH_ORDERED = frozenset(
    {"intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Datasets whose items differ between processes with different hash seeds (found by deriving every
dataset with several).
"""

UNSEEDED = frozenset({"codeio", "list_functions", "pool_matrix"})
"""Datasets that draw from, or seed, the global random state of Python or numpy. It is seeded for
each item and restored afterwards.
"""

MAX_ITEMS = 2**30
"""Items of a dataset under one seed. Seeds of training and of held-out tasks, which are a dataset's
size apart, then fit into what a task's reference can hold.
"""

_MOST_KEYS_TOLD = 4
CACHED_DATASETS = 64
CACHED_ITEMS = 256


class TaskError(ValueError):
    """A task cannot be derived. The message names dataset, cause and remedy; `reason` is a short
    word for metrics.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type[TaskError], tuple[str, str]]:
        """Keeps both arguments when the error is pickled between processes; by default only the
        message would survive.
        """
        return type(self), (self.reason, str(self))

    @property
    def only_this_item(self) -> bool:
        """Check whether another item of the dataset may work. A few datasets fail on one item in
        thousands, for instance by dividing by zero.
        """
        return self.reason == "task_underivable"


class TaskConfigError(TaskError):
    """A node's own task sources cannot be used (`check_specs`)."""


class Item(NamedTuple):
    """A derived task with the objects that its scorer needs: reasoning-gym's dataset (None for a
    row of a file) and its raw entry.
    """

    task: Task
    dataset: Any
    entry: dict[str, Any]


def derive_task(ref: TaskRef) -> Task:
    """Derive a task. Pure: the result depends only on `ref` and the version of reasoning-gym, or on
    a file's rows, whose name contains their hash.

    Raises:
        TaskError: unknown dataset, refused or unsuitable configuration, index outside the dataset,
            or a failure of the dataset itself.
    """
    return derive_item(ref).task


def dataset_size(dataset: str, config: str) -> int:
    """Number of items under one seed: `size` in the configuration, or else reasoning-gym's default.
    For a file, its number of rows.

    Raises:
        TaskError: as `derive_task`.
    """
    if is_file_name(dataset):
        return len(_rows(dataset, config))
    return _size(_dataset(dataset, config, 0), dataset)


def task_ref(dataset: str, config: str = "{}", *, seed: int, index: int) -> TaskRef:
    """The reference of an item of this node's own, with the package that derives it here."""
    package, its_version = package_of(dataset)
    return TaskRef(dataset=dataset, package=package, version=its_version, config=config, seed=seed, index=index)


def package_of(dataset: str) -> tuple[str, str]:
    """The package that derives a dataset's tasks here, and its version; empty for a file's rows. A
    dataset of no installed package is taken for one of reasoning-gym's.
    """
    if is_file_name(dataset):
        return "", ""
    return TASK_SOURCES.distributions[dataset] if from_package(dataset) else ("reasoning-gym", _reasoning_gym_version())


@lru_cache(maxsize=1)
def _reasoning_gym_version() -> str:
    return version("reasoning-gym")


def dataset_names() -> list[str]:
    """Names of all datasets that tasks can come from, sorted."""
    return sorted({*datasets(), *TASK_SOURCES.installed} - REFUSED_DATASETS.keys())


def from_package(dataset: str) -> bool:
    """Check whether an installed task source makes this dataset's tasks. A name of reasoning-gym's
    is never a package's.
    """
    return dataset in TASK_SOURCES.installed and dataset not in datasets()


def preload_sources(names: Iterable[str]) -> None:
    """Import task sources of installed packages early. A failure is not reported here; it is raised
    when the source is needed.
    """
    for name in names:
        with suppress(ValueError):
            TASK_SOURCES.load(name)


@lru_cache(maxsize=CACHED_ITEMS)
def derive_item(ref: TaskRef) -> Item:
    """`derive_task`, together with what scoring needs. The latest `CACHED_ITEMS` results are
    cached.
    """
    if is_file_name(ref.dataset):
        return _row_item(ref)
    # decimal_arithmetic sets the precision of the whole process from its configuration.
    with decimal.localcontext(decimal.DefaultContext):
        return _derived(ref)


def _derived(ref: TaskRef) -> Item:
    """Any exception of the dataset's code becomes a failure of this item, because reasoning-gym
    raises all kinds of exceptions and a foreign reference must not end a verifier.
    """
    dataset = _dataset(ref.dataset, ref.config, ref.seed)
    size = _size(dataset, ref.dataset)
    if ref.index >= size:
        raise TaskError("task_index", f"{ref.dataset}: index {ref.index} is outside the dataset's {size} items; use a lower one")
    try:
        entry = _seeded_item(dataset, ref) if ref.dataset in UNSEEDED else dataset[ref.index]
        answer, metadata = None if entry["answer"] is None else _text(entry["answer"]), canonical_json(entry.get("metadata", {}))
        if from_package(ref.dataset):
            task = _package_task(ref, entry, answer, metadata)
        else:
            task = text_task(ref, _text(entry["question"]), answer, metadata)
        if len(task.text) + len(answer or "") + len(metadata) > MAX_TEXT_CHARS:
            decode(encode(task), Task)  # other processes could not read it
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as `plugin_errors` does, which costs a tenth of the time of a cheap item
        raise TaskError(
            "task_underivable",
            f"{ref.dataset}: item {ref.index} of seed {ref.seed} under {ref.config[:200]} cannot be generated: {failure(error)}; "
            + ("correct its package" if from_package(ref.dataset) else "change the dataset's config"),
        ) from error
    return Item(task, dataset, entry)


def _row_item(ref: TaskRef) -> Item:
    rows = _rows(ref.dataset, ref.config)
    if ref.index >= len(rows):
        raise TaskError("task_index", f"{ref.dataset}: index {ref.index} is outside the file's {len(rows)} rows; use a lower one")
    # The seed is ignored: a row is the same under all of them.
    question, answer = rows.row(ref.index)
    task = row_task(ref, question, answer)
    return Item(task, None, {"question": task.text, "answer": answer, "metadata": {}, "rows": rows})


def _rows(dataset: str, config: str) -> FileRows:
    rows = find_rows(dataset)
    if rows is None:
        raise TaskError("task_dataset", f"{dataset}: this node has no file with these rows; add it as a [[tasks]] entry")
    if config != "{}":
        raise TaskError("task_config", f"{dataset}: config {config[:200]}: a file has no settings; use {{}}")
    return rows


def forget_derived() -> None:
    """Clear the caches of datasets and items."""
    derive_item.cache_clear()
    _dataset.cache_clear()


@lru_cache(maxsize=CACHED_DATASETS)
def _dataset(name: str, config: str, seed: int) -> Any:
    """Refused names are checked first, so that an installed package cannot bring one back. The
    configuration is checked against the dataset's fields here, because the dataset would ignore a
    misspelt key or fail with a message about a constructor.
    """
    registry = datasets()
    if name in REFUSED_DATASETS:
        raise TaskError("task_dataset", f"{name} cannot be used: {REFUSED_DATASETS[name]}")
    if from_package(name):
        return _installed(name, config, seed)
    if name not in registry:
        hint = did_you_mean(name, dataset_names()) or "`swarm task list` shows all names"
        raise TaskError("task_dataset", f"{name}: neither reasoning-gym nor an installed package has this dataset; {hint}")
    if name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED") != "0":
        raise TaskError(
            "task_underivable",
            f"{name}: its items depend on Python's hash seed, so other nodes could not check them; "
            "start every process with PYTHONHASHSEED=0 or use another dataset",
        )
    try:
        values = parse_config(config, name)
    except ValueError as error:
        raise TaskError("task_config", f"{name}: config {config[:200]}: {error}") from None
    dataset_class, config_class = registry[name]
    fields = config_class.__dataclass_fields__
    # A sender chooses the keys, so not all of them are told.
    if unknown := [key for key in values if key not in fields][:_MOST_KEYS_TOLD]:
        known = sorted(fields.keys() - {"seed"})
        hints = {key: did_you_mean(key, known) or f"settings are {', '.join(known)}" for key in unknown}
        told = "; ".join(f"config key {key!r} is unknown; {hint}" for key, hint in hints.items())
        raise TaskError("task_config", f"{name}: {told}")
    try:
        made = config_class(**values, seed=seed)
        if hasattr(made, "validate"):
            made.validate()
        return dataset_class(config=made)
    except Exception as error:
        raise TaskError(
            "task_config", f"{name}: config {config[:200]} is refused by the dataset: {failure(error)}; correct that setting"
        ) from error


def _installed(name: str, config: str, seed: int) -> Any:
    with plugin_errors(lambda why: TaskError("task_config", f"{name}: config {config[:200]} under seed {seed} is refused: {why}")):
        dataset = TASK_SOURCES.load(name)(parse_config(config, name), seed)
        len(dataset)
        return dataset


def _seeded_item(dataset: Any, ref: TaskRef) -> dict[str, Any]:
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(ref.seed + ref.index)
    np.random.seed((ref.seed + ref.index) % 2**32)
    try:
        entry: dict[str, Any] = dataset[ref.index]
        return entry
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _size(dataset: Any, name: str) -> int:
    try:
        size = len(dataset)
    except PACKAGE_FAILURES as error:
        raise TaskError("task_config", f"{name}: its `__len__` fails: {failure(error)}; correct it") from error
    if not 1 <= size <= MAX_ITEMS:
        remedy = "let its `__len__` return" if from_package(name) else "set `size` to"
        bound = "at least 1" if size < 1 else f"at most {MAX_ITEMS:,}"
        raise TaskError("task_config", f"{name}: its size is {size}; {remedy} {bound}")
    return size


def _package_task(ref: TaskRef, entry: Mapping[str, Any], answer: str | None, metadata: str) -> Task:
    """A task of an installed package. Raises an error if no other process could read it: a text is
    too long, or is not Unicode.
    """
    prompt = read_prompt(entry["prompt"] if "prompt" in entry else _text(entry["question"]))
    if not prompt[-1].text.strip():
        raise ValueError("its question is empty")
    if prompt[-1].role == "assistant":
        raise ValueError("its prompt ends with the assistant: let it end with what is asked")
    task = Task(ref=ref, prompt=prompt, key="0" * 64, answer=answer, metadata=metadata)
    task = msgspec.structs.replace(task, key=content_key(task, entry.get("key")))
    return decode(encode(task), Task)


def _text(value: Any) -> str:
    # A package's own kind of text is not encoded by msgspec.
    return str.__str__(value) if isinstance(value, str) else canonical_json(value)


# reasoning-gym's datasets, imported without matplotlib.
#
# Two of them use cellpylib, which imports matplotlib to draw what is never drawn here. Without it a
# scorer process starts in two thirds of the time and takes 30 MB less.


_DRAWING = (
    "matplotlib",
    "matplotlib.animation",
    "matplotlib.collections",
    "matplotlib.pyplot",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""What cellpylib imports in order to draw."""


def datasets() -> dict[str, tuple[Any, Any]]:
    """reasoning-gym's registry: a dataset's name to its class and the class of its config. The
    first call imports all of reasoning-gym, which takes most of a second.
    """
    if "reasoning_gym" not in sys.modules:
        with _without_drawing():
            import reasoning_gym  # noqa: F401  # importing it fills the registry
    from reasoning_gym.factory import DATASETS

    registry: dict[str, tuple[Any, Any]] = DATASETS
    return registry


@contextmanager
def _without_drawing() -> Iterator[None]:
    """Let imports of matplotlib find empty modules. Afterwards it can be imported as ever."""
    if any(name in sys.modules for name in _DRAWING):
        yield  # it is there already, or somebody is importing it
        return
    empty = {name: ModuleType(name) for name in _DRAWING}
    empty["mpl_toolkits.mplot3d"].Axes3D = None  # type: ignore[attr-defined]  # imported by name
    sys.modules.update(empty)
    try:
        yield
    finally:
        for name in _DRAWING:
            sys.modules.pop(name, None)


# Rules for which dataset configurations are allowed.
#
# A foreign node chooses the configuration of its tasks, and reasoning-gym passes some of its texts
# to `eval` or sympy's parser (`basic_arithmetic` evaluates expressions built from `operators`; the
# integration scorers parse expressions built from `symbols`). So a text in a configuration must be
# a word or an operator sign, never anything that can be called.


MAX_CONFIG_DEPTH = 4
MAX_LIST = 1000
MAX_MAGNITUDE = 10**12

REFUSED_DATASETS = {
    "composite": "it nests other datasets and their scorers; give each of them its own [[tasks]] entry with a weight",
}

REFUSED_SETTINGS = {
    "figlet_font": {"static_word": "it makes one word the answer of every task"},
    "polynomial_equations": dict.fromkeys(
        ("exp_distance_factor", "penalty_missing_factor", "penalty_extra_factor"),
        "it says how wrong an answer may be, which is for the node that scores and not for the one that sends",
    ),
}
"""Settings that no configuration may contain, by dataset, because with them a sender would choose
the answer or the scorer's tolerance.
"""

_WORD = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_ -]{0,62}[A-Za-z0-9_])?(\.[A-Za-z0-9]{1,8})?")
_SIGN = re.compile(r"[-+*/%^&|<>=,.:; ]{0,3}")


def parse_config(config: str, dataset: str = "") -> dict[str, Any]:
    """The configuration of a task reference as keyword arguments for this dataset.

    Raises:
        ValueError: the text is not a JSON object, or contains something that no dataset needs (see
            the module's docstring).
    """
    try:
        values = json.loads(config, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    if "seed" in values:
        raise ValueError("`seed` belongs to the task reference, not to the configuration")
    refused = REFUSED_SETTINGS.get(dataset, {})
    for key, value in values.items():
        if not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise ValueError(f"{key[:64]!r} is not the name of a setting")
        if key in refused:
            raise ValueError(f"{key} may not be set: {refused[key]}; omit it")
        _check(key, value, 0)
    return values


def _check(key: str, value: Any, depth: int) -> None:
    """A sender chooses this configuration, and every verifier builds the dataset from it. Without
    these limits a stranger would choose how large the dataset is.
    """
    if depth > MAX_CONFIG_DEPTH:
        raise ValueError(f"{key}: nested more than {MAX_CONFIG_DEPTH} deep")
    if isinstance(value, str):
        if not _WORD.fullmatch(value) and not _SIGN.fullmatch(value):
            raise ValueError(f"{key}: {value[:40]!r} is neither a plain word nor an operator sign")
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int | float):
        if abs(value) > MAX_MAGNITUDE:
            raise ValueError(f"{key}: magnitude above {MAX_MAGNITUDE:.0e}")
    elif isinstance(value, list):
        if len(value) > MAX_LIST:
            raise ValueError(f"{key}: more than {MAX_LIST} entries")
        for item in value:
            _check(key, item, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check(f"{key}.{name[:64]}", name, depth + 1)
            _check(f"{key}.{name[:64]}", item, depth + 1)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


# Canonical JSON: equal values give the same text in every process, whatever container holds
# them.


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces.

    Tuples and arrays become lists, sets become lists sorted by their own JSON, mapping keys become
    strings, dates become ISO 8601, NaN and infinities become strings (JSON has none), anything else
    its `str`, unless that would contain a memory address.
    """
    try:
        return _FAST.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):
        # Keys that JSON does not have, keys of several types, and NaN: the slower path handles all
        # of them.
        return _ENCODER.encode(_plain(value))


def _plain(value: Any) -> Any:
    """The order of the checks matters: a bool is an int, numpy's float64 is a float, and an enum
    may be a str or an int. Two nodes must derive the same text from the same value; otherwise
    honest groups are refused as `task_mismatch`.
    """
    if value is None or isinstance(value, bool | str) and not isinstance(value, Enum):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((_plain(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal | Fraction):
        return str(value)
    return _described(value)


_FAST = msgspec.json.Encoder(order="sorted")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(_plain(key), sort_keys=True)


def _described(value: Any) -> str:
    # The default repr contains a memory address, which differs between processes.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
