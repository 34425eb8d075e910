"""`python -m services.generator`."""

from shared.importing import without_collection
from shared.runtime import main

with without_collection():
    from services.generator.service import GeneratorService

main("generator", GeneratorService)
