"""Reads what a check needs to know about a model, in a separate process that runs without torch:
importing torch takes longer than all of `swarm config check` otherwise does.

`python -m swarm_cli.model.facts` is that process: the section `[model]` comes on standard input,
the facts go to standard output. Whether the weights are the architecture's, and numbers, only torch
can tell; that they are is kept in the user's cache, until a file changes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.runtime.process_limits import ending_with_parent
from shared.version import VERSION
from swarm_cli.installation import own_modules

if TYPE_CHECKING:
    from shared.config.model_section import ModelSection

MODULE = "swarm_cli.model.facts"
DEADLINE_S = 120.0
"""For importing transformers, and reading a configuration and a tokenizer, maybe from the hub."""
MEMORY_BYTES = 4 * 2**30
"""What that may take: a vocabulary of 250,000 tokens takes some hundred MiB."""
MOST_READ_BYTES = 4 * 2**30
"""Of larger weights only names and shapes are checked here. The services check all numbers when
they load them.
"""
_WEIGHTS = "weights"


class ModelFacts(NamedTuple):
    """The model as the services will find it when they load it."""

    problems: list[str]
    """Why they would refuse it; the other facts hold only where this is empty."""
    context_tokens: int = 0
    has_chat_template: bool = False
    undeclared_end: str = ""
    """The token with which the chat template ends a turn, where the model declares neither it nor
    another one there as an end token.
    """
    unlisted_end: str = ""
    """The same where the model declares it, and its generation_config.json only others."""
    tokenizer_tokens: int = 0
    """The longest text that the tokenizer says it is for (`model_max_length`)."""


def read_facts(model: ModelSection) -> Callable[[], ModelFacts]:
    """Begin to read the model's configuration, tokenizer and weights (for a hub name, from the hub
    or its cache; weights only from the cache). The returned function waits for the facts.
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
                        f"reading model.path {model.path!r} took longer than {DEADLINE_S:.0f} s or too much memory: its "
                        "tokenizer may demand too much, or the disk or the hub is slow; use another model, or try again"
                    ]
                )
            return ModelFacts([f"the process that reads model.path {model.path!r} ended with code {process.returncode}"])

    return wait


def _facts(model: ModelSection) -> ModelFacts:
    """Read them in this process. An end token that only other programs would miss is no problem
    here, and so is told apart.
    """
    from shared.model.chat_template import ending_token
    from shared.model.configuration import ModelLoadError
    from shared.model.reading import declared_ends, end_tokens, load_tokenizer, model_max_length

    try:
        tokenizer, length = load_tokenizer(model), model_max_length(model)
        ends = end_tokens(model, tokenizer)
        _check_weights(model)
    except ModelLoadError as error:
        return ModelFacts([str(error)])
    turn_end = ending_token(tokenizer) if ending_token(tokenizer, ends) is None else None
    listed = declared_ends(model)
    unlisted = ending_token(tokenizer, ends) if turn_end is None and listed and ending_token(tokenizer, listed) is None else None
    undeclared_end, unlisted_end = ("" if token is None else str(tokenizer.decode([token])) for token in (turn_end, unlisted))
    return ModelFacts(
        [], length, bool(tokenizer.chat_template), undeclared_end, unlisted_end, min(int(tokenizer.model_max_length), 2**62)
    )


def _check_weights(model: ModelSection) -> None:
    """Check the weights that are on this machine. Raises ModelLoadError."""
    from shared.model.configuration import ModelLoadError, check_not_quantised, read_configuration
    from shared.model.weight_files import local_weights

    check_not_quantised(read_configuration(model.path, model.revision), f"model.path {model.path!r}")
    files = local_weights(model.path, model.revision)
    if not files or (passed := _verdict_file(files)).exists():
        return
    process = subprocess.run(
        [sys.executable, "-m", MODULE, _WEIGHTS],
        input=model.model_dump_json().encode(),
        stdout=subprocess.PIPE,
        check=False,
        preexec_fn=ending_with_parent(signal.SIGKILL),
    )
    if process.returncode:
        raise ModelLoadError(
            f"the process that looks at the weights of model.path {model.path!r} ended with code {process.returncode}"
        )
    if problem := json.loads(process.stdout):
        raise ModelLoadError(problem)
    with contextlib.suppress(OSError):  # without a cache the next check asks torch again
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _verdict_file(files: Sequence[Path]) -> Path:
    """The file that is there if the weights passed. Its name is a digest of the configuration and
    of what changes with the files' contents.
    """
    digest = hashlib.sha256(f"{VERSION} {importlib.metadata.version('transformers')}\n".encode())
    digest.update((files[0].parent / "config.json").read_bytes())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_ctime_ns}\n".encode())
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "swarm-rl" / "models" / f"{digest.hexdigest()}.passed"


def _weights_problem(model: ModelSection) -> str:
    import torch

    from shared.model.configuration import ModelLoadError
    from shared.model.loading import NO_NUMBERS, check_stored_numbers, load_causal_lm

    try:
        looked_at = load_causal_lm(model, dtype=torch.float32, device=NO_NUMBERS)
        check_stored_numbers(model, looked_at, most_bytes=MOST_READ_BYTES)
    except ModelLoadError as error:
        return str(error)
    return ""


def main() -> None:
    """Read the section, write the facts."""
    gc.disable()  # imports make many objects and hardly any garbage
    weights = sys.argv[1:] == [_WEIGHTS]
    if not weights:
        # This makes transformers find no torch; it reads tokenizers and configurations without.
        sys.modules["torch"] = None  # type: ignore[assignment]
        # It looks through the files of all installed packages to learn which package a module is
        # from, and where it does not learn that, takes the module's name.
        importlib.metadata.packages_distributions = dict
    from shared.config.model_section import ModelSection
    from shared.runtime.process_limits import limit_data

    limit_data(MEMORY_BYTES + weights * MOST_READ_BYTES)

    # A tokenizer's code that prints must not write into the answer.
    answer: Any = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = ModelSection.model_validate_json(sys.stdin.buffer.read())
    json.dump(_weights_problem(model) if weights else _facts(model), answer)
    answer.close()


if __name__ == "__main__":
    main()
