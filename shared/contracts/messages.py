"""Typed, bounded structs for the messages on a rollout's path: task, group, scored group, batch,
and the signed group that crosses the swarm plane.

A group's rollout id, the first 16 digits of its content id, is the same from generator to trainer
and lets people follow it through logs and message headers. It is not a key: duplicates and replays
are recognised by the whole id. In a foreign message the header is only a claim; the border computes
the id from the bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, UnsetType, field

from shared.contracts.codec import MALFORMED_TURNS, MAX_TOKENS, unpack_ids
from shared.contracts.limits import (
    MAX_PARTS,
    MAX_PROMPT_MESSAGES,
    MAX_REPLY_CHARS,
    MAX_REWARD_PARTS,
    MAX_TEXT_CHARS,
    MAX_TURNS,
)
from shared.contracts.sampler_state import SamplerState
from shared.contracts.wire import (
    Count,
    DatasetName,
    Encoding,
    FinishReason,
    Message,
    MessageError,
    ModelIdentity,
    NodeId,
    Origin,
    PartKind,
    PlainText,
    Reward,
    Role,
    Seconds,
    Seed,
    Sha256,
    ShortText,
    SwarmId,
    SwarmSchemaVersion,
    UnixTime,
)

MAX_COMPLETIONS = 1024
REPLY_MARK = "[environment] "
"""Stands before what an environment said, where an answer is shown to people."""
Replies = Annotated[list[Annotated[str, Meta(max_length=MAX_REPLY_CHARS)]], Meta(max_length=MAX_TURNS)]
_ARRAY_BYTES = 4 * MAX_TOKENS


class TaskRef(Message, frozen=True, kw_only=True):
    """Names one verifiable task; everything else about it is derived from this
    (`shared.tasks.derive_task`).

    `package` and `version` name what derives it, as it is installed where the reference was made
    (`shared.tasks.derive.task_ref`). Both are empty for a row of a file, whose dataset is named
    after the content of the file.
    """

    dataset: DatasetName
    package: PlainText = ""
    version: PlainText = ""
    config: Annotated[str, Meta(max_length=4096)] = "{}"
    """Canonical JSON of the dataset's configuration (sorted keys, no spaces), without `seed`."""
    seed: Seed
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)]


def source_name(dataset: str, config: str) -> str:
    """Short name of a dataset under one configuration, such as `gcd` or `gcd#5f2a01bc`."""
    return dataset if config == "{}" else f"{dataset}#{hashlib.sha256(config.encode()).hexdigest()[:8]}"


class Part(Message, frozen=True, kw_only=True):
    """A part of a prompt's message. This version takes text; of another kind, the decoder tells the
    name (`out_of_range`).
    """

    kind: PartKind = "text"
    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class PromptMessage(Message, frozen=True, kw_only=True):
    """One message of a prompt, as chat templates write it."""

    role: Role
    parts: Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """The text of its parts."""
        return "".join(part.text for part in self.parts)


Prompt = Annotated[list[PromptMessage], Meta(min_length=1, max_length=MAX_PROMPT_MESSAGES)]


def user_prompt(text: str) -> list[PromptMessage]:
    """The prompt that is one question."""
    return [PromptMessage(role="user", parts=[Part(text=text)])]


class Task(Message, frozen=True, kw_only=True):
    """A task with the fields derived from its reference. In a foreign group these fields are only
    compared with a new derivation, never used.

    `key` identifies what is asked: tasks of a dataset with equal keys are the same task under
    different references (`shared.tasks.prompt`). A prompt need not, as that of a game that begins
    with the same words each time.
    """

    ref: TaskRef
    prompt: Prompt
    key: Sha256
    answer: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] | None
    metadata: Annotated[str, Meta(max_length=1_048_576)] = "{}"
    """Canonical JSON of the scorer's metadata."""

    def __post_init__(self) -> None:
        """Bound the prompt as a whole."""
        chars = sum(len(part.text) for message in self.prompt for part in message.parts)
        if chars > MAX_TEXT_CHARS:
            raise ValueError(f"a prompt of {chars} characters, at most {MAX_TEXT_CHARS}")

    @property
    def text(self) -> str:
        """The prompt as text for people: a question as it is, and several messages each after its
        role.
        """
        if len(self.prompt) == 1 and self.prompt[0].role == "user":
            return self.prompt[0].text
        return "\n\n".join(f"{message.role}: {message.text}" for message in self.prompt)


