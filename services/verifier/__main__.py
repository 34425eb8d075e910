"""`python -m services.verifier`."""

from services.verifier.service import VerifierService
from shared.runtime import main

if __name__ == "__main__":
    main("verifier", VerifierService)
