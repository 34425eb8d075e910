"""Checks a node's task sources once, at the start, instead of failing at the first draw that uses
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shared.contracts.messages import TaskRef
from shared.tasks.derive import TaskConfigError, TaskError, dataset_size, derive_item
from shared.tasks.file_formats import FileSourceError
from shared.tasks.file_source import told, with_row_name
from shared.tasks.held_out import check_share, shares
from shared.tasks.verifiers import DEFAULT_VERIFIER, Verifier, load_verifier

if TYPE_CHECKING:
    from shared.config import TaskSpec


FILE_ROWS_CHECKED = 1000
"""Number of rows, spread over a file, whose answers are shown to the verifier at the start. An
answer that the verifier cannot judge would otherwise fail groups later.
"""


def check_specs(specs: Sequence[TaskSpec], held_out: int = 0) -> None:
    """Derive one item of each source, or many of a file, and let its verifier accept it.

    `held_out`: number of questions that evaluation takes; a file must have at least as many left
    for training.

    Raises:
        TaskConfigError: with one line per problem of a source that names the dataset, the config
            key if there is one, the cause and the remedy.
    """
    found = [
        (position, error)
        for position, (spec, share) in enumerate(zip(specs, shares(specs, held_out), strict=True))
        for error in _problems(spec, share)
    ]
    if found:
        raise TaskConfigError(found[-1][1].reason, told([(position, str(error)) for position, error in found]))


def source_problems(specs: Sequence[TaskSpec], held_out: int = 0, places: Sequence[int] = ()) -> str:
    """All that `with_rows` and `check_specs` would refuse, together; empty if nothing.

    `places`: each source's place in the user's list, if that has others too.
    """
    found: list[tuple[int, str]] = []
    for position, (spec, share) in enumerate(zip(specs, shares(specs, held_out), strict=True)):
        place = places[position] if places else position
        try:
            named = with_row_name(spec)
        except FileSourceError as error:
            found.append((place, str(error)))
        else:
            found += [(place, str(error)) for error in _problems(named, share)]
    return told(found) if found else ""


def _problems(spec: TaskSpec, share: int) -> Iterator[TaskError]:
    """What is wrong with one source. A verifier that is not there does not hide a wrong dataset,
    nor the reverse.
    """
    verify: Verifier | None = None
    if spec.source == "file" or spec.verifier != DEFAULT_VERIFIER:
        try:
            verify = load_verifier(spec.verifier)
        except TaskError as error:
            yield error
    try:
        size = dataset_size(spec.dataset, spec.canonical_config)
        if spec.source == "file":
            check_share(spec, share)
            if verify:
                _check_file(spec, size, verify)
            return
        item = derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=0))
        if verify:
            verify(item)
    except TaskError as error:
        yield error


def _check_file(spec: TaskSpec, size: int, verifier: Verifier) -> None:
    for number in range(min(size, FILE_ROWS_CHECKED)):
        index = number * size // min(size, FILE_ROWS_CHECKED)
        try:
            verifier(derive_item(TaskRef(dataset=spec.dataset, seed=1, index=index)))
        except TaskError as error:
            raise TaskError(error.reason, f"{spec.path}: row {index + 1}: {error}") from None
