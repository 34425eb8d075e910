"""`python -m services.sampler`."""

from services.sampler.service import SamplerService
from shared.runtime import main

main("sampler", SamplerService)