class Completion(Message, frozen=True, kw_only=True):
    """One sampled answer.

    `token_ids` and `behaviour_logprobs` (packed, equal lengths) include the end-of-sequence token
    when `finish_reason` is `stop`. They can be used only with the same tokenizer, and may be
    absent.

    `turn_tokens` and `turn_chars` (packed like `token_ids`, equal lengths) say where each turn ends
    in the tokens and in the text, so that the last pair is `token_count` and the text's length.
    Absent: the answer is one turn.

    `canonical`, on the node plane only: whether encoding the text gives `token_ids`, so that a
    receiver with the same tokenizer needs no ids. Absent: not known.
    """

    text: Annotated[str, Meta(max_length=4_194_304)]
    finish_reason: FinishReason
    token_count: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    token_ids: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None
    behaviour_logprobs: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None
    turn_tokens: Annotated[bytes, Meta(max_length=4 * MAX_TURNS)] | None = None
    turn_chars: Annotated[bytes, Meta(max_length=4 * MAX_TURNS)] | None = None
    canonical: bool | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that the turns end where a completion of this length can have turns."""
        if self.turn_tokens is None and self.turn_chars is None:
            return
        tokens, chars = (_offsets(packed) for packed in (self.turn_tokens, self.turn_chars))
        if not tokens or len(tokens) != len(chars):
            raise ValueError(f"{MALFORMED_TURNS}{len(tokens)} ends in the tokens and {len(chars)} in the text")
        if tokens[-1] != self.token_count or chars[-1] != len(self.text):
            raise ValueError(f"{MALFORMED_TURNS}the last one does not end with the completion")
        # A turn has at least a token, but that may be one that is not written.
        if tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)) or any(a > b for a, b in pairwise(chars)):
            raise ValueError(f"{MALFORMED_TURNS}their ends do not increase")

    @property
    def turns(self) -> list[str]:
        """The policy's turns: what it said up to each end."""
        if self.turn_chars is None:
            return [self.text]
        return pieces(self.text, unpack_ids(self.turn_chars))


def transcript(turns: Sequence[str], replies: Sequence[str]) -> str:
    """An answer for people: the policy's turns, and what the environment said between them."""
    between = [f"\n{REPLY_MARK}{reply}\n" for reply in replies[: len(turns) - 1]]
    return "".join(part for turn, reply in zip_longest(turns, between, fillvalue="") for part in (turn, reply))


T = TypeVar("T", str, list[int], list[float])


def pieces(whole: T, ends: Sequence[int]) -> list[T]:
    """The parts of a text or of tokens that end at these places."""
    return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _offsets(packed: bytes | None) -> list[int]:
    try:
        return unpack_ids(packed or b"")
    except MessageError as error:
        raise ValueError(f"{MALFORMED_TURNS}{error.detail}") from None


class Sampling(Message, frozen=True, kw_only=True):
    """Parameters with which completions were sampled. `top_k` 0: off."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 256


class RolloutGroup(Message, frozen=True, kw_only=True):
    """All completions of one task by one policy version: the unit that is scored, shared and
    trained on.

    Its id is the SHA-256 of the encoded bytes (`content_id`), also used as its `Nats-Msg-Id`.
    Rewards are not part of it: they, passes and unknown rewards never cross the swarm plane.
    """

    schema: SwarmSchemaVersion = 3
    node: NodeId
    created_at: UnixTime
    draw: Count
    """The node's running number of the task draw; no two groups of a node have the same one."""
    task: Task
    completions: Annotated[list[Completion], Meta(min_length=1, max_length=MAX_COMPLETIONS)]
    model: ModelIdentity
    policy_version: Count
    sampling: Sampling
    prompt_ids: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None
    environment: Sha256 | UnsetType = UNSET
    """What answered the policy's turns (`EnvironmentSpec.id`); absent for answers of one turn. What
    it said is derived again by each reader.
    """


