"""All that the verifier reads of a node's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from shared.config.generator_section import GeneratorSection
from shared.config.load import Entry
from shared.config.sampler_section import SamplerConfig
from shared.config.task_sections import EvalSection, rewards_from
from shared.config.verifier_section import ViewConfig
from shared.registry import ENVIRONMENTS, VERIFIERS
from shared.reward_files import Part, parts_of


class VerifierConfig(ViewConfig, SamplerConfig):
    """The verifier's part: tasks and what is held out, what its own generator may make, and whether
    foreign groups are wanted.
    """

    generator: GeneratorSection = Field(default_factory=GeneratorSection)
    eval: EvalSection = Field(default_factory=EvalSection)

    @classmethod
    def placed(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """As in the base class, also of evaluation sets."""
        values = super().placed(values, folder)
        if not isinstance(section := values.get("eval"), dict) or "sets" not in section:
            return values
        return {**values, "eval": {**section, "sets": rewards_from(section["sets"], folder)}}

    @property
    def max_foreign_age_s(self) -> float:
        """Age from which a foreign group is refused: never less than what the sampler takes."""
        return max(self.verifier.max_age_s, self.sampler.max_external_age_s)

    @property
    def max_foreign_completions(self) -> int:
        """Completions of a foreign group that are used, of which the first are taken."""
        return self.verifier.max_foreign_completions or 2 * self.generator.completions

    @property
    def max_foreign_tokens(self) -> int:
        """Tokens of the longest foreign completion."""
        return int(self.verifier.max_foreign_length * self.generator.max_new_tokens)

    @property
    def max_answer_chars(self) -> int:
        """Characters of the longest foreign completion: more than its tokens usually have."""
        return max(16_384, 8 * self.max_foreign_tokens)

    def problems(self) -> Iterator[str]:
        """As in the base class."""
        wants_foreign = self.sampler.external and self.nats.swarm_url is not None and self.verifier.accepted_tasks != "any"
        if wants_foreign and self.tasks and not any(spec.sandbox for spec in self.tasks):
            yield (
                f"sampler.external is {self.sampler.external}, but no group of another node is taken of a source with sandbox = "
                "false, because its answers would reach your network, files and GPU: set sampler.external = 0, or add a source "
                "whose reward runs in the sandbox"
            )
        yield from super().problems()

    def entries(self) -> Iterator[Entry]:
        """As in the base class."""
        for name in dict.fromkeys(
            part.use for spec in [*self.tasks, *self.eval.sets] for part in parts_of(spec.verifier) if not part.file
        ):
            yield "verifier", VERIFIERS.kind, name
        for name in dict.fromkeys(spec.environment for spec in [*self.tasks, *self.eval.sets] if spec.environment):
            if not Part(name).file:
                yield "verifier", ENVIRONMENTS.kind, name
        yield from super().entries()
