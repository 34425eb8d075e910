"""`python -m services.trainer`, or `torchrun --nproc-per-node N -m services.trainer` for a policy
too large for one GPU.
"""

import os

import services.installed  # noqa: F401  (before all else)
from shared.config import NodeConfig
from shared.importing import without_collection
from shared.runtime import main

with without_collection():
    from services.trainer.service import TrainerService

if int(os.environ.get("WORLD_SIZE", "1")) == 1:
    main("trainer", NodeConfig, TrainerService)
elif os.environ.get("RANK") == "0":
    from services.trainer.torchrun import LeadingTrainer

    main("trainer", NodeConfig, LeadingTrainer)
else:
    from services.trainer.torchrun import follow_main

    follow_main()