class SignedRollouts(Message, frozen=True, kw_only=True):
    """The message that crosses the swarm plane: the bytes of a `RolloutGroup` as they are sent, and
    an Ed25519 signature over them.

    The signature covers `signed_bytes(swarm, body, encoding)`. `public_key` is an nkey (`U...`).
    `swarm` is `nats.swarm_id` of the node that signed. A group made for one swarm is valid in no
    other, and because the name is in the message a receiver can tell such a group from a forgery.
    `encoding` says how the group's bytes are packed in `body` (`shared.contracts.codec.unpacked`).
    """

    schema: SwarmSchemaVersion = 3
    swarm: SwarmId
    node: NodeId
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    encoding: Encoding = "none"
    body: bytes


SIGNATURE_DOMAIN = b"swarm-rollouts-v3\x00"


def signed_bytes(swarm: str, body: bytes, encoding: Encoding = "none") -> bytes:
    """The bytes that the signature of a shared group covers: the body as it is sent. A zero byte
    ends the names before it, which cannot contain one.
    """
    return SIGNATURE_DOMAIN + swarm.encode() + b"\x00" + encoding.encode() + b"\x00" + body


class ScoredGroup(Message, frozen=True, kw_only=True):
    """A group with the rewards that this node gave it: `rewards[i]` is that of
    `group.completions[i]`. Answers whose reward is unknown have left the group; `unknown` counts
    them by cause (`shared.rewards.Mark`).

    `passed[i]`: whether that answer passes; None: no pass is defined for this task's source
    (`shared.tasks.evaluation`). `failure` says why a local group has no rewards. The sampler then
    counts the group as dropped, so that the generator does not wait for it.

    `parts`: of several rewards, the own value of each for every answer, by its name; None where it
    does not apply. Only of local groups.
    """

    schema: SwarmSchemaVersion = 3
    group_id: Sha256
    origin: Origin
    group: RolloutGroup
    rewards: Annotated[list[Reward], Meta(max_length=MAX_COMPLETIONS)]
    scored_by: ShortText
    score_seconds: Seconds
    scored_at: UnixTime
    passed: Annotated[list[bool], Meta(max_length=MAX_COMPLETIONS)] | None = None
    unknown: Annotated[dict[PlainText, Count], Meta(max_length=16)] = {}
    failure: ShortText | None = None
    account: ShortText | None = field(default=None, name="share")
    """For a foreign group: the account whose share of a batch it uses, its key or a set of known
    copiers; None: its node.
    """
    established: bool = True
    """For a foreign group: whether its key had earned a whole share when the group was accepted
    (`verifier.newcomer_groups`).
    """
    public_key: Annotated[str, Meta(max_length=64)] = ""
    """For a foreign group: the key that signed it, and its position and Unix time in the swarm's
    stream. The node's other verifiers learn from it what was accepted.
    """
    swarm_seq: Count = 0
    swarm_stored_at: UnixTime = 0.0
    scorer: Sha256 | None = None
    """The scorer that gave the rewards (`TaskSpec.scorer_id`)."""
    parts: Annotated[
        dict[PlainText, Annotated[list[Reward | None], Meta(max_length=MAX_COMPLETIONS)]], Meta(max_length=MAX_REWARD_PARTS)
    ] = {}
    demonstration: bool = False
    """For a foreign group: all its answers pass, its sender is in the roster, and this node takes
    demonstrations (`verifier.demonstrations`).
    """
    replies: Annotated[list[Replies], Meta(max_length=MAX_COMPLETIONS)] | UnsetType = UNSET
    """What the source's environment said to the turns of each answer, as this node derived it."""
    tools: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] | UnsetType = UNSET
    """JSON of the tools that the policy was told of, with whose schemas the prompt is rendered."""

    def shown(self, place: int) -> str:
        """An answer for people: its text, or the policy's turns with what the environment said."""
        completion = self.group.completions[place]
        if not self.replies or completion.turn_chars is None or place >= len(self.replies):
            return completion.text
        return transcript(completion.turns, self.replies[place])

    @property
    def sender_account(self) -> str:
        """Whose share of a batch a foreign group uses."""
        return self.account or self.group.node


