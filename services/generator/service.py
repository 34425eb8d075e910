"""The generator: draws tasks, samples groups, publishes them to the node plane, and stays within
the staleness bound.

Groups are admitted before they are made instead of dropped afterwards: a range of draws is claimed
only when the rule of `services.generator.ledger` allows it, so a slow trainer stops the generator
instead of a queue filling with stale groups. `calls` engine calls run concurrently, which keeps a
continuous-batching engine busy while some of its groups are long.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path

from services.generator.engine_calls import ServerWait, calls_of
from services.generator.engines import create_engine
from services.generator.engines.base import Engine, EngineError, Sample, SamplingParams, WrongSetting
from services.generator.episodes import Episodes
from services.generator.evaluation import Evaluator
from services.generator.evaluation_sets import AskedSet, SetEvaluator
from services.generator.figures import Figures
from services.generator.groups import Canonical, GroupPublisher, call_seed, rollout_group
from services.generator.ledger import DrawLedger, consumed_with_moving_i
from services.generator.policy_follower import PolicyFollower
from services.generator.tasks import PromptedTask, Prompter
from shared.cancelling import run_until_stopped
from shared.config import NodeConfig, TaskSpec, rewards_id
from shared.config.task_sections import EvalSet
from shared.contracts.codec import decode
from shared.contracts.control import DrawLease, SamplerPosition
from shared.contracts.messages import RolloutGroup, Task
from shared.contracts.status_figures import EVALUATING_BASE, GENERATING
from shared.contracts.subjects import SAMPLER_KEY, node_bucket
from shared.contracts.wire import MessageError, ModelIdentity
from shared.device_turns import device_turns
from shared.model.configuration import ModelLoadError
from shared.model.prompts import tokenizer_hash
from shared.model.reading import end_tokens, load_tokenizer, model_max_length
from shared.openai_server import server_key
from shared.run_records import FILE_NAMES_FILE, FILE_NAMES_MAX_BYTES, BoundedLines, read_bounded
from shared.runtime import FatalError, ServiceContext
from shared.runtime.metrics import DefaultRegistryMetrics
from shared.tasks import TaskError, dataset_size, held_out_of
from shared.tasks.reference_checks import left_out, left_out_lines, looked_at
from shared.tasks.specs import checked_config
from shared.transport.base import TransportError

_IDLE_S = 0.02
_NO_TRAINER = 2**60
"""Number of groups assumed consumed if there is no trainer, so that only `groups_per_minute` and a
full queue limit the generator.
"""
_SAMPLER_POLL_S = 1.0
_LONGEST_REST_S = 60.0


class GeneratorService:
    """One generator replica."""

    def __init__(self, config: NodeConfig) -> None:
        try:
            config = checked_config(config)
            self._held_out = held_out_of(config.tasks, tasks=config.eval.tasks, sets=config.eval.sets, draw=config.eval.draw)
        except TaskError as error:
            raise FatalError(str(error)) from None
        self._config = config
        self._pace = Pace(config.generator.groups_per_minute)
        generator = config.generator
        tokenizer = load_tokenizer(config.model)
        self._model = ModelIdentity(name=config.model.public_name, tokenizer_hash=tokenizer_hash(tokenizer))
        max_length = model_max_length(config.model)
        self._prompter = Prompter(config, tokenizer, max_length, self._held_out)
        self._params = SamplingParams.of(generator)
        self._engine = _engine_of(config, max_length)
        self._canonical: Canonical | None = None
        with suppress(ModelLoadError):  # the engine tells it as it starts
            self._canonical = Canonical(tokenizer, end_tokens(config.model, tokenizer))
        try:
            self._episodes = Episodes(self._engine, config, config.tasks)
        except WrongSetting as error:
            raise FatalError(str(error)) from None
        self._fruitless = 0
        self._left_out_told: Counter[str] = Counter()
        self._unwritable_told: Counter[str] = Counter()
        self._sampler = SamplerPosition(batch_number=0, consumed_local=0, dropped_local=0)

    async def run(self, context: ServiceContext) -> None:
        """Generate until told to stop."""
        self._context = context
        self._server = ServerWait(context)
        context.status.scorer = rewards_id(self._config.tasks)
        self._figures = Figures(context.registry, context.status, (spec.dataset for spec in self._config.tasks))
        self._publisher = GroupPublisher(self._config.node.id, context, self._figures)
        self._record_files()
        if self._engine.metrics_prefix:
            DefaultRegistryMetrics(self._engine.metrics_prefix, context.registry)
        try:
            self._tell_left_out()
            if await self._started():
                await self._generate(context)
        except WrongSetting as error:
            raise FatalError(str(error)) from None
        finally:
            await self._episodes.close()
            await self._engine.close()

    def _record_files(self) -> None:
        """Nothing depends on the names of files; without them people see hashes."""
        folder = self._config.node.run_dir
        remedy = f"free space at {folder}; until the next start the page and the commands show these datasets by their hashes"
        with self._context.writes.trying("file_names", remedy):
            record_file_names(folder, self._config.tasks)

    async def _started(self) -> bool:
        """Start the engine in this process's turn. False if the service is stopped before that."""
        try:
            async with AsyncExitStack() as turn:
                await run_until_stopped(self._context.stopping, _enter(turn, self._engine.turn()))
                if self._context.stopping.is_set():
                    return False
                if self._engine.shares_device:  # what computes here must not be left half started
                    await self._engine.start()
                else:
                    await run_until_stopped(self._context.stopping, self._server.answer(self._engine.start))
        except EngineError as error:
            raise FatalError(str(error)) from None
        return not self._context.stopping.is_set()

    async def _generate(self, context: ServiceContext) -> None:
        """The base policy is evaluated before the first draw, because its answers are version 0's
        score, which cannot be measured once weights have been swapped. If no seed is set, draws are
        secret, so that nobody can prepare answers to a node's next tasks.
        """
        config = self._config
        calls = calls_of(self._engine)
        self._draws = DrawLedger(context.node, config.node.id, config.node.replica, config.generator.lease_s)
        await self._draws.release_own()
        if config.node.seed == 0:
            self._prompter.key_draws(await self._draws.secret())
        self._follower = PolicyFollower(context, config, self._engine, self._figures)
        self._trains = self._engine.loads_policies and "trainer" in config.node.role_names
        held_out = await asyncio.to_thread(self._prompter.held_out, self._held_out.tasks)  # a question may take seconds
        sets = [AskedSet(each, await asyncio.to_thread(self._prompter.held_out, asked, each)) for each, asked in self._asked_sets()]
        set_evaluator = SetEvaluator(context, config, self._engine, sets, self._follower.swaps)
        evaluator = Evaluator(
            context, config, self._engine, held_out, self._figures, set_evaluator.left, self._follower.swaps, self._episodes
        )
        await self._tell_sets(sets)
        self._tell_left_out()
        context.status.state(EVALUATING_BASE)

        async def measure_base() -> None:
            await evaluator.begin()
            await set_evaluator.begin()

        await run_until_stopped(context.stopping, measure_base())
        if context.stopping.is_set():
            return
        context.log.info(
            "generating", engine=self._engine.name, model=self._model.name, calls=calls, held_out_tasks=len(self._held_out.tasks)
        )
        context.mark_ready()
        context.status.state(GENERATING)
        self._figures.policy(self._engine.policy_version)
        await run_until_stopped(
            context.stopping,
            *([self._follower.follow()] if self._trains else []),
            self._follow_sampler(),
            evaluator.run(),
            evaluator.follow(),
            set_evaluator.run(),
            *(self._call_loop() for _ in range(calls if config.sampler.local else 0)),
        )

    def _asked_sets(self) -> list[tuple[EvalSet, list[Task]]]:
        return [(each, self._held_out.sets[each.name]) for each in self._config.eval.sets]

    async def _tell_sets(self, sets: Sequence[AskedSet]) -> None:
        """Log the cost of each evaluation set, and how many rows are not trained on for them."""
        for each in sets:
            spec, questions = each.spec, len(each.tasks)
            cost = {"questions": questions, "answers": questions * spec.k, "every_versions": spec.every_versions}
            if questions:
                self._context.log.info("evaluation_set", set=spec.name, **cost)
            else:
                reason = "none of its questions can be asked: they leave no room for an answer, or no answer to them is right"
                self._context.log.warning("evaluation_set_empty", set=spec.name, reason=reason, consequence="it is left out")
        if rows := await asyncio.to_thread(self._held_out.rows_of_sets, self._config.tasks):
            self._context.log.warning(
                "rows_in_evaluation_sets", rows=rows, consequence="they are in the training files too, and left out of training"
            )

    async def _follow_sampler(self) -> None:
        bucket = node_bucket(self._config.node.id)
        async for entry in self._context.node.kv.watch(bucket, SAMPLER_KEY, poll_s=_SAMPLER_POLL_S):
            try:
                self._sampler = decode(entry.value, SamplerPosition)
            except MessageError as error:
                self._context.log.error("sampler_position_unreadable", reason=str(error))

    async def _call_loop(self) -> None:
        # After a restart the base policy would be far too stale, so a published policy, if there is
        # one, is loaded first.
        await self._follower.wait_for_first(timeout_s=2.0)
        while True:
            try:
                lease = await self._claim()
                if lease is None:
                    await asyncio.sleep(_IDLE_S)
                    continue
                started_s = time.monotonic()
                async with self._draws.renewed(lease, self._context.log):
                    await self._fill(lease)
                free_s = self._pace.after(lease.count, started_s)
                await asyncio.sleep(max(0.0, free_s - time.monotonic()))
            except TransportError as error:
                self._context.log.warning("node_plane_trouble", reason=str(error), consequence="trying again in 1 s")
                await asyncio.sleep(1.0)

    async def _claim(self) -> DrawLease | None:
        # Count from the policy in use, not the announced one; if a policy cannot be loaded, all
        # groups would otherwise be too stale.
        pointer = self._follower.loaded
        sampler = self._config.sampler
        groups_per_step, trained_on = sampler.local, pointer.consumed_local if pointer else 0
        if self._sampler.local is not None:
            groups_per_step = self._sampler.local
            version = pointer.version if pointer else 0
            trained_on = consumed_with_moving_i(self._sampler, groups_per_step=groups_per_step, version=version)
        lease = await self._draws.claim(
            self._config.generator.groups_per_call,
            groups_per_step=groups_per_step,
            max_staleness=sampler.max_staleness,
            consumed_local=trained_on if self._trains else _NO_TRAINER,
            dropped_local=self._sampler.dropped_local,
        )
        if self._trains:
            self._figures.draws_allowed(self._draws.allowed)
        return lease

    async def _fill(self, lease: DrawLease) -> None:
        """Process one lease, from draws to published groups. The lease is finished only after every
        group is in the stream. If the process is killed before, the draws are handed out again, and
        the message ids of groups that are already stored drop the second copies.
        """
        draws = range(lease.first, lease.first + lease.count)
        prompted = await asyncio.to_thread(lambda: [self._prompter.for_draw(draw) for draw in draws])
        self._tell_left_out()
        samples, seconds = await self._server.answer(lambda: self._timed_samples(prompted, lease))
        config = self._config
        now = time.time()

        def made() -> list[RolloutGroup]:
            return [
                rollout_group(
                    task,
                    answers,
                    node=config.node.id,
                    draw=draw,
                    model=self._model,
                    params=self._params,
                    created_at=now,
                    canonical=self._canonical,
                )
                for draw, task, answers in zip(draws, prompted, samples, strict=True)
                if answers
            ]

        groups = await asyncio.to_thread(made)  # encoding long answers takes a while
        self._figures.left_out(len(prompted) - len(groups))
        if groups:
            self._figures.generated(groups, seconds)
        await self._publisher.publish_all(groups, seconds)
        await self._draws.finish(lease.first)
        self._fruitless = 0 if groups else self._fruitless + 1
        if self._fruitless:
            await self._rest()

    def _tell_left_out(self) -> None:
        """Log each source's left-out rows again whenever they are twice as many."""
        for spec in self._config.tasks:
            rows, unwritable = left_out(spec), self._prompter.unwritable.get(spec.dataset, {})
            self._figures.rows_left_out(spec.dataset, rows + len(unwritable), looked_at(spec))
            if len(unwritable) >= 2 * self._unwritable_told[spec.dataset] and unwritable:
                self._unwritable_told[spec.dataset] = len(unwritable)
                self._context.log.warning(
                    "questions_unwritable",
                    task=spec.path or spec.dataset,
                    questions=len(unwritable),
                    reason=str(next(iter(unwritable.values()))),
                    consequence="they are not asked",
                )
            if rows >= 2 * self._left_out_told[spec.dataset] and rows:
                self._left_out_told[spec.dataset] = rows
                first = left_out_lines(spec, dataset_size(spec.dataset, spec.canonical_config))[:2]
                consequence = "no answer to them earns full marks, so they are not drawn"
                remedy = "correct their reference answers, or choose another verifier; `swarm config check` names them"
                task = spec.path or spec.dataset
                self._context.log.warning(
                    "task_rows_left_out", task=task, rows=rows, first=first, consequence=consequence, remedy=remedy
                )

    async def _rest(self) -> None:
        """A server that refuses everything is asked ever less often."""
        pause_s = min(2.0**self._fruitless / 2, _LONGEST_REST_S)
        self._context.status.state("waiting: no usable answer")
        self._context.log.warning("nothing_usable", calls=self._fruitless, consequence=f"asking again in {pause_s:g} s")
        await asyncio.sleep(pause_s)

    async def _timed_samples(self, prompted: Sequence[PromptedTask], lease: DrawLease) -> tuple[list[list[Sample]], float]:
        async with self._engine.turn():
            started = time.monotonic()
            return await self._samples(prompted, lease), time.monotonic() - started

    async def _samples(self, prompted: Sequence[PromptedTask], lease: DrawLease) -> list[list[Sample]]:
        """One list of completions per prompt. The seed is derived from the lease's first draw, so
        that the same draws give the same completions, whichever replica samples them.
        """
        config = self._config
        return await self._episodes.sampled(
            prompted,
            config.generator.completions,
            self._params,
            seed=call_seed(config.node.id, config.node.seed, lease.first),
            limit_s=config.generator.call_timeout_s,
        )


