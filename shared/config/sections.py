"""The sections of a node's configuration. Every field's description states its meaning, its unit
and the reason for its default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.config.generator_section import GeneratorSection
from shared.config.sampler_section import SamplerSection
from shared.config.section import AnyDtype, Section
from shared.config.trainer_section import LoraSection, TrainerSection
from shared.config.verifier_section import VerifierSection
from shared.contracts.subjects import is_replica
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_ID_PATTERN
from shared.hub_models import COMMIT, how_to_pin, may_only_be_folder
from shared.registry import DEFAULT_VERIFIER, POLICY_STORES, TASK_SOURCES, TRACKERS, VERIFIERS, policy_store_name
from shared.reward_files import Part, code_id, found_from, has_rewards, name_of
from shared.text import visible, without_secrets

__all__ = [
    "BASIC",
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
    "TracingSection",
    "TrackingSection",
    "TrainerSection",
    "VerifierSection",
]


_ENTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class WeightedReward(Section):
    """One of several rewards of a task source."""

    use: str = Field(description="A function in a Python file, as in `reward`, or a verifier's name.")
    weight: float = Field(1.0, ge=-1_000_000, le=1_000_000, description="What it is multiplied by in the sum.")


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
    path: str = Field("", description="For source file: a .jsonl, .json, .csv or .parquet file, or a folder saved by `datasets`.")
    question: str = Field(
        "",
        description="For source file: the column with the questions, or a text with columns in braces. Unset: the first of prompt, "
        "question, problem.",
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
        "math, or a `swarm.verifiers` entry point.",
    )
    reward: str = Field(
        "",
        description="Instead of a verifier, a function in a Python file of yours: `rewards.py:accuracy`, from this file's folder.",
    )
    rewards: list[WeightedReward] = Field(
        default_factory=list, description='Instead of `reward`, several: `[{use = "rewards.py:accuracy", weight = 1.0}, ...]`.'
    )
    pass_at: float | None = Field(
        None,
        allow_inf_nan=False,
        description="The reward from which on an answer passes. Unset: full marks (0.99 of a built-in verifier; of your own, "
        "the higher one of two rewards, and with more there is no pass), unless the scorer says so itself.",
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

    @property
    def scorer_id(self) -> str:
        """SHA-256 (hex) of all that makes a reward besides the answer and its task: the verifier's
        name, its package's version and source or its file, and `pass_at`. Rewards of two scorers
        cannot be compared.
        """
        if has_rewards(self.verifier):
            return hashlib.sha256(json.dumps([code_id(self.verifier), self.pass_at]).encode()).hexdigest()
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

    def _reward_problems(self) -> Iterator[str]:
        if self.reward and self.rewards:
            yield "reward and rewards are both given: keep one"
        elif not (self.reward or self.rewards):
            if not _ENTRY.fullmatch(self.verifier):
                yield f"verifier {visible(self.verifier)[:80]!r} is no name; a function in a file is given as reward"
        elif self.verifier != _rewards_of({"reward": self.reward, "rewards": self.rewards}):
            yield "verifier and reward are both given: keep one; `rewards` may name a verifier beside your own"
        for use in (self.reward, *(each.use for each in self.rewards)):
            if use and not Part(use).file and (use == self.reward or not _ENTRY.fullmatch(use)):
                yield f"{visible(use)[:80]!r} does not name a function in a file: write FILE.py:FUNCTION"

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
        elif self.path or self.question or self.answer:
            yield 'path, question and answer apply only to files: also set source = "file"'


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
    entry = dict(entry)
    if isinstance(entry.get("reward"), str):
        entry["reward"] = found_from(entry["reward"], folder)
    if isinstance(entry.get("rewards"), list):
        entry["rewards"] = [
            {**each, "use": found_from(each["use"], folder)}
            if isinstance(each, dict) and isinstance(each.get("use"), str)
            else each
            for each in entry["rewards"]
        ]
    return entry


@lru_cache(maxsize=256)
def _scorer_id(verifier: str, dataset: str, pass_at: float | None) -> str:
    # A package's task source may score its own answers.
    parts = [verifier, VERIFIERS.code_id(verifier), TASK_SOURCES.code_id(dataset), pass_at]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def scorers_id(specs: Sequence[TaskSpec]) -> str:
    """SHA-256 (hex) of the scorers of all task sources."""
    scorers = sorted({(spec.dataset, spec.canonical_config, spec.scorer_id) for spec in specs})
    return hashlib.sha256(json.dumps(scorers).encode()).hexdigest()


_SERVER = re.compile(r"(?:(?:nats|tls|wss?)://)?(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?/?")
"""A NATS server's address; without a scheme it is one of nats://."""
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class NodeSection(Section):
    """The node's identity."""

    id: str = Field("alpha", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", description="The node's name, unique in the swarm.")
    seed: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Root of every random choice. 0: task draws also depend on a secret, so that nobody can predict the next "
        "tasks. Any other value makes every run draw the same tasks.",
    )
    run: str = Field(
        "dev",
        pattern=RUN_PATTERN,
        description="Name of the run and of its folder. A run that is started again by its name goes on.",
    )
    replica: str = Field(
        "0",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$",
        description="This process's name among the replicas of its role, or its number up to 9,999; on Kubernetes, the pod's name.",
    )
    lease_s: float = Field(
        30.0,
        ge=2,
        le=3600,
        description="Seconds of silence after which another process may take this one's place under the same name; the "
        "replaced process exits. Long enough for a busy machine or a server that restarts. The same for all "
        "processes of the node.",
    )
    var_dir: Path = Field(
        Path("var"),
        description="Folder for everything that services write. Commands that read no configuration (`swarm down`, `restart`, "
        "`add`, `plot`, `model export`) take it from --var-dir.",
    )

    @field_validator("replica")
    @classmethod
    def _replica(cls, value: str) -> str:
        if not is_replica(value):
            raise ValueError("a number counts processes, up to 9999; a longer one needs a letter")
        return value

    @property
    def run_dir(self) -> Path:
        """Folder of this node in this run: metrics, evaluations, checkpoints, policies."""
        return self.var_dir / "runs" / self.run / self.id


