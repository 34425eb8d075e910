"""`python -m services.trainer`."""

from services.trainer.service import TrainerService
from shared.runtime import main

main("trainer", TrainerService)
