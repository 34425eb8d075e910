"""Turns the number of a task draw into a prompt that fits the model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.generator.engines.base import Prompt
from shared.config import NodeConfig, TaskSpec
from shared.contracts.messages import Task
from shared.environment_files import EnvironmentSpec
from shared.model.prompts import PromptError, conversation, render_prompt
from shared.runtime import FatalError
from shared.tasks import HeldOut, TaskSource
from shared.tasks.source import MAX_ATTEMPTS
from shared.tasks.verifiers import VerifierChoice

_MOST_UNWRITABLE = 1000


@dataclass(frozen=True, slots=True)
class PromptedTask:
    """A task, the token ids of its prompt, and what the policy's turns meet; None for one turn."""

    task: Task
    prompt_ids: list[int]
    turns: EnvironmentSpec | None = None


class Prompter:
    """Turns draws into prompted tasks. It skips held-out tasks, tasks that the chat template cannot
    write, and tasks that leave no room for an answer.

    unwritable: by dataset, up to 1,000 questions that the chat template cannot write, and why.
    """

    def __init__(self, config: NodeConfig, tokenizer: Any, max_length: int, held_out: HeldOut) -> None:
        self._config = config
        self.unwritable: dict[str, dict[str, PromptError]] = {}
        self.key_draws(b"")
        self._tokenizer = tokenizer
        self._system_prompt = config.model.system_prompt
        self._longest_prompt = max_length - config.generator.max_new_tokens
        self._held_out = held_out
        self._choice = VerifierChoice(config.tasks)
        if self._longest_prompt < 1:
            raise FatalError(
                f"generator.max_new_tokens {config.generator.max_new_tokens} leaves no room for a prompt in the model's "
                f"{max_length} tokens: lower generator.max_new_tokens"
            )

    def key_draws(self, secret: bytes) -> None:
        """Derive draws from `secret` from now on. With b"", derive them only from the node's id and
        seed, so that anyone can reproduce them.
        """
        self._source = TaskSource(self._config.tasks, node=self._config.node.id, seed=self._config.node.seed, secret=secret)

    def for_draw(self, draw: int) -> PromptedTask:
        """The task of a draw: the first of its candidates that can be derived, is not held out and
        fits. The same draw with the same secret always gives the same task.

        Raises:
            FatalError: none of many candidates can be used.
            TaskError: a dataset cannot be used.
        """
        passed_over: Counter[str] = Counter()
        for task in self._source.candidates(draw, self._held_out, passed_over):
            try:
                prompted = self.prompted(task)
            except PromptError:
                passed_over["unwritable"] += 1
                continue
            if len(prompted.prompt_ids) <= self._longest_prompt:
                return prompted
            passed_over["too_long"] += 1
        raise FatalError(f"{self._source.ref(draw).dataset}: {self._why_none(passed_over)}")

    def _why_none(self, passed_over: Counter[str]) -> str:
        """Causes with their remedies, the most frequent one first; those that did not occur are
        omitted.
        """
        explained = {
            "held_out": f"held out for evaluation: lower eval.tasks ({self._config.eval.tasks}), or let the source have several "
            "times as many different questions",
            "too_long": f"longer than the {self._longest_prompt} prompt tokens that generator.max_new_tokens leaves: lower that, "
            "or choose tasks with shorter questions",
            "left_out": "left out, as their own reference answers earn nothing (`swarm config check` names them): choose another "
            "verifier, or correct the answers",
            "unwritable": "questions that the model's chat template cannot write: correct the template (chat_template.jinja)",
            "failed": "impossible to make: change the dataset's config",
        }
        causes = [f"{number} are {explained[cause]}" for cause, number in passed_over.most_common()]
        return f"none of the {MAX_ATTEMPTS} tasks tried can be trained on; {'; '.join(causes)}"

    def prompted(self, task: Task, spec: TaskSpec | None = None) -> PromptedTask:
        """The task with its prompt. spec: its source, if that is none of `[[tasks]]`.

        Raises:
            PromptError: the chat template cannot write the question.
        """
        turns = self._choice.turns_for(task.ref) if spec is None else spec.turns
        known = self.unwritable.setdefault(task.ref.dataset, {})
        try:
            tools = "" if turns is None else turns.tools_json
            ids = render_prompt(self._tokenizer, task.prompt, self._system_prompt, tools)
            return PromptedTask(task, Prompt(ids, conversation(task.prompt, self._system_prompt)), turns)
        except PromptError as error:
            if len(known) < _MOST_UNWRITABLE:
                known[task.text] = error
            raise

    def held_out(self, tasks: Sequence[Task], spec: TaskSpec | None = None) -> list[PromptedTask]:
        """The held-out tasks, or those of an evaluation set, that fit the model."""
        prompted = []
        for task in tasks:
            with contextlib.suppress(PromptError):
                prompted.append(self.prompted(task, spec))
        return [each for each in prompted if len(each.prompt_ids) <= self._longest_prompt]
