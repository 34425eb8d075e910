"""All that a command which looks at nodes reads of a configuration."""

from __future__ import annotations

from pydantic import Field

from shared.config.node_sections import ProcessConfig
from shared.config.verifier_section import VerifierSection


class ViewConfig(ProcessConfig):
    """The nodes' servers, and whose keys count (`verifier.trust` and its roster)."""

    verifier: VerifierSection = Field(default_factory=VerifierSection)
