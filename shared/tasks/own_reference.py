"""Leaves out questions whose own reference answer earns nothing: no answer would, for ever.

`exact`, `final_number` and `math` are asked about the reference answer as the documentation asks
for answers, `<answer>...</answer>`; as references are read as answers are, of a text such as
`... #### 72` that is the 72. Of a file, the start looks at many rows, and a draw at each of the
others before its first use. What another verifier pays is its author's to decide.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shared.contracts.messages import TaskRef
from shared.tasks.answers import CLOSING_TAG, OPENING_TAG, extract_answer
from shared.tasks.derive import Item, TaskError, derive_item
from shared.tasks.file_formats import place_in
from shared.tasks.file_rows import held, is_file_name
from shared.tasks.scoring import scorer_of

if TYPE_CHECKING:
    from shared.config import TaskSpec

VERIFIERS = frozenset({"exact", "final_number", "math"})
FILE_ROWS_CHECKED, ITEMS_CHECKED = 1000, 10
"""Rows of a file, spread over it, that are looked at in any case, and items of another source."""
CHECK_S, MORE_ROWS_S = 60.0, 2.0
"""Time for these rows, and for the file's others."""
_PLACES_TOLD, _REFERENCE_TOLD_CHARS = 5, 60


class LeftOut(NamedTuple):
    """Why no answer earns full marks. `cause`: the same for rows with the same mistake."""

    cause: str
    why: str


class Looked(NamedTuple):
    """Number of rows looked at, and those of them that are left out, by index."""

    rows: int
    left_out: dict[int, LeftOut]

    @property
    def mostly_left_out(self) -> bool:
        """Whether the verifier is not one for this file."""
        return 2 * len(self.left_out) > self.rows


def problem_of(verifier: str, item: Item) -> LeftOut | None:
    """Why the item's reference answer earns nothing; None if it does, or for another verifier."""
    if verifier not in VERIFIERS:
        return None
    try:
        score = scorer_of(verifier, item)
    except TaskError as error:
        return LeftOut("unreadable", str(error).removeprefix(f"{item.task.ref.dataset}: "))
    reference = item.task.answer or ""
    own = extract_answer(reference)
    given = None if own is None else extract_answer(f"{OPENING_TAG}{own}{CLOSING_TAG}")
    if given is not None and float(score(given)) == 1.0:
        return None
    said = f"the reference answer {_shortened(reference)!r}"
    if own is None:
        return LeftOut("no answer", f"{said} is only a thought, or mostly white space: write the answer alone")
    if own != reference.strip():
        remedy = "use final_number or math, which read references the same way, or keep only that"
        return LeftOut("read otherwise", f"of {said}, {_shortened(own)!r} is read as the answer and earns nothing: {remedy}")
    return LeftOut("unpaid", f"{said} earns nothing when it is given as an answer: write it as an answer is written, or remove it")


def is_left_out(spec: TaskSpec, ref: TaskRef) -> bool:
    """Whether no answer to this question of the source earns full marks. A row of a file is looked
    at once.
    """
    if spec.verifier not in VERIFIERS:
        return False
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    if not is_file_name(ref.dataset):
        # Each is another item, so that only their number is kept.
        is_left_out = problem_of(spec.verifier, derive_item(ref)) is not None
        known.items += 1
        known.items_left_out += is_left_out
        return is_left_out
    if ref.index not in known.looked_at:
        known.look(ref.index, derive_item(ref))
    return ref.index in known.left_out


def look(spec: TaskSpec, size: int) -> Looked:
    """Look at the references of many of a source's items.

    Raises:
        TaskError: an item cannot be derived.
    """
    known, started = _known(spec.dataset, spec.canonical_config, spec.verifier), time.monotonic()
    first = min(size, FILE_ROWS_CHECKED if spec.source == "file" else ITEMS_CHECKED)
    spread = dict.fromkeys(number * size // first for number in range(first))
    for count, index in enumerate((*spread, *(range(size) if spec.source == "file" and first < size else ()))):
        if time.monotonic() - started > (CHECK_S if count < first else MORE_ROWS_S):
            break
        if index in known.looked_at:
            continue
        try:
            known.look(index, derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=index)))
        except TaskError as error:
            if not index or not error.only_this_item:
                raise
    return Looked(len(known.looked_at), known.left_out)


def left_out(spec: TaskSpec) -> int:
    """Number of rows (of a file) or draws (of another source) that were left out so far."""
    if spec.verifier not in VERIFIERS:
        return 0
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    return len(known.left_out) if spec.source == "file" else known.items_left_out


def looked_at(spec: TaskSpec) -> int:
    """Number of rows or draws whose reference was looked at so far."""
    if spec.verifier not in VERIFIERS:
        return 0
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    return len(known.looked_at) if spec.source == "file" else known.items


def told(spec: TaskSpec, size: int) -> list[str]:
    """How many of a source's rows are left out of those looked at so far, and for each cause where
    the first ones are; empty for none.
    """
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    looked = Looked(len(known.looked_at), known.left_out)
    if not looked.left_out:
        return []
    of = f"its {size:,} rows" if looked.rows == size else f"the {looked.rows:,} rows looked at, of {size:,},"
    lines = [f"{spec.path or spec.dataset}: {len(looked.left_out):,} of {of} cannot earn full marks from verifier {spec.verifier}"]
    causes = Counter(each.cause for each in looked.left_out.values())
    for cause, count in causes.most_common():
        places = sorted(index for index, each in looked.left_out.items() if each.cause == cause)
        more = f" and {count - _PLACES_TOLD:,} more" if count > _PLACES_TOLD else ""
        lines.append(f"{_places(spec, places[:_PLACES_TOLD])}{more}: {looked.left_out[places[0]].why}")
    return lines


def _places(spec: TaskSpec, indexes: Iterable[int]) -> str:
    rows = held(spec.dataset)
    if rows is None or rows.places is None:
        return "items " + ", ".join(map(str, indexes))
    (file, number), *others = (rows.places.of(index) for index in indexes)
    begin = place_in(file, number)
    if others:
        begin = begin.removesuffix(f" {number}") + f"s {number}"
    return ", ".join([begin, *(str(place) if there == file else place_in(there, place) for there, place in others)])


def _shortened(text: str) -> str:
    """Its end, which is where answers are."""
    return text if len(text) <= _REFERENCE_TOLD_CHARS else f"...{text[-_REFERENCE_TOLD_CHARS:]}"


class _Known:
    """What has been found out about the rows of one source in this process."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self.looked_at: set[int] = set()
        self.left_out: dict[int, LeftOut] = {}
        self.items = self.items_left_out = 0

    def look(self, index: int, item: Item) -> None:
        problem = problem_of(self._verifier, item)
        if problem is not None:
            self.left_out[index] = problem
        self.looked_at.add(index)


@lru_cache(maxsize=64)
def _known(dataset: str, config: str, verifier: str) -> _Known:
    return _Known(verifier)