class BatchItem(Message, frozen=True, kw_only=True):
    """One group of a batch, in training order. `staleness` is the number of policy versions between
    sampling the group and putting it into the batch.
    """

    scored: ScoredGroup
    staleness: Annotated[int, Meta(ge=-(2**40), le=2**40)] | None
    """None for foreign groups, because their version counts another policy's steps."""
    age_s: Seconds
    weight: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    """The group's weight in the draw divided by the pool's mean weight; None for local groups and
    for strategies without weights.
    """
    pass_rate: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Of a demonstration: this node's own pass rate on its source, above which a reward is an
    advantage; None for other groups.
    """
    replayed: bool = False
    """A local group that was also in an earlier batch (`sampler.replay`); its staleness may exceed
    `sampler.max_staleness`.
    """


class Places(Message, frozen=True, kw_only=True):
    """How many of a batch's foreign groups, its candidates, the trainer trains on.

    It takes the first `keep`, in their order, that teach its policy something. At most `node_cap`
    are from one node and, while others have enough, `source_cap` of one task source (None: no
    limit). `newcomers` are accounts (as in `ScoredGroup.account`); at most `newcomers_most` groups
    come from all of them together; None: no limit.
    """

    keep: Count
    node_cap: Count
    newcomers: Annotated[list[ShortText], Meta(max_length=65_536)] = []
    newcomers_most: Count | None = None
    source_cap: Count | None = None


class Batch(Message, frozen=True, kw_only=True):
    """The groups of one trainer step, and how they were chosen."""

    schema: SwarmSchemaVersion = 3
    number: Annotated[int, Meta(ge=1, le=2**62)]
    """1 for a node's first batch; step n trains on batch n."""
    created_at: UnixTime
    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=65_536)]
    strategy: ShortText
    seed: Seed
    wanted_local: Count
    wanted_external: Count
    pool_local: Count
    pool_external: Count
    shortage: Literal["none", "fill_local", "short"]
    state: SamplerState
    """The sampler's state after this batch. `state.own` holds the pass rates of this node that the
    draw used; `state.sharing` decides the next batch's composition.
    """
    places: Places | None = field(default=None, name="preference")
    """None: the trainer trains on every group of the batch. Named as earlier versions did."""
    pool_replay: Count = 0
    """Number of groups of earlier batches that could have been replayed."""


ROLLOUT_ID_HEADER = "Swarm-Rollout-Id"
MAX_NAMED = 40
"""Largest number of ids in one log line: less than 1 KB."""
MAX_TASKS = 8

_DIGITS = 16
_VALID = re.compile(r"[0-9a-f]{16}")


def rollout_id_of(group_id: str) -> str:
    """The rollout id of the group whose content id (64 hex digits) is `group_id`."""
    return group_id[:_DIGITS]


def claimed_rollout_id(headers: Mapping[str, str]) -> str | None:
    """The rollout id in a message's headers, or None if there is none or it is malformed. Safe to
    log, even from a foreign message.
    """
    claimed = headers.get(ROLLOUT_ID_HEADER, "")
    return claimed if _VALID.fullmatch(claimed) else None


def batch_fields(batch: Batch) -> dict[str, object]:
    """Fields of a log line about a batch: its number, size, datasets and rollout ids (at most the
    first `MAX_NAMED`).
    """
    groups = [item.scored for item in batch.items]
    return {
        "batch": batch.number,
        "groups": len(groups),
        "tasks": sorted({scored.group.task.ref.dataset for scored in groups})[:MAX_TASKS],
        "rollout_ids": [rollout_id_of(scored.group_id) for scored in groups[:MAX_NAMED]],
    }