async def _enter(stack: AsyncExitStack, entered: AbstractAsyncContextManager[None]) -> None:
    await stack.enter_async_context(entered)


def _engine_of(config: NodeConfig, max_length: int) -> Engine:
    """The configured engine; `max_length` is the model's context in tokens. Raises FatalError if it
    cannot be made.
    """
    generator = config.generator
    try:
        return create_engine(
            generator.engine,
            config.model.path,
            revision=config.model.revision,
            dtype=config.model.dtype,
            device=config.model.device,
            max_model_len=max_length,
            threads=config.model.threads or None,
            gpu_memory_utilization=generator.gpu_memory_fraction,
            start_timeout_s=generator.start_timeout_s,
            request_timeout_s=generator.call_timeout_s,
            adapter_rank=config.trainer.lora.rank if config.trainer.lora.publish == "adapters" else 0,
            kv_cache_bytes=generator.kv_cache_mb * 2**20 or None,
            tensor_parallel_size=generator.tensor_parallel,
            base_url=generator.openai_url or None,
            api_key=server_key(generator.openai_key_variable, "generator.openai_key_variable"),
            options=generator.engine_options,
            served_model=generator.openai_model or config.model.name or None,
            turns=device_turns(config, "generator"),
        )
    except EngineError as error:
        raise FatalError(str(error)) from None


