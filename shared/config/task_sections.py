"""The sections on tasks and on held-out evaluation. Every field's description states its meaning,
its unit and the reason for its default.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import BaseUrl, Section
from shared.contracts.limits import MAX_REWARD_PARTS, MAX_TURNS
from shared.environment_files import DEFAULT_MAX_TURNS, TOOLS, EnvironmentSpec, tool_problem
from shared.hub_models import HUB, hub_data_problem
from shared.registry import DEFAULT_VERIFIER, TASK_SOURCES, VERIFIERS
from shared.reward_files import Part, code_id, found_from, has_rewards, name_of, parts_of, verifier_words
from shared.text import visible

_ENTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class WeightedReward(Section):
    """One of several rewards of a task source."""

    use: str = Field(description="A function in a Python file, as in `reward`, or a verifier's name.")
    weight: float = Field(1.0, ge=-1_000_000, le=1_000_000, description="What it is multiplied by in the sum.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """A text is the name, with weight 1."""
        if not isinstance(value, str | dict | WeightedReward):
            raise ValueError(f'{str(value)[:40]!r} names no reward: write "rewards.py:accuracy" or {{use = ..., weight = ...}}')
        return {"use": value} if isinstance(value, str) else value


class JudgeSection(Section):
    """The OpenAI-compatible server that a source's reward asks about this node's answers."""

    url: BaseUrl = Field("", description="Its base URL, such as http://localhost:8000/v1; its chat interface is asked.")
    model: str = Field("", description="The model's name on that server.")
    key_variable: str = Field(
        "",
        pattern=r"^[A-Za-z_0-9]*$",
        description="Environment variable with the API key for that server, of the verifier and the generator.",
    )
    calls_per_minute: int = Field(
        0, ge=0, le=1_000_000, description="Most requests a minute from one process; the others wait. 0: no limit."
    )
    tokens_per_day: int = Field(
        0,
        ge=0,
        description="Most tokens of prompts and replies in 24 hours of one process; then verdicts are unknown. 0: no limit.",
    )
    reply_tokens: int = Field(512, ge=1, le=65_536, description="Longest reply, with its thought if the judge thinks.")
    timeout_s: float = Field(60.0, gt=0, le=3600, description="Deadline for a reply, with further tries; then it is unknown.")


class TaskSpec(Section):
    """A task source: one reasoning-gym dataset with one configuration, or the user's own file."""

    source: Literal["reasoning_gym", "file"] = Field(
        "reasoning_gym",
        description="Where the questions come from: file (the default with `path`), or reasoning_gym for any named dataset, an "
        "installed package's too.",
    )
    dataset: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9_]{0,62})?$",
        description="Dataset name (`swarm task list`). Of a file leave it empty, or give the name that you expect (file_...), "
        "so that any other file is refused.",
    )
    path: str = Field(
        "",
        description="For source file: a .jsonl, .json, .csv or .parquet file, a folder saved by `datasets`, or a data set of the "
        "hub, hub:OWNER/NAME or hub:OWNER/NAME/PART.",
    )
    revision: str = Field("", description="Commit of a hub data set, all 40 digits; required, because the files can change.")
    question: str = Field(
        "",
        description="For source file: the column with the questions, or a text with columns in braces. Unset: the first of prompt, "
        "question, problem, messages.",
    )
    answer: str = Field(
        "",
        description="For source file: the column with the reference answers. Unset: the first of answer, ground_truth, "
        "final_answer, solution, reward_model.ground_truth.",
    )
    weight: float = Field(1.0, gt=0, le=1_000_000, description="Share of draws, relative to the other task sources.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="The dataset's own settings, except `seed`, which each draw chooses."
    )
    verifier: str = Field(
        DEFAULT_VERIFIER,
        description="How answers are scored: reasoning_gym (only its datasets), exact (the default of a file), final_number, "
        "math, judge (a rubric that `judge` is asked with), or a `swarm.verifiers` entry point.",
    )
    reward: str = Field(
        "",
        description="Instead of a verifier, a function in a Python file of yours: `rewards.py:accuracy`, from this file's folder.",
    )
    rewards: list[WeightedReward] = Field(
        default_factory=list,
        max_length=MAX_REWARD_PARTS,
        description='Instead of `reward`, several: `["rewards.py:accuracy", {use = "rewards.py:short", weight = 0.2}]`.',
    )
    sandbox: bool = Field(
        True,
        description="false: your reward runs as a process of its own with network, files and GPU, for this node's groups only; no "
        "group of another node is taken of this source.",
    )
    judge: JudgeSection = Field(default_factory=JudgeSection)
    environment: str = Field(
        "",
        description="What answers the policy turn by turn, and gives the reward: a class in a Python file of yours, "
        "`game.py:Game`, or a `swarm.environments` entry point.",
    )
    tools: list[str] = Field(
        default_factory=list,
        max_length=32,
        description="Functions that the policy may call before it answers: calculator, or your own, `tools.py:search`. "
        "The last turn is scored.",
    )
    max_turns: int = Field(
        DEFAULT_MAX_TURNS, ge=1, le=MAX_TURNS, description="Most turns of the policy in one answer, with an environment or tools."
    )
    pass_at: float | None = Field(
        None,
        allow_inf_nan=False,
        description="The reward from which on an answer passes. Unset: full marks (0.99 of a built-in verifier; of your own, "
        "the higher one of two rewards, and with more there is no pass), unless the scorer says so itself.",
    )

    @property
    def file_name(self) -> str:
        """The name by which people know a file: without its folder; of a hub data set all of it."""
        return self.path.removeprefix(HUB) if self.path.startswith(HUB) else Path(self.path).name or self.path

    @property
    def canonical_config(self) -> str:
        """The configuration as it is sent in a task reference: JSON with sorted keys and no
        spaces.
        """
        return json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    @property
    def turns(self) -> EnvironmentSpec | None:
        """The tools or environment of the policy's turns; None for answers of one turn."""
        if self.environment:
            return EnvironmentSpec(self.environment, max_turns=self.max_turns)
        tools = tuple(TOOLS.get(use, use) for use in self.tools)
        return EnvironmentSpec(tools=tools, verifier=self.verifier, max_turns=self.max_turns) if tools else None

    @property
    def scorer_name(self) -> str:
        """The name by which the sandbox knows what scores the answers."""
        turns = self.turns
        return self.verifier if turns is None else turns.name

    @property
    def scorer_id(self) -> str:
        """SHA-256 (hex) of all that makes a reward besides the answer and its task: the verifier's
        name, its package's version and source or its file, its judge, and `pass_at`. Rewards of two
        scorers cannot be compared.
        """
        if (turns := self.turns) is not None and turns.use:
            return hashlib.sha256(json.dumps([turns.id, self.pass_at]).encode()).hexdigest()
        if turns is not None:
            alone = self.model_copy(update={"tools": []}).scorer_id
            return hashlib.sha256(json.dumps([turns.id, alone]).encode()).hexdigest()
        if has_rewards(self.verifier):
            judge = [self.judge.url, self.judge.model] if self.judge.url else []
            return hashlib.sha256(json.dumps([code_id(self.verifier), self.pass_at, *judge]).encode()).hexdigest()
        return _scorer_id(self.verifier, self.dataset if self.verifier == DEFAULT_VERIFIER else "", self.pass_at)

    @field_validator("config")
    @classmethod
    def _no_seed(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "seed" in value:
            raise ValueError("`seed` is chosen by each task draw; remove it from the dataset's config")
        return value

    @model_validator(mode="before")
    @classmethod
    def _files_have_another_verifier(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("path") and "source" not in values:
            values = {"source": "file", **values}
        if isinstance(values.get("environment"), str) and values["environment"] and _is_unset(values.get("verifier")):
            values = {name: value for name, value in values.items() if name != "verifier"}
            most = values.get("max_turns", DEFAULT_MAX_TURNS)
            return {"verifier": EnvironmentSpec(values["environment"], max_turns=most).name, **values}
        if values.get("rewards") == [] and not values.keys() & {"reward", "verifier"}:
            raise ValueError("rewards = [] names no reward: write one, or omit it to score with a verifier")
        if name := _rewards_of(values):
            return {"verifier": name, **values}
        return {"verifier": "exact", **values} if values.get("source") == "file" else values

    @model_validator(mode="after")
    def _fits_its_source(self) -> TaskSpec:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="after")
    def _is_scored_one_way(self) -> TaskSpec:
        if problems := list(self._reward_problems()):
            raise ValueError("\n".join(problems))
        return self

    def _turn_problems(self) -> Iterator[str]:
        if self.environment and self.tools:
            yield "environment and tools are both given: keep one; the methods of an environment's class are its tools"
        if self.environment and (self.reward or self.rewards or self.verifier != self.scorer_name):
            yield "environment and a verifier or reward are both given: an environment gives the reward itself, so keep one"
        if not self.sandbox and (self.environment or self.tools):
            yield "sandbox = false applies only to a reward: environments and tools are played in the sandbox, so remove it"
        if self.judge.url and (self.environment or self.tools):
            yield "a judge and environment or tools are both given: keep one; a judge reads answers of one turn"
        if self.environment and not Part(self.environment).file and not _ENTRY.fullmatch(self.environment):
            yield f"{visible(self.environment)[:80]!r} names no environment: write FILE.py:CLASS, or an entry point's name"
        yield from (problem for use in self.tools if (problem := tool_problem(use)))
        if self.max_turns != DEFAULT_MAX_TURNS and not (self.environment or self.tools):
            yield "max_turns applies only with environment or tools: remove it"

    def _reward_problems(self) -> Iterator[str]:
        # An environment gives the reward itself.
        yield from self._turn_problems()
        if self.environment:
            return
        if self.reward and self.rewards:
            yield "reward and rewards are both given: keep one"
        elif not (self.reward or self.rewards):
            if not _ENTRY.fullmatch(self.verifier):
                yield f"verifier {visible(self.verifier)[:80]!r} is no name; a function in a file is given as reward"
        elif self.verifier != _rewards_of({"reward": self.reward, "rewards": self.rewards}):
            yield "verifier and reward are both given: keep one; `rewards` may name a verifier beside your own"
        if not self.sandbox and all(part.use in VERIFIERS.built_in for part in parts_of(self.verifier)):
            yield f"sandbox = false is for a reward of your own, and {verifier_words(self.verifier)} needs no network: remove it"
        for use in (self.reward, *(each.use for each in self.rewards)):
            if use and not Part(use).file and (use == self.reward or not _ENTRY.fullmatch(use)):
                yield f"{visible(use)[:80]!r} does not name a function in a file: write FILE.py:FUNCTION"

    def _problems(self) -> Iterator[str]:
        if self.source == "file":
            if not self.path:
                yield 'source = "file" needs path, the file with the questions'
            if problem := hub_data_problem(self.path, self.revision):
                yield problem
            if self.config:
                yield "a file has no settings: remove `config`"
            if self.verifier == "reasoning_gym":
                yield "verifier reasoning_gym scores only its own datasets: use exact, final_number or math with a file"
        elif not self.dataset:
            yield 'dataset is missing: name one (`swarm task list`), or set source = "file" and path'
        elif self.path or self.revision or self.question or self.answer:
            yield 'path, revision, question and answer apply only to files: also set source = "file"'


def _is_unset(verifier: object) -> bool:
    """Check whether this is the default, which `swarm config show --all` writes out."""
    return verifier in (None, DEFAULT_VERIFIER)


def _rewards_of(values: dict[str, Any]) -> str:
    """The verifier's name for the rewards that are given; empty for none, and for what is none."""
    if isinstance(values.get("reward"), str) and values["reward"]:
        return str(values["reward"])
    parts = values.get("rewards") or []
    try:
        parts = [each if isinstance(each, WeightedReward) else WeightedReward.model_validate(each) for each in parts]
    except ValueError:
        return ""
    return name_of([Part(each.use, each.weight) for each in parts]) if parts else ""


def rewards_from(tasks: Any, folder: Path) -> Any:
    """Task sources as a file in `folder` gives them, with the whole paths of their rewards."""
    if not isinstance(tasks, list):
        return tasks
    return [_found_from(entry, folder) if isinstance(entry, dict) else entry for entry in tasks]


def _found_from(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Take every relative file of an entry for one in the folder. Rows are looked for where the
    command runs first.
    """
    entry = dict(entry)
    path = entry.get("path")
    if isinstance(path, str) and path and not path.startswith(HUB) and not os.path.exists(path) and os.path.exists(folder / path):
        entry["path"] = str(folder / path)
    if isinstance(entry.get("reward"), str):
        entry["reward"] = found_from(entry["reward"], folder)
    if isinstance(entry.get("environment"), str):
        entry["environment"] = found_from(entry["environment"], folder)
    if isinstance(entry.get("tools"), list):
        entry["tools"] = [found_from(use, folder) if isinstance(use, str) else use for use in entry["tools"]]
    if isinstance(entry.get("rewards"), list):
        named = [{"use": each} if isinstance(each, str) else each for each in entry["rewards"]]
        entry["rewards"] = [
            {**each, "use": found_from(each["use"], folder)}
            if isinstance(each, dict) and isinstance(each.get("use"), str)
            else each
            for each in named
        ]
    return entry


@lru_cache(maxsize=256)
def _scorer_id(verifier: str, dataset: str, pass_at: float | None) -> str:
    # A package's task source may score its own answers.
    parts = [verifier, VERIFIERS.code_id(verifier), TASK_SOURCES.code_id(dataset), pass_at]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def scorers_id(specs: Sequence[TaskSpec], instead: Mapping[str, str] = MappingProxyType({})) -> str:
    """SHA-256 (hex) of the scorers of all task sources. instead: the scorer that scored in place of
    each of these.
    """
    scorers = sorted({(spec.dataset, spec.canonical_config, instead.get(spec.scorer_id, spec.scorer_id)) for spec in specs})
    return hashlib.sha256(json.dumps(scorers).encode()).hexdigest()


def rewards_id(specs: Sequence[TaskSpec]) -> str:
    """SHA-256 (hex) of the scorers alone: the same in each process of a node, whether or not it
    reads the files with the questions, whose rows `scorers_id` names.
    """
    return hashlib.sha256(json.dumps(sorted({spec.scorer_id for spec in specs})).encode()).hexdigest()


class EvalSet(TaskSpec):
    """A set of questions that the policy is measured on, with several answers to each. They come
    from a task source, with the settings of a `[[tasks]]` entry, and never enter training.
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the set in records, curves and `swarm eval --set`."
    )
    questions: int = Field(
        200, ge=1, le=100_000, description="The most of its questions that are asked: the same ones every time, in every run."
    )
    k: int = Field(4, ge=1, le=1024, description="Answers to each question, for avg@k and pass@k.")
    temperature: float = Field(1.0, ge=0, le=10, description="Temperature of its answers; 0 (greedy) only with k = 1.")
    every_versions: int = Field(
        100,
        ge=1,
        description="Measure again after this many policy versions, but never for more than a fifth of the time. Base policy and "
        "last policy always are.",
    )

    @model_validator(mode="after")
    def _answers_can_differ(self) -> EvalSet:
        if self.k > 1 and not self.temperature:
            raise ValueError(f"k = {self.k} with temperature 0: greedy answers to a question are all the same, so set k = 1")
        if self.weight != 1.0:
            raise ValueError("weight applies only to what is trained on: remove it")
        return self


class EvalSection(Section):
    """Held-out evaluation by the generator, on tasks that never enter training."""

    tasks: int = Field(
        200,
        ge=0,
        le=100_000,
        description="Size of the fixed held-out set over all task sources; 0: no evaluation. With 200 the standard error of a pass "
        "rate is at most 0.035.",
    )
    draw: int = Field(
        0,
        ge=0,
        le=300,
        description="Number of the held-out set; nodes that you compare need the same. Change it, or tasks, only with a new "
        "run, as an old one may have trained on what is then held out.",
    )
    every_versions: int = Field(25, ge=1, description="Evaluate again after this many policy versions.")
    sets: list[EvalSet] = Field(default_factory=list, max_length=32, description="Further sets of questions: `[[eval.sets]]`.")

    @field_validator("sets")
    @classmethod
    def _sets_have_names_of_their_own(cls, value: list[EvalSet]) -> list[EvalSet]:
        names = [each.name for each in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two [[eval.sets]] are named {twice[0]}: rename one")
        return value
