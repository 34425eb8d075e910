"""Question and answer of a row: from the columns that the configuration names, else from those of
the usual names, as texts that a message and a scorer can take; and the columns that its reward
gets, with the types that they have in the file.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from shared.contracts.limits import MAX_PROMPT_MESSAGES, MAX_TEXT_CHARS
from shared.contracts.messages import PromptMessage
from shared.tasks.answers import MAX_ANSWER_CHARS
from shared.tasks.file_formats import MAX_DIGITS, PACKED, TOO_MANY_DIGITS, Row, Unusable, rows_of
from shared.tasks.file_rows import Asked, asked_of
from shared.tasks.prompt import prompt_text, read_prompt, row_messages

USUAL = {
    "question": ("prompt", "question", "problem", "messages"),
    "answer": ("answer", "ground_truth", "final_answer", "solution", "reward_model.ground_truth"),
}
"""The names that published datasets give to a setting's column. If it is not set, the first that
the first row with one of them has is taken.
"""
_NAMES_KEPT = 200
_NAME_KEPT_CHARS = 200


class TextRow(NamedTuple):
    """`row`: where it is, and what is wrong with the whole of it; its values are left out, but if
    it lacks a column, it has the names of those that it has. `lacking`: the columns that it lacks.
    `problems`: what is wrong with others. `texts`: question, answer and what else the reward gets;
    empty if anything is wrong. `asked`: what the question is known by in another form.
    """

    row: Row
    lacking: Sequence[str] = ()
    problems: Sequence[str] = ()
    texts: tuple[str, ...] = ()
    asked: Asked = Asked(0)


class Columns:
    """The columns of question and answer. Each is named by the configuration, as a column, a path
    into one (`reward_model.ground_truth`) or a text with columns in braces; or it is found among
    the `USUAL` names when rows are read.
    """

    def __init__(
        self, question: str = "", answer: str = "", used: Collection[str] | None = (), *, keeps_messages: bool = False
    ) -> None:
        """`used`: the columns that the reward gets; None for all. `keeps_messages`: a row tells
        whether its prompt was messages, as the reward then gets completions as messages.

        Raises:
            ValueError: braces do not match.
        """
        self.used = None if used is None else frozenset(used)
        self.keeps_messages = keeps_messages
        self.names: dict[str, None] = {}
        """The columns that the files have, the first `_NAMES_KEPT` of them."""
        self.configured = {"question": question, "answer": answer}
        self._parts = {setting: _template(setting, text) for setting, text in self.configured.items()}
        self.found: dict[str, str] = {}
        """Of settings that are not set, the column that was taken."""
        self.passed_over: dict[str, list[str]] = {}
        """And the other columns that could have been meant."""

    def find(self, has: Callable[[str], bool]) -> None:
        """Take the usual names for what is neither set nor found yet, of columns of which `has` is
        true.
        """
        for setting, names in USUAL.items():
            if not self.configured[setting] and setting not in self.found and (there := [name for name in names if has(name)]):
                self.found[setting], *self.passed_over[setting] = there

    def needed(self, setting: str) -> list[str]:
        """The columns of a setting. One that is not found yet is called by its own name."""
        if parts := self._parts[setting]:
            return list(dict.fromkeys(column for _, column in parts if column is not None))
        return [self.configured[setting] or self.found.get(setting, setting)]

    def note_names(self, names: Iterable[str]) -> None:
        if len(self.names) < _NAMES_KEPT:
            new = (name for name in names if name not in self.names)
            self.names.update((name[:_NAME_KEPT_CHARS], None) for name in islice(new, _NAMES_KEPT - len(self.names)))

    def wanted(self, names: Sequence[str], has: Callable[[str], bool]) -> list[str]:
        """All columns that are read of a table with these names; of others `has` tells."""
        self.find(has)
        self.note_names(names)
        used = self.names if self.used is None else sorted(self.used)
        return list(dict.fromkeys([*self.needed("question"), *self.needed("answer"), *(name for name in used if name in names)]))

    def value(self, setting: str, values: Mapping[str, Any]) -> Any:
        """Raises KeyError for a column that is not there, and ValueProblem."""
        if parts := self._parts[setting]:
            return "".join(text if column is None else text + _inserted(column, value_at(values, column)) for text, column in parts)
        return value_at(values, self.needed(setting)[0])

    def asked(self, values: Mapping[str, Any], question: str, answer: str) -> Asked:
        """Name what a row asks, whatever the form. `question`, `answer`: its texts."""
        if self._parts["question"]:
            inserted = [value_at(values, name) for name in sorted(self.needed("question"))]
            said = [each for value in inserted for each in _said(value)]
        else:
            said = row_messages(question)
        system = "\0".join(text for role, text in said if role == "system")
        return asked_of((text for role, text in said if role != "system"), answer, system)

    def further(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """The part of a row that the reward gets besides question and answer as texts, as JSON;
        empty for nothing. `texts`: these, by setting. Raises ValueProblem for a column that the
        reward names and that JSON cannot hold.
        """
        found: dict[str, Any] = {"messages": True} if self.keeps_messages and self._is_messages(values) else {}
        if self.used is not None and not self.used:
            return json.dumps(found) if found else ""
        read = {self.needed(setting)[0]: text for setting, text in texts.items() if not self._parts[setting]}
        kept = {}
        for name in sorted(self.names if self.used is None else self.used):
            value = values.get(name)
            if value is None or read.get(name) == value:
                continue
            try:
                kept[name] = _raw(value)
            except ValueProblem as problem:
                if self.used is not None:
                    raise ValueProblem(f"column {name!r}, which the reward names, {problem}") from None
        if kept:
            found["columns"] = kept
        if not self._parts["answer"] and not isinstance(raw := self.value("answer", values), str):
            found["answer"] = _raw(raw)
        text = json.dumps(found, ensure_ascii=False) if found else ""
        if len(text) > MAX_TEXT_CHARS:
            raise ValueProblem(
                f"the columns that the reward gets have {len(text):,} characters, and a row holds at most {MAX_TEXT_CHARS:,}: "
                "name those that it needs in the place of **columns, or shorten them"
            )
        return text

    def _is_messages(self, values: Mapping[str, Any]) -> bool:
        return not self._parts["question"] and isinstance(self.value("question", values), list)

    def note(self) -> str:
        """Name the columns that were found, if a user may have meant others; else empty."""
        if not any(self.passed_over.values()):
            return ""
        told = []
        for setting, column in self.found.items():
            others = self.passed_over[setting]
            told.append(f"{setting} = {column!r}" + (f" (not {' or '.join(map(repr, others))})" if others else ""))
        return f"read with {', '.join(told)}: set them to read other columns"


def _template(setting: str, text: str) -> list[tuple[str, str | None]]:
    """Texts, each with the column that follows it; empty for the name of a column."""
    if "{" not in text and "}" not in text:
        return []
    try:
        parts = [
            (literal, name, bool(name is not None and (form or conversion))) for literal, name, form, conversion in _PARSE(text)
        ]
    except ValueError as error:
        raise ValueError(f"{setting} = {text!r}: {error}: put columns in braces, and write braces of the text twice") from None
    for _, name, formatted in parts:
        if name == "" or formatted:
            raise ValueError(
                f"{setting} = {text!r}: braces hold the name of a column alone, {{nums}}; write braces of the text twice"
            )
    if all(name is None for _, name, _ in parts):
        raise ValueError(f"{setting} = {text!r}: it names no column, so that it would be the same for all rows: put one in braces")
    return [(literal, name) for literal, name, _ in parts]


_PARSE = string.Formatter().parse


def value_at(values: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a path of keys into one. Raises KeyError."""
    if column in values:
        return values[column]
    head, dot, rest = column.partition(".")
    if not dot or not isinstance(inner := values[head], Mapping):
        raise KeyError(column)
    return value_at(inner, rest)