class NatsSection(Section):
    """The connections to the node plane and the swarm plane, which may be the same server."""

    inbox_prefix: ClassVar[str] = "_INBOX_{node}.{role}"
    """Of replies. A secured server allows each user only its own."""

    node_url: str = Field("nats://127.0.0.1:4222", description="Server of this node's streams.")
    swarm_url: str | None = Field(
        "nats://127.0.0.1:4222",
        description="Server of the swarm's streams; 'none' for a node without a swarm.",
    )
    swarm_id: str = Field(
        DEFAULT_SWARM_ID,
        pattern=SWARM_ID_PATTERN,
        description="Name of the swarm. It is signed with each group, so that groups of another swarm are refused. `swarm up` "
        "uses the run's name when it starts the server.",
    )
    swarm_domain: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="JetStream domain of the swarm's streams, if swarm_url is the node's own leaf server; empty: none.",
    )
    connect_timeout_s: float = Field(20.0, gt=0, le=600, description="Seconds that a starting process waits for the server.")
    replicas: Literal[1, 3, 5] = Field(1, description="Replicas of each of the node's streams; use 3 in a cluster.")
    swarm_replicas: Literal[1, 3, 5] = Field(1, description="The same for the swarm's streams, if this node creates them.")
    node_key_file: str = Field(
        "",
        description="Nkey seed or .creds file for the node plane; {role} and {node} are replaced by this process's role and node "
        "id. Empty: no key.",
    )
    swarm_key_file: str = Field("", description="The same for the swarm plane. Only the verifier reads it.")
    node_ca_file: str = Field("", description="PEM file of the authority of the node plane's server; empty: the system's.")
    swarm_ca_file: str = Field("", description="The same for the swarm plane.")
    create_streams: bool = Field(
        True,
        description="Whether services create the streams. False: the operator does, with `swarm nats init`.",
    )

    @field_validator("replicas", "swarm_replicas", mode="before")
    @classmethod
    def _number_from_the_environment(cls, value: Any) -> Any:
        # Environment variables are text, which pydantic does not accept for a Literal of numbers.
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("swarm_url", mode="before")
    @classmethod
    def _none_means_alone(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() in {"", "none"} else value

    @field_validator("node_url", "swarm_url")
    @classmethod
    def _address_holds_no_secret(cls, value: str | None) -> str | None:
        """Addresses are in logs, in errors and on screens."""
        if value is not None and value != without_secrets(value):
            raise ValueError(
                "an address with a name and password in it, which logs would show: use nats.node_key_file or nats.swarm_key_file"
            )
        if value is not None and not all(_SERVER.fullmatch(each.strip()) for each in value.split(",")):
            raise ValueError(f"{visible(value, 200)!r} is not a server's address: write nats://HOST:PORT or tls://HOST:PORT")
        return value


class ModelSection(Section):
    """The policy's model."""

    path: str = Field(
        "models/base",
        description="Folder or hub name of any causal LM that `transformers` loads; the default is the demo's toy.",
    )
    revision: str = Field(
        "",
        description="Commit of a hub name, all 40 digits; required, because the files behind a name can change. A folder needs "
        "none.",
    )
    name: str = Field(
        "",
        max_length=512,
        description="The model's public name in the swarm, plain text; empty: model.path, of an absolute path the folder's name.",
    )
    dtype: AnyDtype = Field(
        "auto", description="Dtype of the weights in trainer and generator; auto: bfloat16 on a GPU, else float32."
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 or mps. auto: the GPU if there is one.")
    device_turns: bool = Field(
        False,
        description="Generator and trainer on one device take turns: one step, or one engine's calls. In between each frees "
        "what memory it can. For models of which only one fits while working; not with torchrun.",
    )
    max_length: int = Field(
        0,
        ge=0,
        description="Longest prompt + completion in tokens. 0: the limit in the model's configuration, or less if its "
        "positions change for longer texts.",
    )
    system_prompt: str = Field("", description="System prompt put before each question that has none; empty: none.")

    @field_validator("revision")
    @classmethod
    def _revision_is_a_commit(cls, value: str, info: ValidationInfo) -> str:
        if value and not re.fullmatch(COMMIT, value):
            if may_only_be_folder(path := info.data.get("path", "")):
                folder = f"model.path {visible(path, 80)} is a folder, which has none: remove it"
                raise ValueError(f"{value[:60]!r} is not a full commit hash, and {folder}")
            raise ValueError(
                f"{value[:60]!r} is not a full commit hash; a branch such as main moves, and a tag can be moved, "
                f"so the files may change: {how_to_pin(path)}"
            )
        return value

    @property
    def public_name(self) -> str:
        """Name under which other nodes know this model: no absolute path, which may name a user."""
        return self.name or (Path(self.path).name if Path(self.path).is_absolute() else "") or self.path

    @model_validator(mode="after")
    def _public_name_is_plain(self) -> ModelSection:
        if visible(self.public_name) != self.public_name or len(self.public_name) > 512:
            raise ValueError(
                f"other nodes see the model as {visible(self.public_name, 80)!r}, and refuse names that have control or invisible "
                "characters or are longer than 512 characters: set model.name"
            )
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
    temperature: float = Field(0.0, ge=0, le=10, description="Temperature of held-out answers; 0: greedy.")


class PolicyStoreSection(Section):
    """Transfer of policies from the trainer to the generators."""

    keep: ClassVar[int] = 3
    """Newest policies kept, besides the full copies that their deltas need."""

    uri: str = Field(
        "",
        description="file:///shared/folder, nats:// (JetStream object store), or the scheme of a `swarm.policy_stores` entry "
        "point; empty: the run's folder.",
    )
    anchor_every: int = Field(
        0,
        ge=0,
        le=256,
        description="Policies from one full copy to the next, with deltas in between. 1: only full copies. 0: 16 with nats://, "
        "1 with file://.",
    )

    @field_validator("uri")
    @classmethod
    def _scheme_is_known(cls, value: str) -> str:
        if value:
            POLICY_STORES.check(policy_store_name(value))
        return value


class HttpSection(Section):
    """The HTTP server of each process, with /metrics, /livez and /readyz."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 in a container.")
    base_port: int = Field(
        9400,
        ge=0,
        le=65_500,
        description="Port of the generator; verifier, sampler and trainer use the next three. 0: any free port.",
    )
    port: int | None = Field(None, ge=0, le=65_535, description="Exact port, if each role has its own machine.")


class LogSection(Section):
    """Logging to standard output."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Level on standard output; the run's log files always have info and above. debug adds what services try "
        "again by themselves.",
    )
    format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on terminals and by `swarm up`, or JSON.")


class TrackingSection(Section):
    """Experiment trackers to which the trainer also sends its metrics; see
    docs/extend/tracker.md.
    """

    trackers: Literal["auto"] | list[str] = Field(
        "auto",
        description="auto: TensorBoard if it is installed. Or a list of tensorboard, wandb, trackio and `swarm.trackers` entry "
        "points. []: none.",
    )
    project: str = Field(
        "swarm",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="The project under which a tracker files the run. The run itself is named after node.run and node.id.",
    )
    online: bool = Field(
        False,
        description="Whether a tracker may contact a server; account and address come from its own environment variables. "
        "False: everything stays in node.var_dir.",
    )
    options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of a tracker from an installed package, by name; see that tracker's documentation.",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_are_known(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list):
            for name in value:
                TRACKERS.check(name)
        return value


class TracingSection(Section):
    """Tracing: spans of what each service does with a group; see docs/reading.md."""

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Base URL of an OpenTelemetry collector (OTLP over HTTP) for a span of each thing a service does with a "
        "group. Empty: OTEL_EXPORTER_OTLP_ENDPOINT, else none. Needs the extra otel; keys belong in "
        "OTEL_EXPORTER_OTLP_HEADERS.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_holds_no_secret(cls, value: str) -> str:
        """Configurations are shown, compared and kept with a run's records."""
        if value != without_secrets(value):
            raise ValueError("an address with a name, a password or a query in it: put keys into OTEL_EXPORTER_OTLP_HEADERS")
        return value


BASIC = frozenset(
    {
        *("node.id", "node.seed", "node.var_dir"),
        *("nats.node_url", "nats.swarm_url", "nats.swarm_id"),
        *("model.path", "model.revision", "model.device", "model.system_prompt"),
        *("generator.engine", "generator.completions", "generator.max_new_tokens"),
        *("eval.tasks", "eval.every_versions"),
        *("verifier.share", "verifier.trust"),
        *("sampler.local", "sampler.external", "sampler.strategy"),
        *("trainer.objective", "trainer.learning_rate", "trainer.token_budget", "trainer.max_steps", "trainer.lora.rank"),
        *("http.base_port",),
    }
)
"""As `section.key`. `swarm config show` prints these and every setting that differs from its
default; with `--all` it prints everything.
"""
