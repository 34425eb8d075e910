"""Verifiable tasks: deriving them from a reference, drawing them, and scoring answers without ever
running an answer as code.

Nothing here depends on a server or a model. Importing this package does not import reasoning-gym;
its modules do so when they need it.
"""

from shared.tasks.answers import extract_answer
from shared.tasks.derive import TaskConfigError, TaskError, dataset_size, derive_task
from shared.tasks.held_out import HeldOut, held_out_of, held_out_tasks
from shared.tasks.source import TaskSource
from shared.tasks.specs import check_specs

__all__ = [
    "HeldOut",
    "TaskConfigError",
    "TaskError",
    "TaskSource",
    "check_specs",
    "dataset_size",
    "derive_task",
    "extract_answer",
    "held_out_of",
    "held_out_tasks",
]
