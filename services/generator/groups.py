"""Builds rollout groups from an engine's samples, and stores them in the node's queue, which slows
the generator down when it is full.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from services.generator.engines.base import Sample, SamplingParams
from services.generator.figures import Figures
from services.generator.tasks import PromptedTask
from shared.cancelling import together
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import ROLLOUT_ID_HEADER, Completion, RolloutGroup, Sampling, pieces, rollout_id_of
from shared.contracts.status_figures import GENERATING
from shared.contracts.subjects import node_rollouts, node_rollouts_stream
from shared.contracts.wire import ModelIdentity
from shared.model.prompts import AnswerTokens
from shared.runtime import ServiceContext
from shared.seeds import number_from
from shared.transport.base import NotConnected, StreamFull, TransportError


class Canonical:
    """Compares samples' tokens with those that their texts are encoded to. May be called from any
    thread.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int]) -> None:
        # A call sets options of the tokenizer, so that no two threads may share one.
        self._tokens = AnswerTokens(copy.deepcopy(tokenizer), end_token_ids, len(tokenizer))
        self._lock = threading.Lock()

    def matches(self, sample: Sample) -> bool:
        """Check whether every receiver with this tokenizer gets the sample's tokens by encoding its
        text, turn by turn.
        """
        turns, ends = sample.turns, sample.turn_tokens or (len(sample.token_ids),)
        with self._lock:
            for number, (turn, ids) in enumerate(zip(turns, pieces(list(sample.token_ids), ends), strict=True), 1):
                if self._tokens.encode(turn, ended=number < len(turns) or sample.finish_reason == "stop") != ids:
                    return False
        return True


def rollout_group(
    prompted: PromptedTask,
    samples: Sequence[Sample],
    *,
    node: str,
    draw: int,
    model: ModelIdentity,
    params: SamplingParams,
    created_at: float,
    canonical: Canonical | None = None,
) -> RolloutGroup:
    """The group of all `samples` of one task. Its version is the oldest that sampled any of
    them. `canonical`: None: it stays unknown whether their texts give their tokens.
    """
    turns = prompted.turns

    def is_canonical(sample: Sample) -> bool | UnsetType:
        return UNSET if canonical is None or sample.logprobs is None else canonical.matches(sample)

    return RolloutGroup(
        node=node,
        created_at=created_at,
        draw=draw,
        task=prompted.task,
        completions=[
            Completion(
                text=sample.text,
                finish_reason=sample.finish_reason,
                token_count=len(sample.token_ids),
                # Text that was encoded again may have other tokens than were sampled, so it must
                # not be trained on as if it had these tokens.
                token_ids=None if sample.logprobs is None else pack_ids(sample.token_ids),
                behaviour_logprobs=None if sample.logprobs is None else pack_logprobs(sample.logprobs),
                turn_tokens=pack_ids(sample.turn_tokens) if sample.turn_tokens else None,
                turn_chars=pack_ids(sample.turn_chars) if sample.turn_chars else None,
                canonical=is_canonical(sample),
            )
            for sample in samples
        ],
        model=model,
        policy_version=min(sample.policy_version for sample in samples),
        sampling=Sampling(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, max_new_tokens=params.max_new_tokens
        ),
        prompt_ids=pack_ids(prompted.prompt_ids),
        environment=UNSET if turns is None else turns.id,
    )


def call_seed(node: str, node_seed: int, first_draw: int) -> int:
    """Seed of the call that samples the draws from `first_draw` on: different for every node and
    call, the same on every attempt.
    """
    return number_from(f"generate/{node}/{node_seed}/{first_draw}", 4) & 0x7FFFFFFF


class GroupPublisher:
    """Publishes a node's groups under the number of their draw, so that none is stored twice."""

    def __init__(self, node: str, context: ServiceContext, figures: Figures) -> None:
        self._node, self._context, self._figures = node, context, figures

    async def publish_all(self, groups: Iterable[RolloutGroup], generate_s: float) -> None:
        """Store several groups at once. If one cannot be stored, none is still being sent when that
        is raised.
        """
        await together(*(self.publish(group, generate_s) for group in groups))

    async def publish(self, group: RolloutGroup, generate_s: float) -> None:
        """Store a group. If the queue is full or the server unreachable, this waits and loses
        nothing.
        """
        payload = encode(group)
        group_id = content_id(payload)
        rollout_id = rollout_id_of(group_id)
        while True:
            started = time.monotonic()
            try:
                ack = await self._context.node.publish(
                    node_rollouts(self._node),
                    payload,
                    stream=node_rollouts_stream(self._node),
                    message_id=f"draw-{group.draw}",
                    headers={ROLLOUT_ID_HEADER: rollout_id},
                )
            except (StreamFull, NotConnected) as error:
                self._figures.publish.failed("held_back" if isinstance(error, StreamFull) else "error")
                self._context.status.state("held back")
                self._context.log.info("held_back", rollout_id=rollout_id, draw=group.draw, reason=str(error))
                await asyncio.sleep(0.5)
            except TransportError:
                self._figures.publish.failed("error")
                raise
            else:
                break
        self._context.status.state(GENERATING)
        self._figures.publish.stored(time.monotonic() - started, len(payload))
        self._context.log.info(
            "rollouts_published",
            rollout_id=rollout_id,
            task=group.task.ref.dataset,
            draw=group.draw,
            policy_version=group.policy_version,
            stream_seq=ack.seq,
            duplicate=ack.duplicate,
            completions=len(group.completions),
            tokens=sum(completion.token_count for completion in group.completions),
            **({} if group.environment is UNSET else {"turns": sum(len(each.turns) for each in group.completions)}),
            seconds=round(generate_s, 4),
        )