def has_value(values: Mapping[str, Any], column: str) -> bool:
    """Return whether there is such a column, or such a path into one."""
    try:
        value_at(values, column)
    except KeyError:
        return False
    return True


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Columns, and the paths into those that are objects."""
    for name, value in values.items():
        yield f"{prefix}{name}"[:_NAME_KEPT_CHARS]
        if isinstance(value, Mapping) and not prefix:
            yield from _names(value, f"{name}.")


def text_rows(files: Sequence[Path], columns: Columns) -> Iterator[TextRow]:
    """All rows in order, with the texts of question and answer.

    Raises:
        FileSourceError: the package that reads such files is not installed.
    """
    for row in rows_of(files, columns.wanted):
        columns.find(lambda name, values=row.values: has_value(values, name))  # type: ignore[misc]
        if row.file.suffix not in PACKED:  # those have paths among their names
            columns.note_names(row.values)
        yield _as_texts(row, columns)


def _as_texts(row: Row, columns: Columns) -> TextRow:
    """Looks at every column, so that a row's mistakes are reported together."""
    place = Row({}, row.file, row.number, row.problem)
    if row.problem:
        return TextRow(place)
    lacking, problems, texts = [], [], {}
    for setting, checked in (("question", _question), ("answer", _answer)):
        needed = columns.needed(setting)
        if missing := [name for name in needed if not has_value(row.values, name)]:
            lacking += missing
            continue
        where = f"column {needed[0]!r}" if len(needed) == 1 else f"`{setting}`"
        try:
            texts[setting] = checked(columns.value(setting, row.values))
        except ValueProblem as problem:
            problems.append(f"{where}: {problem}")
    further, asked = "", Asked(0)
    try:
        if len(texts) == 2:
            further = columns.further(row.values, texts)
            asked = columns.asked(row.values, texts["question"], texts["answer"])
    except ValueProblem as problem:
        problems.append(str(problem))
    if lacking:
        place = place._replace(values=dict.fromkeys(islice(_names(row.values), _NAMES_KEPT)))
    found = () if lacking or problems else (*texts.values(), further)
    return TextRow(place, tuple(dict.fromkeys(lacking)), problems, found, asked)


