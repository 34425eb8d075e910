"""Turns the number of a task draw into a prompt that fits the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.config import NodeConfig
from shared.contracts.messages import Task
from shared.model.prompts import render_prompt
from shared.runtime import FatalError
from shared.tasks import HeldOut, TaskSource
from shared.tasks.source import MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class PromptedTask:
    """A task and the token ids that ask it."""

    task: Task
    prompt_ids: list[int]


class Prompter:
    """Turns draws into prompted tasks, never a held-out one, never one that leaves no room for an
    answer.
    """

    def __init__(self, config: NodeConfig, tokenizer: Any, max_length: int, held_out: HeldOut) -> None:
        self._config = config
        self.key_draws(b"")
        self._tokenizer = tokenizer
        self._system_prompt = config.model.system_prompt
        self._longest_prompt = max_length - config.generator.max_new_tokens
        self._held_out = held_out
        if self._longest_prompt < 1:
            raise FatalError(
                f"generator.max_new_tokens {config.generator.max_new_tokens} leaves no room for a prompt in the model's "
                f"{max_length} tokens: lower generator.max_new_tokens"
            )

    def key_draws(self, secret: bytes) -> None:
        """Derive draws from `secret` from now on; with b"" only from the node's id and seed, so
        that anyone can reproduce them.
        """
        self._source = TaskSource(self._config.tasks, node=self._config.node.id, seed=self._config.node.seed, secret=secret)

    def for_draw(self, draw: int) -> PromptedTask:
        """The task of a draw: the first of its candidates that can be made, is not held out and
        fits. The same draw under the same secret always gives the same task.

        Raises:
            FatalError: none of many candidates fits the model. TaskError: a dataset cannot be used.
        """
        for task in self._source.candidates(draw, self._held_out):
            prompt_ids = self.prompt(task)
            if len(prompt_ids) <= self._longest_prompt:
                return PromptedTask(task, prompt_ids)
        raise FatalError(
            f"none of {MAX_ATTEMPTS} tasks tried is new and fits {self._longest_prompt} prompt tokens: use a smaller "
            "generator.max_new_tokens, datasets with shorter questions, or a smaller eval.tasks if a dataset has few questions"
        )

    def prompt(self, task: Task) -> list[int]:
        """Token ids that ask a task."""
        return render_prompt(self._tokenizer, task.question, self._system_prompt)

    def held_out(self, tasks: Sequence[Task]) -> list[PromptedTask]:
        """The held-out tasks that fit the model."""
        prompted = [PromptedTask(task, self.prompt(task)) for task in tasks]
        return [each for each in prompted if len(each.prompt_ids) <= self._longest_prompt]
