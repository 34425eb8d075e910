"""`python -m services.verifier`."""

import services.installed  # noqa: F401  (before all else)
from services.verifier.service import VerifierService
from shared.config.verifier_config import VerifierConfig
from shared.runtime import main

if __name__ == "__main__":
    main("verifier", VerifierConfig, VerifierService)
