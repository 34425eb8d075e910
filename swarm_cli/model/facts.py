"""Reads what a check needs to know about a model, in a separate process that runs without torch:
importing torch takes longer than all of `swarm config check` otherwise does.

`python -m swarm_cli.model.facts` is that process: the section `[model]` comes on standard input,
the facts go to standard output.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.runtime.parent_death import ending_with_parent
from swarm_cli.own_modules import own_modules

if TYPE_CHECKING:
    from shared.config.sections import ModelSection

MODULE = "swarm_cli.model.facts"
DEADLINE_S = 120.0
"""For importing transformers, and reading a configuration and a tokenizer, maybe from the hub."""
MEMORY_BYTES = 4 * 2**30
"""What that may take: a vocabulary of 250,000 tokens takes some hundred MiB."""


class ModelFacts(NamedTuple):
    """What the services will find when they load the model's configuration and tokenizer."""

    problems: list[str]
    """Why they would refuse it; the other facts hold only where this is empty."""
    context_tokens: int = 0
    has_chat_template: bool = False


def read_facts(model: ModelSection) -> Callable[[], ModelFacts]:
    """Begin to read the model's configuration and tokenizer (for a hub name, from the hub or its
    cache), but not its weights. The returned function waits for the facts.
    """
    from swarm_cli.local.base_model import model_problem

    if problem := model_problem(model.path, model.revision):
        return lambda: ModelFacts([problem])
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # transformers advises to install torch where it finds none.
        env=os.environ | own_modules() | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
        preexec_fn=ending_with_parent(signal.SIGKILL),
    )

    assert process.stdin is not None and process.stdout is not None
    answer = process.stdout
    with process.stdin as section:
        section.write(model.model_dump_json().encode())

    def wait() -> ModelFacts:
        try:
            with process, answer:
                late = threading.Timer(DEADLINE_S, process.kill)
                late.start()
                try:
                    return ModelFacts(*json.loads(answer.read()))
                finally:
                    late.cancel()
        except ValueError:
            if process.returncode == -signal.SIGKILL:
                return ModelFacts(
                    [
                        f"reading model.path {model.path!r} took longer than {DEADLINE_S:.0f} s or too much memory: its chat "
                        "template or tokenizer may demand too much, or the hub is slow; use another model, or try again"
                    ]
                )
            return ModelFacts([f"the process that reads model.path {model.path!r} ended with code {process.returncode}"])

    return wait


def _facts(model: ModelSection) -> ModelFacts:
    from shared.model.quiet_reading import ModelLoadError
    from shared.model.reading import load_tokenizer, model_max_length

    try:
        return ModelFacts([], model_max_length(model), bool(load_tokenizer(model).chat_template))
    except ModelLoadError as error:
        return ModelFacts([str(error)])


def main() -> None:
    """Read the section, write the facts."""
    gc.disable()  # imports make many objects and hardly any garbage
    # This makes transformers find no torch; it reads tokenizers and configurations without.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # It looks through the files of all installed packages to learn which package a module is from,
    # and where it does not learn that, takes the module's name.
    importlib.metadata.packages_distributions = dict
    from shared.config.sections import ModelSection
    from shared.tasks.sandbox.limits import limit_data

    limit_data(MEMORY_BYTES)

    # A tokenizer's code that prints must not write into the answer.
    answer: Any = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(_facts(ModelSection.model_validate_json(sys.stdin.buffer.read())), answer)
    answer.close()


if __name__ == "__main__":
    main()
