"""`python -m services.generator`."""

import services.installed  # noqa: F401  (before all else)
from shared.config import NodeConfig
from shared.importing import without_collection
from shared.runtime import main

with without_collection():
    from services.generator.service import GeneratorService

main("generator", NodeConfig, GeneratorService)
