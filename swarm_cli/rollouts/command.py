"""`swarm rollouts`: what a node's batches consist of, in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from shared.config import NodeConfig
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible_json
from swarm_cli.chosen_config import ConfigOption, for_node, load_chosen
from swarm_cli.console import note, terminal
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.rollouts.batches import BATCHES_READ, BatchedGroup, BatchReader
from swarm_cli.rollouts.choice import Choice
from swarm_cli.rollouts.shown import as_object, show

CONNECT_TIMEOUT_S = 5.0
FOLLOW_INTERVAL_S = 1.0


def rollouts(
    node: Annotated[str, typer.Argument(help="Whose batches.  [default: the configuration's node]", show_default=False)] = "",
    step: Annotated[int | None, typer.Option(min=1, help="The groups of this step alone, all of them.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="So many groups, the newest.")] = 8,
    local: Annotated[bool, typer.Option("--local", help="Local groups alone.")] = False,
    foreign: Annotated[bool, typer.Option("--foreign", help="Foreign groups alone.")] = False,
    sender: Annotated[str, typer.Option("--from", help="Groups of this node alone.")] = "",
    dataset: Annotated[str, typer.Option(help="Groups of this dataset alone.")] = "",
    right: Annotated[bool, typer.Option("--right", help="Completions with full marks alone.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Completions with less than full marks alone.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with the batches to come, until Ctrl-C.")] = False,
    characters: Annotated[int, typer.Option(min=1, help="Cut a text after so many characters; JSON has all of it.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each group.")] = False,
    node_url: Annotated[str, typer.Option(help="Server of the node's streams.  [default: nats.node_url]")] = "",
    config: ConfigOption = None,
) -> None:
    """Read the groups in a node's batches: question, completions, rewards, who sent each group and
    why it is in the batch. A candidate is one of several of which the trainer keeps some. Oldest
    first, from the batch log as far as it is kept."""
    node_config = for_node(load_chosen(config), node)
    if follow and step is not None:
        raise CommandError("--step names one batch and --follow asks for those to come: leave one out")
    for both, names in ((local and foreign, "--local and --foreign"), (right and wrong, "--right and --wrong")):
        if both:
            raise CommandError(f"{names} leave nothing together: give one of them, or neither for all")
    choice = Choice(
        origin="local" if local else "external" if foreign else None,
        sender=checked_node(sender) if sender else None,
        dataset=dataset or None,
        marks="right" if right else "wrong" if wrong else None,
    )
    console = terminal()

    async def run() -> int:
        shown = 0
        async for found in _groups(node_config, node_url, choice, step, limit, follow):
            if as_json:
                typer.echo(visible_json(as_object(found, choice)))
            else:
                show(found, choice, console, characters)
            shown += 1
        return shown

    if not asyncio.run(run()):
        note(f"no group of {node_config.node.id} is such, in the batches that are kept (at most {BATCHES_READ} were looked at)")


async def _groups(
    config: NodeConfig, url: str, choice: Choice, step: int | None, limit: int, follow: bool
) -> AsyncIterator[BatchedGroup]:
    """The place in the log is taken before the newest batches are printed: a batch that comes
    meanwhile is then shown by `follow`, neither twice nor never.
    """
    plane = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=url)
    try:
        reader = BatchReader(plane, config.node.id)
        if step is not None:
            for found in choice.groups(await reader.batch_at(step)):
                yield found
            return
        place = await reader.last_seq()
        for found in await _newest(reader, place, choice, limit):
            yield found
        while follow:
            async for seq, batch in reader.after(place):
                place = seq
                for found in choice.groups(batch):
                    yield found
            await asyncio.sleep(FOLLOW_INTERVAL_S)
    finally:
        await plane.close()


async def _newest(reader: BatchReader, last_seq: int, choice: Choice, limit: int) -> list[BatchedGroup]:
    """The newest groups up to a place in the log that are asked for, oldest first."""
    found: list[BatchedGroup] = []
    async for batch in reader.back_from(last_seq):
        found = [*choice.groups(batch), *found]
        if len(found) >= limit:
            break
    return found[-limit:]
