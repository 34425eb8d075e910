"""Derives and scores tasks for a simulated swarm, with the services' own derivation and verifiers,
in this process and only once per input.

Only text that this process sampled itself is scored here; anybody else's answers must be scored in
the sandbox.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from services.generator.tasks import PromptedTask, Prompter
from shared.config import NodeConfig
from shared.contracts.messages import TaskRef
from shared.model.reading import load_tokenizer, model_max_length
from shared.rewards import Mark
from shared.tasks import HeldOut, held_out_tasks
from shared.tasks.derive import Item, derive_item
from shared.tasks.evaluation import PassRules
from shared.tasks.scoring import score_texts
from shared.tasks.verifiers import VerifierChoice

_MOST_ITEMS = 20_000
_MOST_DRAWS = 100_000
_MOST_TEXTS = 500_000


class TaskDesk:
    """One node's tasks and its verifier. Nodes with equal configurations share the expensive parts
    through `Shared`.
    """

    def __init__(self, config: NodeConfig, shared: Shared) -> None:
        self.tokenizer = shared.tokenizer(config)
        held_out = shared.held_out(config)
        self._prompter = Prompter(config, self.tokenizer, model_max_length(config.model), held_out)
        self._verifiers = VerifierChoice(config.tasks)
        self._rules = PassRules(config.tasks)
        self._shared = shared
        self._source = "\n".join(
            (config.node.id, str(config.node.seed), config.model.path, config.model.system_prompt)
            + (
                str(config.generator.max_new_tokens),
                str(config.eval.tasks),
                str(config.eval.draw),
                *(task.model_dump_json() for task in config.tasks),
            )
        )
        self.held_out = held_out
        self.held_out_prompts = self._prompter.held_out(held_out.tasks)
        self.datasets = {task.dataset for task in config.tasks}

    def task(self, draw: int) -> PromptedTask:
        """The task of one of this node's draws; it is the same in every arm of an experiment."""
        return self._shared.task(self._source, draw, self._prompter)

    def score(self, ref: TaskRef, texts: Sequence[str]) -> list[float]:
        """Rewards of texts by this node's verifier."""
        return self._shared.score(ref, self._verifiers.name_for(ref), texts)

    def passed(self, ref: TaskRef, rewards: Sequence[float]) -> list[bool]:
        """Whether answers with these rewards pass. No pass defined: none does."""
        return self._rules.passed(ref, rewards, [Mark.UNSAID] * len(rewards)) or [False] * len(rewards)


class Shared:
    """Caches shared by all nodes in a process: tokenizers, held-out sets, derived items, scores.
    None of them depends on the node.
    """

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}
        self._held_out: dict[tuple[str, int, int], HeldOut] = {}
        self._items: OrderedDict[TaskRef, Item] = OrderedDict()
        self._scores: OrderedDict[tuple[TaskRef, str, str], float] = OrderedDict()
        self._draws: dict[tuple[str, int], PromptedTask] = {}

    def tokenizer(self, config: NodeConfig) -> Any:
        """The node's tokenizer, with a cache of what it has encoded."""
        path = config.model.path
        if path not in self._tokenizers:
            self._tokenizers[path] = RememberingTokenizer(load_tokenizer(config.model))
        return self._tokenizers[path]

    def held_out(self, config: NodeConfig) -> HeldOut:
        """The questions that must not be trained on."""
        key = ("\n".join(task.model_dump_json() for task in config.tasks), config.eval.tasks, config.eval.draw)
        if key not in self._held_out:
            self._held_out[key] = HeldOut(held_out_tasks(config.tasks, config.eval.tasks, draw=config.eval.draw))
        return self._held_out[key]

    def task(self, source: str, draw: int, prompter: Prompter) -> PromptedTask:
        """The task of a draw; `source` identifies everything that the result depends on."""
        key = (source, draw)
        if key not in self._draws:
            if len(self._draws) >= _MOST_DRAWS:
                self._draws.clear()
            self._draws[key] = prompter.for_draw(draw)
        return self._draws[key]

    def score(self, ref: TaskRef, verifier: str, texts: Sequence[str]) -> list[float]:
        """Rewards; each distinct text for a task is scored once."""
        unknown = [text for text in dict.fromkeys(texts) if (ref, verifier, text) not in self._scores]
        if unknown:
            for text, reward in zip(unknown, score_texts(self._item(ref), verifier, unknown)[0], strict=True):
                if reward is None:
                    raise ValueError(
                        f"verifier {verifier} has no reward for {text[:80]!r}: an experiment needs one for every answer"
                    )
                self._scores[(ref, verifier, text)] = reward
        rewards = [self._scores[(ref, verifier, text)] for text in texts]
        while len(self._scores) > _MOST_TEXTS:
            self._scores.popitem(last=False)
        return rewards

    def answer(self, ref: TaskRef) -> str:
        """A right answer, which a hostile node can derive like anyone else."""
        item = self._item(ref)
        answer = item.task.answer if item.task.answer is not None else item.entry["metadata"].get("example_answer", "")
        return str(answer)

    def _item(self, ref: TaskRef) -> Item:
        if ref not in self._items:
            self._items[ref] = derive_item(ref)
            while len(self._items) > _MOST_ITEMS:
                self._items.popitem(last=False)
        return self._items[ref]


class RememberingTokenizer:
    """A tokenizer that encodes each text once and passes every other call on to the original."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._templates: dict[str, list[int] | str] = {}
        self._encoded: dict[tuple[object, ...], dict[str, list[int]]] = {}
        self._decoded: dict[tuple[Any, ...], str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        """`input_ids` of a text."""
        key = (text, *sorted(settings.items()))
        if key not in self._encoded:
            _make_room(self._encoded)
            self._encoded[key] = {"input_ids": list(self._tokenizer(text, **settings)["input_ids"])}
        return self._encoded[key]

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> list[int] | str:
        """Token ids of a conversation, or its text with `tokenize=False`."""
        key = "\x00".join(f"{message['role']}\x01{message['content']}" for message in messages) + repr(sorted(settings.items()))
        if key not in self._templates:
            _make_room(self._templates)
            written = self._tokenizer.apply_chat_template(messages, **settings)
            self._templates[key] = written if isinstance(written, str) else list(written)
        return self._templates[key]

    def decode(self, token_ids: Sequence[int], **settings: Any) -> str:
        """Text of token ids."""
        key = (*token_ids, *sorted(settings.items()))
        if key not in self._decoded:
            _make_room(self._decoded)
            self._decoded[key] = str(self._tokenizer.decode(list(token_ids), **settings))
        return self._decoded[key]


def _make_room(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= _MOST_TEXTS:
        remembered.clear()