class Pace:
    """The pace of one generator, which its concurrent calls share."""

    def __init__(self, groups_per_minute: float) -> None:
        """`groups_per_minute`: the most; 0: no limit."""
        self._group_s = 60.0 / groups_per_minute if groups_per_minute else 0.0
        self._free_s = 0.0

    def after(self, groups: int, started_s: float) -> float:
        """When the call that made `groups` groups may be followed by another, on the clock of
        `started_s`, the time at which it began. In the long run all calls together keep the pace;
        at the start each of them makes one call at once.
        """
        self._free_s = max(self._free_s, started_s) + groups * self._group_s
        return self._free_s


def record_file_names(run_dir: Path, sources: Iterable[TaskSpec]) -> None:
    """Append a line for each file that has another name than when it was last read.

    sources: with each file's `dataset` set to the name of its rows.

    Raises:
        OSError: a line cannot be written.
    """
    names = {spec.dataset: spec.file_name for spec in sources if spec.source == "file"}
    if not names:
        return
    path = run_dir / FILE_NAMES_FILE
    known = {str(line.get("dataset")): line.get("file") for line in read_bounded(path)}
    lines = BoundedLines(path, FILE_NAMES_MAX_BYTES)
    for dataset, name in names.items():
        if known.get(dataset) != name:
            lines.append(json.dumps({"dataset": dataset, "file": name}, separators=(",", ":")))
