"""The sections of a node's configuration. Every field says what it is, in which unit, and why its
default is what it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.config.sampler_section import SamplerSection
from shared.config.section import Section
from shared.config.task_spec import TaskSpec
from shared.config.trainer_section import LoraSection, TrainerSection
from shared.contracts.limits import VERIFIER_ACK_WAIT_S, VERIFIER_MAX_DELIVER
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_ID_PATTERN
from shared.hub_models import COMMIT, how_to_pin
from shared.registry import ENGINES, POLICY_STORES
from shared.text import visible

__all__ = [
    "EvalSection",
    "GeneratorSection",
    "HttpSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "NatsSection",
    "NodeSection",
    "PolicyStoreSection",
    "SamplerSection",
    "Section",
    "TaskSpec",
    "TrainerSection",
    "VerifierSection",
]


class NodeSection(Section):
    """Who this node is."""

    id: str = Field("alpha", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="Name of the node in the swarm; unique in it.")
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Root of every random choice; combined with the node's id. 0: training tasks are drawn by a secret of the node "
        "besides, kept in its bucket, so that nobody can tell the next ones. Any other: the same seed draws the same tasks in "
        "every run, for experiments; others can then work them out.",
    )
    run: str = Field("dev", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the run; names its folder.")
    replica: str = Field(
        "0", pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$", description="This process among the replicas of its role; the pod's name."
    )
    lease_s: float = Field(
        30.0,
        ge=2,
        le=3600,
        description="A process of this node that is silent this long (suspended, cut off from NATS) may lose its place to another "
        "one under the same name, and then writes nothing more. 30: a busy machine or a server that restarts costs nobody his "
        "place. After a crash on the same disk a restart does not wait for it. The same for all processes of the node.",
    )
    var_dir: Path = Field(
        Path("var"),
        description="Where everything that is written goes; by default inside the folder that the node is started from.",
    )

    @property
    def run_dir(self) -> Path:
        """Folder of this node in this run: metrics, evaluations, checkpoints, policies."""
        return self.var_dir / "runs" / self.run / self.id


class NatsSection(Section):
    """The two planes. They may be the same server."""

    node_url: str = Field(
        "nats://127.0.0.1:4222",
        description="Server of this node's own streams; by default one on this machine, at the port that NATS listens on.",
    )
    swarm_url: str | None = Field("nats://127.0.0.1:4222", description="Server of the swarm's streams; 'none' for a node alone.")
    swarm_id: str = Field(
        DEFAULT_SWARM_ID,
        pattern=SWARM_ID_PATTERN,
        description="Name of the swarm that this node's groups are signed for; those of another one are refused (other_swarm), so "
        "that nothing of one run can be brought into the next. One default for all: nodes that share a server need no setting. "
        "`swarm up` uses the run's name with the server that it starts.",
    )
    swarm_domain: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="JetStream domain of the swarm's streams, where swarm_url is the node's own leaf server; empty: none.",
    )
    connect_timeout_s: float = Field(20.0, gt=0, le=600, description="How long a starting process waits for the server.")
    replicas: Literal[1, 3, 5] = Field(1, description="Copies of each of the node's streams; 3 in a cluster.")
    swarm_replicas: Literal[1, 3, 5] = Field(1, description="Copies of the swarm's streams, if this node creates them.")
    node_key_file: str = Field(
        "", description="Nkey seed or .creds for the node plane; {role} and {node} stand for this process's. Empty: no key."
    )
    swarm_key_file: str = Field("", description="The same for the swarm plane. Only the verifier reads it.")
    node_ca_file: str = Field("", description="PEM file of the authority behind the node plane's certificate; empty: the system's.")
    swarm_ca_file: str = Field("", description="The same for the swarm plane.")
    inbox_prefix: str = Field(
        "_INBOX_{node}.{role}",
        pattern=r"^[A-Za-z0-9_{}-]+(\.[A-Za-z0-9_{}-]+)*$",
        description="Where replies arrive, with {role} and {node}; a secured server allows each user its own only.",
    )
    create_streams: bool = Field(
        True, description="False: services only look whether streams are there; `swarm nats init` makes them, as the operator."
    )

    @field_validator("replicas", "swarm_replicas", mode="before")
    @classmethod
    def _number_from_the_environment(cls, value: Any) -> Any:
        # The environment holds text, which pydantic takes for no member of a Literal of numbers.
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("swarm_url", mode="before")
    @classmethod
    def _none_means_alone(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in {"", "none"} else value


class ModelSection(Section):
    """The policy."""

    path: str = Field("models/base", description="Folder or hub name of any causal LM that `transformers` loads.")
    revision: str = Field(
        "",
        description="Commit of a hub name, all 40 digits, and then required: a name's files can change. A folder needs none.",
    )
    name: str = Field("", max_length=512, description="Public name in the swarm, plain text; empty: the path.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of trainer and generator; auto: bfloat16 on a GPU, else float32."
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda, cuda:1, mps. auto: the GPU if there is one, because a model is slow on a CPU."
    )
    device_turns: bool = Field(
        False,
        description="Generators and trainers on one machine that name the same device use it in turns, one trainer's step or one "
        "generator's calls at a time, and give back what memory they can in between (vLLM on a GPU sleeps): for models of which "
        "only one of the two fits at work. They meet at a file in node.var_dir; not with torchrun.",
    )
    max_length: int = Field(
        0,
        ge=0,
        description="Longest prompt + completion in tokens; 0: what the model's config says, up to where its positions hold.",
    )
    system_prompt: str = Field("", description="Put before each question when not empty.")

    @field_validator("revision")
    @classmethod
    def _revision_is_a_commit(cls, value: str, info: ValidationInfo) -> str:
        if value and not re.fullmatch(COMMIT, value):
            raise ValueError(
                f"{value[:60]!r} is no commit's full hash; a branch such as main moves, a tag can, and their files with them: "
                f"{how_to_pin(info.data.get('path', ''))}"
            )
        return value

    @property
    def public_name(self) -> str:
        """Name under which other nodes know this model."""
        return self.name or self.path

    @model_validator(mode="after")
    def _public_name_is_plain(self) -> ModelSection:
        if visible(self.public_name) != self.public_name or len(self.public_name) > 512:
            raise ValueError(
                f"other nodes see the model as {visible(self.public_name, 80)!r} and refuse names with control or invisible "
                "characters, or over 512: set model.name"
            )
        return self


class GeneratorSection(Section):
    """Sampling of rollout groups."""

    engine: str = Field(
        "auto",
        description="vllm, transformers, openai, or a `swarm.engines` entry point. auto: vllm on a GPU when installed, else "
        "transformers.",
    )
    engine_options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of an engine that an installed package brings, by name; its own page lists them.",
    )
    openai_url: str = Field(
        "", description="Base URL of an OpenAI-compatible server, for engine openai; model.path then names its tokenizer."
    )
    openai_key_file: str = Field(
        "",
        description="File with the key that such a server asks for, sent as a bearer token; empty: openai_key_variable's.",
    )
    openai_key_variable: str = Field(
        "",
        pattern=r"^[A-Za-z_0-9]*$",
        description="Environment variable with that key, such as OPENAI_API_KEY; none is looked at unasked, so that no server gets "
        "a key that was meant for another. The key itself is no setting, and in no log.",
    )
    openai_model: str = Field(
        "", description="The model's name on such a server; empty: model.name, or the only one that the server lists."
    )
    completions: int = Field(8, ge=2, le=1024, description="L: completions per group; the paper's 8. At least 2.")
    groups_per_call: int = Field(8, ge=1, le=4096, description="Tasks sampled together; more is faster and staler.")
    calls: int = Field(0, ge=0, le=256, description="Calls in flight; 0: 8 for vllm (continuous batching), else 1.")
    temperature: float = Field(1.0, gt=0, le=10, description="Of sampling; the trainer scores under the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Below 1, tokens outside the nucleus get no gradient from being avoided.")
    top_k: int = Field(
        0,
        ge=0,
        description="Sample among this many likeliest tokens; 0: off, because the trainer scores over the whole vocabulary.",
    )
    max_new_tokens: int = Field(256, ge=1, le=1_048_576, description="Longest completion in tokens, end token included.")
    lease_s: float = Field(120.0, gt=0, description="A replica that is silent this long loses its task draws to another.")
    groups_per_minute: float = Field(
        0.0, ge=0, description="Most groups a minute with engine openai, which no trainer paces; 0: as fast as the server answers."
    )
    call_timeout_s: float = Field(1800.0, gt=0, description="Deadline of one engine call; an engine that hangs is restarted.")
    policy_load_timeout_s: float = Field(120.0, gt=0, description="Deadline of one weight swap; afterwards the old policy stays.")
    gpu_memory_fraction: float = Field(
        0.5, gt=0, le=1, description="vLLM's share of the GPU; 0.5 leaves the other half to a trainer on the same GPU."
    )
    kv_cache_mb: int = Field(
        0, ge=0, description="vLLM's memory for keys and values, in MiB; 0: 1024 on a CPU, else what gpu_memory_fraction leaves."
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="GPUs that vLLM spreads one copy of the model over, where one does not hold it."
    )
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0: torch's own choice.")

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, value: str) -> str:
        return value if value == "auto" else ENGINES.check(value)


class EvalSection(Section):
    """Held-out evaluation, done by the generator on tasks that never enter training."""

    tasks: int = Field(200, ge=0, le=100_000, description="Size of the fixed held-out set over all sources; 0: off.")
    draw: int = Field(
        0, ge=0, le=300, description="Which held-out set; nodes that are compared need the same one, and none trains on its own."
    )
    every_versions: int = Field(25, ge=1, description="Evaluate when the policy is this many versions on.")
    temperature: float = Field(
        0.0, ge=0, le=10, description="Of held-out answers; 0: greedy, so that no draw of tokens changes a result."
    )


class VerifierSection(Section):
    """The border of the node."""

    share: Literal["all", "informative", "none"] = Field(
        "all", description="Which local groups the swarm gets; informative: those whose rewards differ. The paper shares all."
    )
    share_tokens: bool = Field(True, description="Send token ids and behaviour logprobs too; of use under the same tokenizer.")
    workers: int = Field(
        2,
        ge=1,
        le=256,
        description="Scorer processes for this node's local groups; with one, an answer that hangs delays all others until it is "
        "killed. Foreign groups have processes of their own.",
    )
    foreign_workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Scorer processes for foreign groups, besides `workers`: what strangers can take of this machine's processors "
        "at most. A group costs 10 ms of CPU time.",
    )
    foreign_group_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Wall clock in seconds for a foreign group, its derivation included; past it the group is refused. Ordinary "
        "ones take milliseconds; one second of CPU time for the derivation and for each answer holds besides.",
    )
    answer_timeout_s: float = Field(5.0, gt=0, le=600, description="Wall clock for one own answer; after it the worker is killed.")
    worker_memory_mb: int = Field(
        2048, ge=256, description="Address space of a scorer process in MiB, so that an answer cannot use up the machine's memory."
    )
    max_deliver: int = Field(
        VERIFIER_MAX_DELIVER, ge=1, le=100, description="Tries to score a group before it goes to the dead letters."
    )
    ack_wait_s: float = Field(VERIFIER_ACK_WAIT_S, ge=5, description="A group in work this long goes to another replica.")
    intake_groups_per_s: float = Field(
        20.0, gt=0, le=1_000_000, description="Foreign groups looked at per second, whatever the swarm's size."
    )
    intake_poll_s: float = Field(0.5, gt=0, le=60, description="Seconds between looks at the swarm's stream.")
    accept: Literal["auto", "same", "dataset", "any"] = Field(
        "auto",
        description="Foreign tasks taken in. same: dataset and config of one of this node's [[tasks]]; dataset: its dataset, in "
        "any config; any: every known dataset; auto: same with trust = open, dataset with trust = roster.",
    )
    max_age_s: float = Field(
        1800.0,
        gt=0,
        le=30 * 86_400,
        description="Oldest foreign group taken in, in seconds; ids are remembered so long, so that none is taken in twice.",
    )
    max_clock_skew_s: float = Field(60.0, ge=0, description="How far in the future a foreign group may claim to be made.")
    max_foreign_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        description="Largest foreign message looked at, in bytes: what a stranger can make this node decode at once.",
    )
    max_foreign_completions: int = Field(
        0,
        ge=0,
        le=1024,
        description="Completions taken in of a foreign group, the first ones where it has more; 0: twice generator.completions.",
    )
    max_foreign_length: float = Field(
        2.0,
        ge=1,
        le=1024,
        description="Longest foreign completion, as a multiple of generator.max_new_tokens; 2 leaves room for another tokenizer.",
    )
    max_answer_chars: int = Field(
        16_384, ge=1, description="Longest foreign completion text taken in, in characters: a bound on what a scorer has to read."
    )
    foreign_partial_credit: bool = Field(
        False,
        description="Count what a foreign answer that does not pass (reward below 0.99) earned. Off: it counts 0, because paid "
        "near misses can be written on purpose. On: where a dataset hardly ever gives full marks.",
    )
    replay_memory: int = Field(200_000, ge=1000, description="Foreign group ids remembered so that none counts twice.")
    trust: Literal["open", "roster"] = Field(
        "open", description="open: a name belongs to the first key seen with it; roster: only what `roster_file` lists."
    )
    roster_file: Path = Field(
        Path("var/roster.txt"), description="Lines `name key [note]`, see `swarm roster`; read again when it changes."
    )
    signing_key_file: str = Field(
        "",
        description="Nkey seed that signs what is shared, for all replicas; empty: node.nk in the run's folder, made there.",
    )
    forget_names_after_s: float = Field(
        2_592_000.0, ge=3600, description="Trust open: a name that brought no group for this long is free again; 30 days."
    )
    max_sender_share: float = Field(0.5, gt=0, le=1, description="One sender's part of intake_groups_per_s at most.")
    newcomer_groups: int = Field(
        32, ge=0, le=1_000_000, description="Accepted groups until a key has earned a whole share (some minutes' work); 0: at once."
    )
    newcomer_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Part of intake and scorers that newcomers together have while established senders want it all; else more.",
    )
    intake_look_factor: float = Field(
        8.0, ge=1, le=1000, description="Messages read per one of intake_groups_per_s, to find the others' behind a flood."
    )

    @property
    def accepted_tasks(self) -> Literal["same", "dataset", "any"]:
        """What `accept` means with this `trust`."""
        if self.accept == "auto":
            return "dataset" if self.trust == "roster" else "same"
        return self.accept


class PolicyStoreSection(Section):
    """How policies get from the trainer to the generators."""

    uri: str = Field(
        "",
        description="file:///shared/folder, nats:// (JetStream object storage), or the scheme of a `swarm.policy_stores` entry "
        "point; empty: the run's folder.",
    )
    keep: int = Field(3, ge=2, description="Newest policies kept, with the full copies that they need.")
    anchor_every: int = Field(
        0,
        ge=0,
        le=256,
        description="Policies from one full copy to the next; in between travels what changed. 1: full copies alone; "
        "0: 16 with nats://, 1 with file://, where a full copy is a rename.",
    )

    @field_validator("uri")
    @classmethod
    def _scheme_is_known(cls, value: str) -> str:
        scheme, separator, _ = value.partition("://")
        if value and not separator:
            raise ValueError(f"{value!r} is no URI: write file:///folder or nats://")
        if value:
            POLICY_STORES.check(scheme)
        return value


class HttpSection(Section):
    """Each process serves /metrics, /livez and /readyz."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on; by default this machine alone can reach it. 0.0.0.0 in a container."
    )
    base_port: int = Field(9400, ge=0, le=65_500, description="generator +0, verifier +1, sampler +2, trainer +3; 0: any free.")
    port: int | None = Field(None, ge=0, le=65_535, description="Exact port, where each role has its own machine.")


class LogSection(Section):
    """Logging to standard output."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Of standard output; the run's log files always hold info and above."
    )
    format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal, JSON otherwise.")
