"""`python -m services.sampler`."""

import services.installed  # noqa: F401  (before all else)
from services.sampler.service import SamplerService
from shared.config.sampler_section import SamplerConfig
from shared.runtime import main

main("sampler", SamplerConfig, SamplerService)