def _raw(value: Any) -> Any:
    """The value as it was in the file, of what JSON can hold; times as ISO text, and durations in
    seconds. Raises ValueProblem.
    """
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {_unbroken(str(name)): _raw(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [each if isinstance(each, int | float) else _raw(each) for each in value]
    if isinstance(value, str):
        return _unbroken(value)
    if isinstance(value, Unusable):
        raise ValueProblem(value.why)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise ValueProblem(f"is a {type(value).__name__}, which a reward cannot be given: store it as text or number")


def _unbroken(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueProblem("holds half a character (a lone surrogate): write it as UTF-8") from None
    return text


def _inserted(column: str, value: Any) -> str:
    """A column's value within a text; lists of texts and numbers as JSON, of messages their texts
    as a model without a chat template gets them.
    """
    try:
        if _are_messages(value):
            return "\n\n".join(message.text for message in _checked_prompt(value))
        if isinstance(value, list | tuple):
            return (
                f"[{', '.join(json.dumps(each, ensure_ascii=False) if isinstance(each, str) else as_text(each) for each in value)}]"
            )
        return as_text(value)
    except ValueProblem as problem:
        raise ValueProblem(f"{{{column}}} {problem}") from None


def _said(value: Any) -> list[tuple[str, str]]:
    """Role and text of each message that a template inserts; of another value its text."""
    return [(each.role, each.text) for each in read_prompt(value)] if _are_messages(value) else [("user", _inserted("", value))]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


class ValueProblem(ValueError):
    """A value cannot be a question or an answer. The message continues a sentence that begins with
    the column's name.
    """


def as_text(value: Any) -> str:
    """The value as text: text unchanged; numbers in digits, without exponent and superfluous zeros;
    `true` and `false`.

    3, 3.0 and the decimal 3.00 all become `3`, because file formats differ in which of them they
    can store.

    Raises:
        ValueProblem: null, not a finite number, one of more than `MAX_DIGITS` digits, composed of
            several values, or unusable.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Unusable):
        raise ValueProblem(value.why)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        raise ValueProblem("has no value (null): give it one or remove the row")
    if isinstance(value, int):
        return _digits(Decimal(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueProblem(f"is {value}, which is not a number that answers can be compared with: write it as text")
        return _digits(Decimal(repr(value)))
    if isinstance(value, Decimal) and value.is_finite():
        return _digits(value)
    if isinstance(value, list | tuple | dict):
        raise ValueProblem("consists of several values (a list or an object): make it one text or number")
    raise ValueProblem(f"is a {type(value).__name__}, neither text nor number: store it as text")


def _digits(value: Decimal) -> str:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "an infinity or NaN, which the caller refuses"
    if max(value.adjusted() + 1, 1) + max(-exponent, 0) > MAX_DIGITS:
        raise ValueProblem(TOO_MANY_DIGITS.why)
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _text(value: Any) -> str:
    """Text that is not empty and can be packed. A lone surrogate passes as JSON and would fail only
    when the group is packed, hours later. Raises ValueProblem.
    """
    text = as_text(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueProblem("holds half a character (a lone surrogate): write it as UTF-8") from None
    if not text.strip():
        raise ValueProblem("is empty: give it a text or remove the row")
    return text


def _question(value: Any) -> str:
    """A text, or messages as `prompt_text` writes them. Raises ValueProblem."""
    is_prompt = isinstance(value, list) and all(isinstance(each, dict) for each in value)
    text = _text(_messages_text(value) if is_prompt else value)
    if not is_prompt and text.startswith("\0"):
        raise ValueProblem("begins with a zero byte: remove it")
    if len(text) > MAX_TEXT_CHARS:
        raise ValueProblem(f"has {len(text):,} characters, but a message can hold at most {MAX_TEXT_CHARS:,}: shorten it")
    return text


def _messages_text(messages: Sequence[Any]) -> str:
    prompt = _checked_prompt(messages)
    try:
        return prompt_text(prompt)
    except ValueError as error:
        raise ValueProblem(str(error)) from None


def _checked_prompt(messages: Sequence[Any]) -> list[PromptMessage]:
    """Messages that a model can answer. Raises ValueProblem."""
    try:
        prompt = read_prompt(messages)
    except ValueError as error:
        raise ValueProblem(str(error)) from None
    if prompt[-1].role != "user":
        raise ValueProblem(f"ends with a message of the role {prompt[-1].role}: let it end with the user, who is answered")
    if not prompt[-1].text.strip():
        raise ValueProblem("ends with a message that is empty: give it a text or remove the row")
    if len(prompt) > MAX_PROMPT_MESSAGES:
        raise ValueProblem(f"has {len(prompt)} messages, and a prompt has at most {MAX_PROMPT_MESSAGES}: shorten it")
    return prompt


def _answer(value: Any) -> str:
    """A reference answer that is not too long to be scored. Raises ValueProblem."""
    text = _text(value)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueProblem(f"has {len(text):,} characters, but an answer of more than {MAX_ANSWER_CHARS:,} earns 0: shorten it")
    return text
