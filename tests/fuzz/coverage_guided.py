"""Coverage-guided fuzzing of the border with atheris:
`python -m tests.fuzz.coverage_guided -runs=N CORPUS_FOLDER`.

The fuzzer's bytes are a signed message's body, or the whole message, so that half of what it learns
is behind the signature.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped, unused-ignore]

OURS = [
    "services.verifier",
    "shared.contracts.messages",
    "shared.identity.keys",
    "shared.contracts.subjects",
    "shared.tasks.held_out",
]
with atheris.instrument_imports(include=OURS):
    from services.verifier.border import Candidate, Refused
    from shared.contracts.codec import decode, encode
    from shared.contracts.messages import Batch, RolloutGroup, ScoredGroup
    from shared.contracts.wire import MessageError
    from tests.unit import test_border as good

_folder = tempfile.mkdtemp(prefix="fuzz-")
_border = good.border(Path(_folder))
_seeds = [encode(good.group()), good.signed(good.group())]


def one_input(data: bytes) -> None:
    """Called by the fuzzer. Any exception is a find."""
    payload = good.with_body(data[1:]) if data[:1] == b"\x01" else data[1:]
    verdict = _border.examine(good.SUBJECT, payload, good.NOW_S)
    assert isinstance(verdict, Candidate | Refused)
    for kind in (RolloutGroup, ScoredGroup, Batch):
        with contextlib.suppress(MessageError):
            decode(data[1:], kind)


def main() -> None:
    """Put good messages into the corpus, then let the fuzzer change them."""
    corpus = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if corpus is not None:
        for number, seed in enumerate(_seeds):
            Path(corpus, f"good-{number}").write_bytes(bytes([1 - number]) + seed)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
