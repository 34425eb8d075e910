"""Samples answers of several turns: the policy says something, the environment of the task's source
replies, and so on until it has no reply.

Token in, token out: each call's prompt is the tokens that were sampled before, with the
environment's words encoded between them (`shared.model.prompts.TurnTokens`). What the environment
says is derived in the sandbox, as it will be by every verifier, by playing the turns so far again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from services.generator.engine_calls import sampled
from services.generator.engines.base import Engine, EngineAway, EngineError, Sample, SamplingParams, WrongSetting
from services.generator.tasks import PromptedTask
from shared.config import NodeConfig, TaskSpec
from shared.environment_files import EnvironmentSpec
from shared.model.prompts import TurnTokens, answer_text
from shared.model.reading import end_tokens, load_tokenizer, model_max_length
from shared.seeds import number_from
from shared.tasks.sandbox import ScorerPool, ScoringJob

MOST_EPISODES = 4.0
"""An answer of several turns may take this many times `generator.call_timeout_s`."""
TOLD_AFTER = 256
"""After so many answers of a source with tools, of which none called any, that is told."""


@dataclass(slots=True)
class _Episode:
    """One answer while it grows. `ids`: the tokens after the prompt, the environment's included."""

    samples: list[Sample]
    ids: list[int]
    replies: list[str] = field(default_factory=list)

    @property
    def said(self) -> int:
        """Number of tokens that the policy said."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def over(self) -> bool:
        return self.samples[-1].finish_reason != "stop"

    def cut_off(self) -> None:
        """End it where no further turn has room."""
        self.samples[-1] = replace(self.samples[-1], finish_reason="length")

    def whole(self) -> Sample:
        """The answer: one turn as it was sampled, or several together, of the oldest version."""
        first, *more = self.samples
        if not more:
            return first
        ends = [(0, 0)]
        for sample in self.samples:
            ends.append((ends[-1][0] + len(sample.token_ids), ends[-1][1] + len(sample.text)))
        return Sample(
            token_ids=tuple(token for sample in self.samples for token in sample.token_ids),
            text="".join(sample.text for sample in self.samples),
            finish_reason=self.samples[-1].finish_reason,
            logprobs=tuple(logprob for sample in self.samples for logprob in sample.logprobs or ()),
            policy_version=min(sample.policy_version for sample in self.samples),
            turn_tokens=tuple(tokens for tokens, _ in ends[1:]),
            turn_chars=tuple(chars for _, chars in ends[1:]),
            replies=tuple(self.replies),
        )


class Episodes:
    """Samples answers of one or of several turns with an engine."""

    def __init__(self, engine: Engine, config: NodeConfig, specs: Sequence[TaskSpec]) -> None:
        """specs: the sources of the tasks that will be asked.

        Raises:
            PromptError: a source has an environment, and the model's chat template no second turn.
            WrongSetting: a source has an environment, and the engine's server keeps no tokens.
        """
        self._engine, self._config, self._specs = engine, config, specs
        self._pool: ScorerPool | None = None
        self._starting = asyncio.Lock()
        self._between: dict[bool, TurnTokens] = {}
        self._answers: dict[str, int] = {}
        turns = [spec.turns for spec in specs if spec.turns is not None]
        self.several_turns = bool(turns)
        """Whether an answer may take more than one call."""
        if not turns:
            return
        if not engine.loads_policies:
            raise WrongSetting(
                f"engine {engine.name} cannot sample answers of several turns, because its server does not return each token that "
                "it sampled, with its logprob: use the engine transformers or vllm, or remove environment and tools from [[tasks]]"
            )
        self._tokenizer: Any = load_tokenizer(config.model)
        self._max_length = model_max_length(config.model)
        for tools in sorted({bool(each.tools_json) for each in turns}):
            made = self._between[tools] = TurnTokens(self._tokenizer, end_tokens(config.model, self._tokenizer), tools=tools)
            if made.drops_thoughts:
                structlog.get_logger("generator").info(
                    "template_drops_thoughts",
                    reason="the chat template leaves what was thought out of earlier turns",
                    consequence="here the policy reads its earlier turns as it said them",
                )

    async def close(self) -> None:
        """End the processes in which environments are played."""
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    async def sampled(
        self, prompted: Sequence[PromptedTask], n: int, params: SamplingParams, *, seed: int, limit_s: float | None = None
    ) -> list[list[Sample]]:
        """`n` answers to each task; none to one that an engine's server refused. limit_s: deadline
        of one call; None: no limit. `params.max_new_tokens` is for all turns of an answer together.

        Raises:
            EngineError, EngineAway: a call is late, or as the engine raises.
        """
        first = await self._call([each.prompt_ids for each in prompted], n, params, seed, limit_s)
        if not self.several_turns:
            return first
        episodes = [[_Episode([sample], list(sample.token_ids)) for sample in group] for group in first]
        going = [(task, group) for task, group in zip(prompted, episodes, strict=True) if task.turns is not None and group]
        try:
            async with asyncio.timeout(None if limit_s is None else MOST_EPISODES * limit_s):
                for turn in range(1, max((task.turns.max_turns for task, _ in going if task.turns), default=1)):
                    if not (more := await self._replied(going, turn, params)):
                        break
                    await self._next_turn(more, turn, params, seed, limit_s)
        except TimeoutError:
            raise EngineError(
                f"answers of several turns took more than {MOST_EPISODES:g} times generator.call_timeout_s: lower max_turns of the "
                "[[tasks]] entry or generator.groups_per_call, or make the environment faster"
            ) from None
        self._tell_calls(going)
        return [[episode.whole() for episode in group] for group in episodes]

    async def _next_turn(
        self, more: Sequence[tuple[PromptedTask, _Episode]], turn: int, params: SamplingParams, seed: int, limit_s: float | None
    ) -> None:
        left = [params.max_new_tokens - episode.said for _, episode in more]
        prompts = [[*task.prompt_ids, *episode.ids] for task, episode in more]
        turn_seed = number_from(f"turn/{seed}/{turn}", 4) & 0x7FFFFFFF
        samples = await self._call(prompts, 1, replace(params, max_new_tokens=max(left)), turn_seed, limit_s)
        for (_, episode), (found,), most in zip(more, samples, left, strict=True):
            sample = self._shortened(found, most)
            episode.samples.append(sample)
            episode.ids += sample.token_ids

    async def _call(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, seed: int, limit_s: float | None
    ) -> list[list[Sample]]:
        try:
            async with asyncio.timeout(limit_s):
                return await sampled(self._engine, prompts, n, params, seed=seed)
        except TimeoutError:
            here = self._engine.shares_device
            raise (EngineError if here else EngineAway)(
                f"engine {self._engine.name}: no answer to {len(prompts)} prompts within {limit_s:.0f} s "
                f"(lower generator.groups_per_call if answers really take that long): {'restarting' if here else 'asking again'}"
            ) from None

    async def _replied(
        self, going: Sequence[tuple[PromptedTask, list[_Episode]]], turn: int, params: SamplingParams
    ) -> list[tuple[PromptedTask, _Episode]]:
        """Let the environments reply to every episode that has said `turn` turns. Returns those
        that go on.
        """
        asked = []
        for task, group in going:
            assert task.turns is not None
            said = [each for each in group if len(each.samples) == turn < task.turns.max_turns and not each.over]
            if said:
                asked.append((task, task.turns, said))
        if not asked:
            return []
        pool = await self._started()
        results = await pool.run(
            [
                ScoringJob(
                    ref=task.task.ref,
                    texts=[[sample.text for sample in episode.samples] for episode in said],
                    expected=task.task,
                    urgent=True,
                )
                for task, _, said in asked
            ]
        )
        more = []
        for (task, spec, said), result in zip(asked, results, strict=True):
            if result.reason is not None:  # the verifier will find and tell the same
                continue
            for episode, replies in zip(said, result.said, strict=True):
                if len(replies) == turn and self._goes_on(task, spec, episode, replies[-1], params):
                    more.append((task, episode))
        return more

    def _goes_on(self, task: PromptedTask, spec: EnvironmentSpec, episode: _Episode, reply: str, params: SamplingParams) -> bool:
        between = self._between[bool(spec.tools_json)].between(reply)
        length = len(task.prompt_ids) + len(episode.ids) + len(between)
        if length >= self._max_length or episode.said >= params.max_new_tokens:
            episode.cut_off()
            return False
        episode.replies.append(reply)
        episode.ids += between
        return True

    def _shortened(self, sample: Sample, most: int) -> Sample:
        """The sample as it would be with `most` tokens; calls have one limit for all prompts."""
        if len(sample.token_ids) <= most:
            return sample
        ids = sample.token_ids[:most]
        text = answer_text(self._tokenizer, ids)
        return replace(sample, token_ids=ids, logprobs=(sample.logprobs or ())[:most], text=text, finish_reason="length")

    async def _started(self) -> ScorerPool:
        async with self._starting:
            if self._pool is None:
                pool = ScorerPool.from_config(self._config.verifier, tasks=self._specs, workers=1)
                await pool.start()
                self._pool = pool
            return self._pool

    def _tell_calls(self, going: Sequence[tuple[PromptedTask, list[_Episode]]]) -> None:
        """A parser that does not understand a model's calls looks like a policy that makes none."""
        for task, group in going:
            dataset = task.task.ref.dataset
            if self._answers.get(dataset) == -1:
                continue
            if any(len(episode.samples) > 1 for episode in group):
                self._answers[dataset] = -1
                continue
            before = self._answers.get(dataset, 0)
            self._answers[dataset] = before + len(group)
            if before < TOLD_AFTER <= self._answers[dataset]:
                structlog.get_logger("generator").warning(
                    "no_tool_calls",
                    task=dataset,
                    answers=self._answers[dataset],
                    reason="no answer got a reply from its environment: the policy calls no tool, or in a form that is not read",
                    remedy="look at answers with `swarm rollouts`; docs/tasks.md shows the forms of a call",
                )
