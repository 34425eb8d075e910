"""One group for the page: its completions, and how likely each token was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.contracts.codec import unpack_ids, unpack_logprobs
from shared.contracts.messages import Batch, Completion
from shared.contracts.wire import MessageError
from shared.text import cut_text, visible
from swarm_cli.dashboard.recent_groups import LEFT_CHARACTERS, summary
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.judge import Choice, Judge
from swarm_cli.rollouts.records import BatchedGroup, TrainedRecords, training_outcome
from swarm_cli.rollouts.shown import as_object, left_words

COMPLETIONS_SHOWN = 32
TEXT_CHARACTERS = 8_000
JUDGED_CHARACTERS = 240
TOKENS_SHOWN = 600
GROUPS_SHOWN = 128
LOWEST_LOGPROB = -9_999.0
"""An engine may report probability 0 for a token that it sampled. JSON in browsers has no infinity,
so a logprob of minus infinity would make the group's page unreadable."""


def step_object(node: str, batch: Batch, names: FileNames = UNNAMED) -> dict[str, Any]:
    """The groups of one step, in training order."""
    groups = [summary(node, batch, place, item).card(names) for place, item in enumerate(batch.items[:GROUPS_SHOWN])]
    left_out = len(batch.items) - len(groups)
    return {"node": node, "step": batch.number, "at": batch.created_at, "left_out": left_out, "groups": groups}


def group_object(
    node: str, batch: Batch, place: int, model_folder: Path, records: TrainedRecords, judge: Judge
) -> dict[str, Any] | None:
    """A group with its completions, and how the trainer used each, as far as `records` say; None if
    the batch has no such place.
    """
    if not 0 <= place < len(batch.items):
        return None
    item = batch.items[place]
    fate = training_outcome(records, batch.number, item.scored.group_id)
    whole = as_object(BatchedGroup(batch, item), fate, Choice(), judge)
    group = item.scored.group
    completions = []
    for told, completion in zip(whole["completions"][:COMPLETIONS_SHOWN], group.completions, strict=False):
        used = told["training"]
        measured = {measure: used.pop(f"token_{measure}", None) for measure in ("ratio", "weight")} if used else {}
        # Tokens are only the policy's; between its turns the text has what an environment said.
        warm = heat(completion, model_folder, measured) if completion.turn_chars is None else None
        read_as = told["judged"]["read_as"]
        judged = told["judged"] | {"read_as": None if read_as is None else cut_text(read_as, JUDGED_CHARACTERS)}
        completions.append(told | {"judged": judged, "text": cut_text(told["text"], TEXT_CHARACTERS), "heat": warm})
    return whole | {
        "node": node,
        "place": place,
        "places": len(batch.items),
        "waits": fate.yet,
        "used": fate.sentence(),
        "question": cut_text(group.task.text, TEXT_CHARACTERS),
        "reference": None if group.task.answer is None else cut_text(group.task.answer, TEXT_CHARACTERS),
        "model": visible(group.model.name, 120),
        "config": visible(group.task.ref.config, 400),
        "judged_by": judge.rules(item.scored),
        "completions": completions,
        "left": visible(left_words(item.scored), LEFT_CHARACTERS),
        "completions_left_out": len(group.completions) - len(completions),
    }


def heat(
    completion: Completion, model_folder: Path, measured: Mapping[str, list[float | None] | None] | None = None
) -> dict[str, Any] | None:
    """The tokens and their behaviour logprobs (natural logarithm). None if the sender did not share
    them.

    measured: the trainer's values for each token, by name; lists of another length are left out.
    `texts` is None if the node's tokenizer is not on this machine or is another one, because the
    tokens' texts would be a guess.
    """
    if completion.behaviour_logprobs is None:
        return None
    try:
        logprobs = unpack_logprobs(completion.behaviour_logprobs)
        ids = unpack_ids(completion.token_ids) if completion.token_ids is not None else None
    except MessageError:
        return None
    shown = logprobs[:TOKENS_SHOWN]
    texts = token_texts(ids, completion.text, model_folder) if ids is not None and len(ids) == len(logprobs) else None
    found = {name: values[:TOKENS_SHOWN] for name, values in (measured or {}).items() if values and len(values) == len(logprobs)}
    return found | {
        "logprob": [round(max(value, LOWEST_LOGPROB), 4) for value in shown],
        "texts": None if texts is None else [visible(text, 60) for text in texts[:TOKENS_SHOWN]],
        "left_out": len(logprobs) - len(shown),
    }


def token_texts(ids: list[int], text: str, model_folder: Path) -> list[str] | None:
    """The part of the text that each token adds; None unless together they give exactly `text`."""
    tokenizer = _tokenizer(model_folder)
    if tokenizer is None or len(ids) > TOKENS_SHOWN:
        return None
    try:
        if tokenizer.decode(ids) != text:
            return None
        pieces, before = [], ""
        for count, token_id in enumerate(ids, 1):
            whole = tokenizer.decode(ids[:count])
            # The end token, and a token with only part of a character, add no visible text.
            pieces.append(whole[len(before) :] or tokenizer.id_to_token(token_id) or "")
            before = whole
    except (OverflowError, TypeError):
        return None
    return pieces


@lru_cache(maxsize=2)
def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer  # imported late, because most requests do not need it

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises plain Exception if the file is missing or invalid
        return None
