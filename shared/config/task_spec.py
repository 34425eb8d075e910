"""A node's task sources: one `[[tasks]]` entry of its configuration each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import Section
from shared.registry import DEFAULT_VERIFIER


class TaskSpec(Section):
    """A task source: one reasoning-gym dataset with one configuration, or the user's own file."""

    source: Literal["reasoning_gym", "file"] = Field(
        "reasoning_gym",
        description="Where the questions come from: file, or reasoning_gym for any named dataset, an installed package's too.",
    )
    dataset: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9_]{0,62})?$",
        description="Dataset name; `swarm task list` lists them. For a file leave it empty, because the dataset is named after the "
        "file's rows (file_...), or give the name that you expect, so that any other file is refused.",
    )
    path: str = Field("", description="For source file: a .jsonl or .parquet file, or a folder saved by `datasets`.")
    question: str = Field("question", min_length=1, description="For source file: the column with the questions.")
    answer: str = Field("answer", min_length=1, description="For source file: the column with the reference answers.")
    weight: float = Field(1.0, gt=0, le=1_000_000, description="Share of draws, relative to the other task sources.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="The dataset's own settings, except `seed`, which each draw chooses."
    )
    verifier: str = Field(
        DEFAULT_VERIFIER,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="How answers are scored: reasoning_gym, exact, final_number, math, or a "
        "`swarm.verifiers` entry point. Without this setting a file is scored by exact; reasoning_gym is for its datasets alone.",
    )

    pass_at: float | None = Field(
        None,
        allow_inf_nan=False,
        description="The reward from which on an answer passes, unless its scorer says so itself. Without this setting full marks "
        "pass: 0.99 of a built-in verifier; of your own, the higher one of two rewards. With more than two there is no pass.",
    )

    @property
    def file_name(self) -> str:
        """The name by which people know a file: without its folder."""
        return Path(self.path).name or self.path

    @property
    def canonical_config(self) -> str:
        """The configuration as it is sent in a task reference: JSON with sorted keys and no
        spaces.
        """
        return json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    @field_validator("config")
    @classmethod
    def _no_seed(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "seed" in value:
            raise ValueError("`seed` is chosen by each task draw; remove it from the dataset's config")
        return value

    @model_validator(mode="before")
    @classmethod
    def _files_have_another_verifier(cls, values: Any) -> Any:
        return {"verifier": "exact", **values} if isinstance(values, dict) and values.get("source") == "file" else values

    @model_validator(mode="after")
    def _fits_its_source(self) -> TaskSpec:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if self.source == "file":
            if not self.path:
                yield 'source = "file" needs path, the file with the questions'
            if self.config:
                yield "a file has no settings: remove `config`"
            if self.verifier == "reasoning_gym":
                yield "verifier reasoning_gym scores only its own datasets: use exact, final_number or math with a file"
        elif not self.dataset:
            yield 'dataset is missing: name one (`swarm task list`), or set source = "file" and path'
        elif self.path or (self.question, self.answer) != ("question", "answer"):
            yield 'path, question and answer apply only to files: also set source = "file"'
