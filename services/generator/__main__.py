"""`python -m services.generator`."""

from services.generator.service import GeneratorService
from shared.runtime import main

main("generator", GeneratorService)
