"""What the server of `tests.forked` imports before it forks. What is imported here is passed over
by every later garbage collection, in the server and in what it forks.
"""

import importlib

from shared.importing import without_collection
from swarm_cli.app import build

with without_collection():
    for name in (
        "services.generator.service",
        "services.generator.engines.transformers_engine",
        "services.trainer.service",
        "services.verifier.service",
        "services.sampler.service",
        "services.trainer.torchrun",
        "torch.utils.tensorboard",
        "torch._dynamo",
        "reasoning_gym.factory",
        "shared.transport.nats.transport",
    ):
        importlib.import_module(name)
    build()
