"""The sections that every process of a node reads: its name, the servers, health and logs.
Every field's description states its meaning, its unit and the reason for its default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from shared.config.load import Config
from shared.config.section import Section
from shared.contracts.subjects import is_replica
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_ID_PATTERN
from shared.roles import ROLES, Role, RoleSet
from shared.text import visible, without_secrets

_SERVER = re.compile(r"(?:(?:nats|tls|wss?)://)?(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?/?")
"""A NATS server's address; without a scheme it is one of nats://."""
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class NodeSection(Section):
    """The node's identity."""

    lease_s: ClassVar[float] = 30.0
    """Silence after which another process may take this one's place under the same name; the
    replaced process exits. Long enough for a busy machine or a server that restarts.
    """

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
    var_dir: Path = Field(
        Path("var"),
        description="Folder for everything that services write. Commands that read no configuration (`swarm down`, `restart`, "
        "`add`, `plot`, `model export`) take it from --var-dir.",
    )

    roles: RoleSet = Field(
        "all",
        description="The node's services. generator,verifier: it makes, scores and shares groups and trains nothing, such as a "
        "teacher. verifier: it shares what people answer (`swarm answer`).",
    )

    @field_validator("replica")
    @classmethod
    def _replica(cls, value: str) -> str:
        if not is_replica(value):
            raise ValueError("a number counts processes, up to 9999; a longer one needs a letter")
        return value

    @property
    def role_names(self) -> tuple[Role, ...]:
        """The roles that run."""
        return tuple(role for role in ROLES if self.roles == "all" or role in self.roles.split(","))

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
    replicas: Literal[1, 3, 5] = Field(
        1, description="Replicas of each stream that this node creates, its own and the swarm's; use 3 in a cluster."
    )
    window_gib: float = Field(
        2.0,
        ge=0.125,
        le=4096,
        description="Most GiB of the newest hour of groups that the swarm's stream keeps, as who creates it says; chunks of large "
        "groups may take as much again. `swarm nats init --plane swarm` sets it later.",
    )
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

    @property
    def window_bytes(self) -> int:
        """`window_gib` in bytes."""
        return int(self.window_gib * 2**30)

    @field_validator("replicas", mode="before")
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


class ProcessConfig(Config):
    """The part of a node's configuration that every process reads."""

    node: NodeSection = Field(default_factory=NodeSection)
    nats: NatsSection = Field(default_factory=NatsSection)
    http: HttpSection = Field(default_factory=HttpSection)
    log: LogSection = Field(default_factory=LogSection)

    def http_port(self, role: str) -> int:
        """Port of a role's /metrics; 0: any free port."""
        if self.http.port is not None:
            return self.http.port
        offset = ROLES.index(role)
        return self.http.base_port + offset if self.http.base_port else 0
