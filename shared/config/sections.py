"""The sections of a node's configuration. Every field's description states its meaning, its unit
and the reason for its default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.config.dtypes import AnyDtype
from shared.config.generator_section import GeneratorSection
from shared.config.sampler_section import SamplerSection
from shared.config.section import Section
from shared.config.task_spec import TaskSpec
from shared.config.trainer_section import LoraSection, TrainerSection
from shared.config.verifier_section import VerifierSection
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_ID_PATTERN
from shared.hub_models import COMMIT, how_to_pin, may_only_be_folder
from shared.registry import POLICY_STORES, policy_store_name
from shared.text import visible, without_secrets

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
        description="Root of every random choice, combined with the node's id. 0: task draws also depend on a secret in the node's "
        "bucket, so that nobody can predict the next tasks. Any other value makes every run draw the same tasks, which "
        "experiments need; other nodes can then predict them.",
    )
    run: str = Field(
        "dev",
        pattern=RUN_PATTERN,
        description="Name of the run and of its folder. A run that is started again by its name goes on.",
    )
    replica: str = Field(
        "0",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$",
        description="This process's name among the replicas of its role; on Kubernetes, the pod's name.",
    )
    lease_s: float = Field(
        30.0,
        ge=2,
        le=3600,
        description="Seconds of silence after which another process may take this process's place under the same name, for example "
        "because it was suspended or cut off from NATS. The replaced process then exits. Of what it sent before, only a purge "
        "of its batch log or a piece of a policy may still take effect. If nobody has taken its place, it continues. 30 is "
        "long enough that no process loses its place because a machine is busy or a server restarts. After a crash on the "
        "same disk a restart does not wait for this time, unless the machine was rebooted. Must be the same for all processes "
        "of the node.",
    )
    var_dir: Path = Field(
        Path("var"),
        description="Folder for everything that services write; the default is relative to the folder in which the node is "
        "started. Commands that look at runs find them in its subfolder runs; `swarm down`, `restart`, `add`, `plot` and "
        "`model export`, which read no configuration, take the folder from --var-dir.",
    )

    @property
    def run_dir(self) -> Path:
        """Folder of this node in this run: metrics, evaluations, checkpoints, policies."""
        return self.var_dir / "runs" / self.run / self.id


class NatsSection(Section):
    """The connections to the node plane and the swarm plane, which may be the same server."""

    node_url: str = Field(
        "nats://127.0.0.1:4222",
        description="Server of this node's streams; the default is a server on this machine at NATS' standard port.",
    )
    swarm_url: str | None = Field(
        "nats://127.0.0.1:4222",
        description="Server of the swarm's streams; 'none' for a node without a swarm. The default is the same server, so "
        "that one machine needs only one.",
    )
    swarm_id: str = Field(
        DEFAULT_SWARM_ID,
        pattern=SWARM_ID_PATTERN,
        description="Name of the swarm, which is part of the signature of this node's groups. Groups signed for another name are "
        "refused (other_swarm), so groups of one run cannot enter the next. All nodes have the same default, so nodes that share "
        "a server need no setting. When `swarm up` starts the server, it uses the run's name.",
    )
    swarm_domain: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="JetStream domain of the swarm's streams, if swarm_url is the node's own leaf server; empty: none.",
    )
    connect_timeout_s: float = Field(
        20.0,
        gt=0,
        le=600,
        description="How long a starting process waits for the server, in seconds. 20 is enough for a server that is started at "
        "the same time.",
    )
    replicas: Literal[1, 3, 5] = Field(
        1,
        description="Replicas of each of the node's streams; use 3 in a cluster. The default is 1 because a single server can hold "
        "only one.",
    )
    swarm_replicas: Literal[1, 3, 5] = Field(1, description="The same for the swarm's streams, if this node creates them.")
    node_key_file: str = Field(
        "",
        description="Nkey seed or .creds file for the node plane; {role} and {node} are replaced by this process's role and node "
        "id. Empty: no key.",
    )
    swarm_key_file: str = Field("", description="The same for the swarm plane. Only the verifier reads it.")
    node_ca_file: str = Field(
        "",
        description="PEM file of the authority that signed the certificate of the node plane's server; empty: the system's "
        "authorities.",
    )
    swarm_ca_file: str = Field("", description="The same for the server of the swarm plane, which often has another authority.")
    inbox_prefix: str = Field(
        "_INBOX_{node}.{role}",
        pattern=r"^[A-Za-z0-9_{}-]+(\.[A-Za-z0-9_{}-]+)*$",
        description="Subject prefix for replies; {role} and {node} are replaced. A secured server allows each user only its own "
        "prefix.",
    )
    create_streams: bool = Field(
        True,
        description="Whether services create the streams, so that a server of one's own needs no preparation. False: they only "
        "check that the streams exist, and the operator creates them with `swarm nats init`.",
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
        description="Folder or hub name of any causal LM that `transformers` loads; the default is the toy policy of the demo.",
    )
    revision: str = Field(
        "",
        description="Commit of a hub name, all 40 digits. Required for a hub name, because the files behind it can change; a "
        "folder needs none.",
    )
    name: str = Field(
        "",
        max_length=512,
        description="The model's public name in the swarm, plain text; empty: model.path, of an absolute path the folder's name.",
    )
    dtype: AnyDtype = Field(
        "auto", description="Dtype of the weights in trainer and generator; auto: bfloat16 on a GPU, else float32."
    )
    device: str = Field(
        "auto", description="auto, cpu, cuda, cuda:1 or mps. auto: the GPU if there is one, because a model is slow on a CPU."
    )
    device_turns: bool = Field(
        False,
        description="Whether generators and trainers on one machine that use the same device take turns: one trainer's step, or "
        "one generator's calls. In between, each frees what memory it can (vLLM on a GPU sleeps). For models so large that only "
        "one of the two fits while working. They coordinate through a file in node.var_dir. Does not work with torchrun.",
    )
    max_length: int = Field(
        0,
        ge=0,
        description="Longest prompt + completion in tokens. 0: the limit in the model's configuration, or less if its position "
        "encoding changes for longer texts.",
    )
    system_prompt: str = Field("", description="System prompt put before each question; empty: none.")

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
        description="Number of the held-out set. Nodes that you compare need the same one. No node trains on the questions of its "
        "own set; so change this, or tasks, only with a new run: an old one may have trained on what is now held out.",
    )
    every_versions: int = Field(
        25,
        ge=1,
        description="Evaluate again after this many policy versions. With the defaults an evaluation takes half as many answers as "
        "training takes from this node in between.",
    )
    temperature: float = Field(
        0.0, ge=0, le=10, description="Temperature of held-out answers; 0: greedy, so that sampling does not add noise to results."
    )


class PolicyStoreSection(Section):
    """Transfer of policies from the trainer to the generators."""

    uri: str = Field(
        "",
        description="file:///shared/folder, nats:// (JetStream object store), or the scheme of a `swarm.policy_stores` entry "
        "point; empty: the run's folder.",
    )
    keep: int = Field(3, ge=2, description="Number of newest policies kept. The full copies that their deltas need are kept too.")
    anchor_every: int = Field(
        0,
        ge=0,
        le=256,
        description="Number of policies from one full copy to the next; those in between are sent as deltas. 1: only full copies. "
        "0: 16 with nats://, 1 with file://, where publishing a full copy only renames a folder.",
    )

    @field_validator("uri")
    @classmethod
    def _scheme_is_known(cls, value: str) -> str:
        if value:
            POLICY_STORES.check(policy_store_name(value))
        return value


class HttpSection(Section):
    """The HTTP server of each process, with /metrics, /livez and /readyz."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; the default is reachable only from this machine. Use 0.0.0.0 in a container.",
    )
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
        description="Level on standard output; the run's log files always contain info and above. debug adds what "
        "services try again by themselves, which nobody has to act on.",
    )
    format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on terminals and by `swarm up`, or JSON.")
