"""A node of a later version: its messages to the swarm have fields that this version does not know,
at every level. It runs a whole verifier until its standard input ends.

    python -m tests.integration.newer_node NAME URL FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from shared.contracts import control, messages
from shared.identity import statements


def newer(kind: type[msgspec.Struct], **changed: type) -> type[msgspec.Struct]:
    """The message with a further field, and with newer messages inside."""
    fields = [("added", tuple[str, tuple[int, ...]], ("parts", (1, 2))), *changed.items()]
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), module=kind.__module__, frozen=True, kw_only=True)
    setattr(sys.modules[kind.__module__], kind.__name__, made)
    return made


def all_newer() -> None:
    """Replace the messages of this process, before anything else imports them."""
    message = newer(messages.PromptMessage, parts=list[newer(messages.Part)])  # type: ignore[misc]
    task = newer(messages.Task, ref=newer(messages.TaskRef), prompt=list[message])  # type: ignore[valid-type]
    completions = list[newer(messages.Completion)]  # type: ignore[misc]
    model = newer(messages.ModelIdentity)
    newer(messages.RolloutGroup, task=task, completions=completions, model=model, sampling=newer(messages.Sampling))
    newer(messages.SignedRollouts)
    newer(statements.SignedStatement)
    newer(control.NodeRecord, model=model)
    newer(control.EvalReport, per_task=dict[str, newer(control.TaskScore)])  # type: ignore[misc]


async def run(name: str, url: str, folder: Path) -> None:
    """Share eight groups, and take in what others share."""
    from tests.integration.running_verifier import configured, generate, group, verifier

    async with verifier(configured(name, url, folder)) as node:
        await generate(node.node, *(group(name, index) for index in range(8)))
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    all_newer()
    asyncio.run(run(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
