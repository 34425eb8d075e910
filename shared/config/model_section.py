"""The sections on the policy's model and on the transfer of its versions. Every field's description
states its meaning, its unit and the reason for its default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.config.section import AnyDtype, Section
from shared.hub_models import COMMIT, how_to_pin, may_only_be_folder
from shared.registry import POLICY_STORES, policy_store_name
from shared.text import visible


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
    threads: int = Field(0, ge=0, description="CPU threads of torch in generator and trainer, each; 0: torch's default.")
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


class PolicyStoreSection(Section):
    """Transfer of policies from the trainer to the generators."""

    keep: ClassVar[int] = 3
    """Newest policies kept, besides the full copies that their deltas need."""

    uri: str = Field(
        "",
        description="file:///shared/folder, nats:// (JetStream object store), or the scheme of a `swarm.policy_stores` entry "
        "point; empty: the run's folder.",
    )

    @field_validator("uri")
    @classmethod
    def _scheme_is_known(cls, value: str) -> str:
        if value:
            POLICY_STORES.check(policy_store_name(value))
        return value
