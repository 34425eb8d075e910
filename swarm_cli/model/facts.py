"""Reads what a check needs to know about a model, in a separate process that runs without torch:
importing torch takes longer than all of `swarm config check` otherwise does.

`python -m swarm_cli.model.facts` is that process: the section `[model]` comes on standard input,
the facts go to standard output. Whether the weights' names and shapes are the architecture's only
torch can tell; that verdict is kept in the user's cache, under a digest of all that it depends on.
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
    from shared.config.sections import ModelSection

MODULE = "swarm_cli.model.facts"
DEADLINE_S = 120.0
"""For importing transformers, and reading a configuration and a tokenizer, maybe from the hub."""
MEMORY_BYTES = 4 * 2**30
"""What that may take: a vocabulary of 250,000 tokens takes some hundred MiB."""
MOST_READ_BYTES = 4 * 2**30
"""Of larger weights only names and shapes are checked here. The services check all numbers when
they load them.
"""
MOST_READ_TORCH_BYTES = 2 * 2**30
"""The same of files in torch's format, which count toward `MEMORY_BYTES` while they are read."""
_WEIGHTS = "weights"


class ModelFacts(NamedTuple):
    """What the services will find when they load the model."""

    problems: list[str]
    """Why they would refuse it; the other facts hold only where this is empty."""
    context_tokens: int = 0
    has_chat_template: bool = False
    undeclared_end: str = ""
    """The token with which the chat template ends a turn, where the model declares neither it nor
    another one there as an end token.
    """


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
    from shared.model.chat_template import ending_token
    from shared.model.configuration import ModelLoadError
    from shared.model.reading import end_tokens, load_tokenizer, model_max_length

    try:
        tokenizer, length = load_tokenizer(model), model_max_length(model)
        ends = end_tokens(model, tokenizer)
        _check_weights(model)
    except ModelLoadError as error:
        return ModelFacts([str(error)])
    turn_end = ending_token(tokenizer) if ending_token(tokenizer, ends) is None else None
    return ModelFacts([], length, bool(tokenizer.chat_template), "" if turn_end is None else str(tokenizer.decode([turn_end])))


def _check_weights(model: ModelSection) -> None:
    """Check the weights that are on this machine. Raises ModelLoadError."""
    from shared.model.configuration import ModelLoadError, check_not_quantised, read_configuration
    from shared.model.weight_files import check_values, local_weights

    check_not_quantised(read_configuration(model.path, model.revision), f"model.path {model.path!r}")
    if not (files := local_weights(model.path, model.revision)):
        return
    kept = _kept(files[0].parent, files)
    try:
        ties, needed = json.loads(kept.read_text())
    except (OSError, ValueError):
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
            ) from None
        problem, ties, needed = json.loads(process.stdout)
        if problem:
            raise ModelLoadError(problem) from None
        with contextlib.suppress(OSError):  # without a cache the next check asks torch again
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps([ties, needed]))
    if sum(file.stat().st_size for file in files) <= MOST_READ_BYTES:
        check_values(files, ties, needed)


def _kept(folder: Path, files: Sequence[Path]) -> Path:
    """Where the verdict is kept, under a digest of the configuration and of all tensors' names,
    shapes and types.
    """
    from shared.model.weight_files import tensors_of

    digest = hashlib.sha256(f"{VERSION} ties needed layers torch {importlib.metadata.version('transformers')}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    for file in files:
        stat = file.stat()
        known: Any = (stat.st_size, stat.st_mtime_ns)
        if file.suffix == ".safetensors":
            known = sorted((name, entry["dtype"], entry["shape"]) for name, entry in tensors_of(file).items())
        digest.update(json.dumps([file.name, known]).encode())
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "swarm-rl" / "models" / f"{digest.hexdigest()}.json"


def _looked_at(model: ModelSection) -> tuple[str, dict[str, str], list[str]]:
    """What is wrong with the weights' names and shapes, and with the numbers in files of torch,
    which tensors are one, and the names of embedding and output layer.
    """
    import torch

    from shared.model.configuration import ModelLoadError
    from shared.model.loading import LOOKED_AT, check_torch_values, load_causal_lm, outer_matrices
    from shared.model.weight_files import local_weights

    try:
        loaded = load_causal_lm(model, dtype=torch.float32, device=LOOKED_AT)
        ties, needed = dict(loaded.all_tied_weights_keys or {}), outer_matrices(loaded)
        files = local_weights(model.path, model.revision)
        if sum(file.stat().st_size for file in files) <= MOST_READ_TORCH_BYTES:
            check_torch_values(files, ties, needed)
        return "", ties, needed
    except ModelLoadError as error:
        return str(error), {}, []


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
    from shared.config.sections import ModelSection
    from shared.runtime.process_limits import limit_data

    limit_data(MEMORY_BYTES)

    # A tokenizer's code that prints must not write into the answer.
    answer: Any = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = ModelSection.model_validate_json(sys.stdin.buffer.read())
    json.dump(_looked_at(model) if weights else _facts(model), answer)
    answer.close()


if __name__ == "__main__":
    main()
