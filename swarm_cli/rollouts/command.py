"""`swarm rollouts`: the groups in a node's batches; the groups it refused; and how its held-out
answers change."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shared.config import NodeConfig
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.wire import is_node_name
from shared.roles import OPERATOR, ROLES
from shared.runtime.planes import connect_node_plane
from shared.suggestions import did_you_mean
from shared.text import visible, visible_json
from shared.transport.base import Transport
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, for_node, load_chosen
from swarm_cli.console import note, say, terminal
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.file_names import FileNames
from swarm_cli.observe.snapshot import no_records, nodes_here, nodes_on_record, run_of
from swarm_cli.rollouts.judge import Choice, judge_of
from swarm_cli.rollouts.records import (
    BATCHES_READ,
    BatchedGroup,
    BatchReader,
    RecordedBatches,
    TrainedRecords,
    clock,
    draw_of,
    names_in_run,
    read_samples,
    record_folder,
    scored_groups,
    training_outcome,
)
from swarm_cli.rollouts.refused import read_refusals, show_refused
from swarm_cli.rollouts.shown import (
    View,
    again_words,
    as_object,
    by_question,
    show,
    show_again,
    show_question,
)
from swarm_cli.target import Target, check_listening, looking_at

_NODES_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of one call, as `rollouts` has them. names: of the files that are datasets."""

    choice: Choice
    names: FileNames
    step: int | None
    limit: int
    follow: bool
    trained: bool
    again: bool
    characters: int
    as_json: bool
    node_url: str


def node_shown(config: NodeConfig, run: str) -> str:
    """A sentence with the node that is shown and the others of its run on this machine."""
    node = config.node.id
    others = [name for name in _nodes(config, run) if name != node]
    if not others:
        return f"this is node {node}: `swarm rollouts NODE` shows another"
    more = f" and {len(others) - _NODES_NAMED} more" if len(others) > _NODES_NAMED else ""
    return f"this is node {node}; `swarm rollouts NODE` shows another: {', '.join(others[:_NODES_NAMED])}{more}"


def _nodes(config: NodeConfig, run: str) -> list[str]:
    """The nodes with a folder in the run, by default in the newest with records of this one."""
    runs = config.node.var_dir / "runs"
    newest = record_folder(config, "")
    folder = Path(runs / run) if run else newest.parent if newest is not None else None
    if folder is None or not folder.is_dir():
        return []
    written = {path.parent.name for role in ROLES for path in folder.glob(f"*/{role}.log")}
    return sorted(name for name in written if is_node_name(name))


CONNECT_TIMEOUT_S = 5.0
FOLLOW_INTERVAL_S = 1.0
_SHOWN = 8
_DATASETS_NAMED = 20
TRAINED_WITHIN_S = 5.0
"""With --follow, how long to wait until a batch's step is on record."""

RunOption = Annotated[
    str,
    typer.Option(
        "--run",
        help="Run on this machine to look at, running or ended, or its records here.  [default: the running one, else the last]",
        show_default=False,
    ),
]


def rollouts(
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="The node whose batches to read.  [default: the configuration's node]", show_default=False
        ),
    ] = "",
    step: Annotated[int | None, typer.Option(min=1, help="Only groups of this step.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="How many of the newest groups.  [default: 8; all of --step]", show_default=False),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Only local groups.")] = False,
    foreign: Annotated[bool, typer.Option("--foreign", help="Only foreign groups.")] = False,
    trained: Annotated[bool, typer.Option("--trained", help="Only groups that a step has trained on.")] = False,
    sender: Annotated[str, typer.Option("--from", help="Only groups from this node.")] = "",
    dataset: Annotated[str, typer.Option(help="Only groups of this dataset; of a file by its name.")] = "",
    group: Annotated[
        str, typer.Option(help="Only groups whose id begins with this; then what each node has done with them, and when.")
    ] = "",
    right: Annotated[bool, typer.Option("--right", help="Only completions that pass.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only completions that do not pass.")] = False,
    refused: Annotated[
        bool, typer.Option("--refused", help="Instead of batches, the groups that the verifier refused last, and why.")
    ] = False,
    evaluated: Annotated[
        str, typer.Option("--eval", metavar="TASK", help="Held-out answers of this dataset, or file, by version.")
    ] = "",
    again: Annotated[
        bool,
        typer.Option("--score-again", help="Score this node's groups anew, by the rewards as they are now; nothing is stored."),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep showing new batches until Ctrl-C.")] = False,
    characters: Annotated[int, typer.Option(min=1, help="Cut texts after this many characters; --json does not cut.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line for each group.")] = False,
    run: RunOption = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Read the groups in a node's batches: question, completions, rewards and their reasons,
    sender, why the group is in the batch, and how the trainer used it. A candidate is a group that
    the trainer may still leave out. Oldest first, from the batch log and from the records in the
    run's folder, as far back as they are kept.
    """
    node_config = for_node(load_chosen(config, NodeConfig), node)
    if not node and not as_json:
        note(node_shown(node_config, run))
    _refuse_contradictions(
        {
            "--step shows one batch and --follow shows new ones": follow and step is not None,
            "--local and --foreign together match nothing": local and foreign,
            "--right and --wrong together match nothing": right and wrong,
            "--refused and --eval show different records": refused and bool(evaluated),
            "--score-again is for this node's stored groups, not for --foreign, --from, --follow, --refused or --eval": (
                again and (foreign or bool(sender) or follow or refused or bool(evaluated))
            ),
            "--refused and --eval cannot have --step, --follow, --local, --foreign, --trained, --right or --wrong": (
                refused or bool(evaluated)
            )
            and (follow or step is not None or local or foreign or trained or right or wrong),
        }
    )
    names = names_in_run(node_config, run)
    choice = Choice(
        origin="local" if local or again else "external" if foreign else None,
        sender=checked_node(sender) if sender else None,
        datasets=names.meant(dataset) if dataset else None,
        group=group.lower(),
        marks="right" if right else "wrong" if wrong else None,
    )
    most = limit or (sys.maxsize if step is not None else _SHOWN)
    request = Request(
        choice=choice,
        names=names,
        step=step,
        limit=most,
        follow=follow,
        trained=trained,
        again=again,
        characters=characters,
        as_json=as_json,
        node_url=node_url,
    )
    if refused:
        folder = record_folder(node_config, run)
        if not show_refused(folder, choice, most, characters, names, as_json=as_json):
            where = folder or f"{node_config.node.var_dir}/runs (it has no records of {node_config.node.id}; name a run with --run)"
            note(f"no such refusal is on record in {where}: only the last ones of each sender are kept")
    elif evaluated:
        _evaluated(node_config, run, evaluated, request)
    else:
        with looking_at(node_config, run, node_url, only_here=False) as target:
            if target.ended is not None:
                note(target.ended.sentence(target.run, time.time()))
            check_listening(node_config.node.var_dir, target)
            asyncio.run(_batched(node_config, config, target, run, request))


def _refuse_contradictions(found: dict[str, bool]) -> None:
    for contradiction, holds in found.items():
        if holds:
            raise CommandError(f"{contradiction}: leave one out")


async def _batched(config: NodeConfig, given: Path | None, target: Target, run: str, request: Request) -> None:
    """Show the groups of batches, and of the run that they are of, how they were used."""
    plane, node = None, config.node.id
    if target.ended is None:
        plane = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=target.node_url)
    try:
        there = await run_of(plane, node) if plane is not None else ""
        if plane is not None and run and there not in ("", run):
            what = f"the server at {visible(target.node_url, 400)} has {node} of run {visible(there, 80)}"
            note(f"{what}: run {run} is read from its records")
            await plane.close()
            plane = None
        run = run or there or target.run
        folder = config.node.var_dir / "runs" / run / node if run else record_folder(config, "")
        records = TrainedRecords(folder if folder is not None and folder.is_dir() else None)
        # A node of this run whose folder is elsewhere has its streams on the server.
        if run and records.folder is None and (plane is None or not await run_of(plane, node)):
            raise no_records(config.node.var_dir / "runs" / run, [node])
        if request.trained and records.folder is None:
            raise CommandError(
                f"--trained needs the trainer's records, but {config.node.var_dir}/runs has none of {node}: "
                "run this on the node's machine, or set SWARM_NODE__VAR_DIR"
            )
        reader = BatchReader(plane, node) if plane is not None else RecordedBatches(folder, node)
        view = View(terminal(), judge_of(config, given, run, request.names, node_url=request.node_url), request.characters)
        await _show(reader, view, records, request, node)
        if request.choice.group and not request.as_json:
            for line in await _path(config, plane, run, request.choice.group):
                say(line)
    finally:
        if plane is not None:
            await plane.close()


async def _show(reader: BatchReader | RecordedBatches, view: View, records: TrainedRecords, request: Request, node: str) -> None:
    """Print the chosen groups, and say if there is none or the newest waits for its step.

    Raises:
        CommandError: none of the batches has a group of the chosen dataset.
    """
    shown, newest = 0, None
    if request.again and (groups := [found async for found in _groups(reader, request, records)]):
        await _score_again(groups, view, records, request)
        return
    async for found in _groups(reader, request, records):
        fate = training_outcome(records, found.batch.number, found.item.scored.group_id)
        if request.as_json:
            typer.echo(visible_json(as_object(found, fate, request.choice, view.judge)))
        else:
            show(found, fate, request.choice, view)
        shown, newest = shown + 1, fate
    if not shown:
        _refuse_unseen(request.choice, node, request.names)
        if isinstance(reader, RecordedBatches) and not reader.steps and reader.unreadable:
            raise CommandError(f"no batch of {node} can be read: {reader.unreadable}")
        if await reader.last_seq():
            note(f"no group in the batches of {node} matches; at most {BATCHES_READ} batches were searched")
        else:
            note(f"no batch of {node} is on record" if isinstance(reader, RecordedBatches) else f"{node} has made no batch yet")
    elif newest is not None and newest.yet:
        note("the newest batch waits for its step: --trained shows only groups that a step has trained on")


async def _path(config: NodeConfig, plane: Transport | None, run: str, group: str) -> list[str]:
    """Say what the nodes of a run or a server have done with the groups whose id begins with
    `group`, a line for each event. Each time is by the clock of the node that tells it.
    """
    runs, told = config.node.var_dir / "runs", list[tuple[float, str, str]]()
    nodes = sorted(await nodes_here(plane) if plane is not None else nodes_on_record(runs / run))
    draws, ids = set[tuple[str, int]](), {group}

    def is_meant(scored: ScoredGroup) -> bool:
        return scored.group_id.startswith(group) or draw_of(scored) in draws

    if plane is not None:
        for node in nodes:
            draws |= {draw_of(scored) for scored in await scored_groups(plane, node, group)}
    else:
        for node in nodes:
            with suppress(CommandError):
                recorded = RecordedBatches(runs / run / node, node)
                async for batch in recorded.back_from(await recorded.last_seq()):
                    draws |= {draw_of(item.scored) for item in batch.items if item.scored.group_id.startswith(group)}
    for node in nodes:
        of_run = (await run_of(plane, node) if plane is not None else "") or run
        folder = runs / of_run / node
        reader, trained = BatchReader(plane, node) if plane is not None else RecordedBatches(folder, node), TrainedRecords(folder)
        if plane is not None:
            for scored in await scored_groups(plane, node, group, draws):
                ids.add(scored.group_id)
                rewards = scored.failure or f"rewards {', '.join(f'{reward:.3g}' for reward in scored.rewards[:_SHOWN])}"
                whose = "scored" if scored.origin == "local" else f"taken in, from {scored.group.node}"
                told.append((scored.scored_at, node, f"{whose}: {rewards}"))
        with suppress(CommandError):  # it has no batch yet
            async for batch in reader.back_from(await reader.last_seq()):
                for item in (each for each in batch.items if is_meant(each.scored)):
                    used = training_outcome(trained, batch.number, item.scored.group_id).sentence()
                    told.append((batch.created_at, node, f"in the batch of step {batch.number}: {used}"))
        refused = (each for each in read_refusals(folder) if each.id.startswith(tuple(ids)))
        told += [(each.time, node, f"refused: {each.reason}: {each.detail}") for each in refused]
    return [visible(f"{clock(at)}  {node}  {words}") for at, node, words in sorted(told)]


async def _score_again(groups: Sequence[BatchedGroup], view: View, records: TrainedRecords, request: Request) -> None:
    """Print the groups with their rewards before and now, and sum these up."""
    pairs: list[tuple[float, float | None]] = []
    scored = await view.judge.score_again([found.item.scored for found in groups])
    for found, again in zip(groups, scored, strict=True):
        if request.as_json:
            fate = training_outcome(records, found.batch.number, found.item.scored.group_id)
            now = {
                "rewards": again.rewards,
                "unknown": again.causes,
                "problem": again.problem or None,
                "reference": again.reference,
            }
            typer.echo(visible_json(as_object(found, fate, request.choice, view.judge) | {"again": now}))
        else:
            show_again(found, again, request.choice, view)
        pairs += [
            (reward, again.rewards[place] if again.rewards else None) for place, _, reward in request.choice.completions(found.item)
        ]
    note(again_words(pairs))


def _refuse_unseen(choice: Choice, node: str, names: FileNames) -> None:
    """Raise CommandError if the batches that were searched have other datasets than the one that
    was asked for.
    """
    if choice.datasets is None or not choice.seen or not choice.datasets.isdisjoint(choice.seen):
        return
    there = sorted(visible(names.shown(dataset), 100) for dataset in choice.seen)
    asked = min(choice.datasets, key=len)
    has = ", ".join(there[:_DATASETS_NAMED]) + (f" and {len(there) - _DATASETS_NAMED} more" if there[_DATASETS_NAMED:] else "")
    guess = f"; {question}" if (question := did_you_mean(asked, there)) else ""
    raise CommandError(f"no group of {visible(asked, 100)} is in the batches of {node} that were searched: they have {has}{guess}")


def _evaluated(config: NodeConfig, run: str, task: str, request: Request) -> None:
    """Show held-out answers, question by question."""
    console, folder = terminal(), record_folder(config, run)
    where = str(folder or config.node.var_dir / "runs")
    for answers in by_question(read_samples(folder), task, where, request.names).values():
        if request.as_json:
            for version, sample in answers:
                typer.echo(visible_json({"policy_version": version, **msgspec.to_builtins(sample)}))
        else:
            show_question(answers, request.limit, console, request.characters, request.names)


async def _groups(reader: BatchReader | RecordedBatches, request: Request, records: TrainedRecords) -> AsyncIterator[BatchedGroup]:
    """The chosen groups. The position in the log is read before the newest batches are printed, so
    that `follow` shows a batch that comes meanwhile exactly once.
    """
    if request.step is not None:
        for found in _chosen_groups(await reader.batch_at(request.step), request, records)[-request.limit :]:
            yield found
        return
    place = await reader.last_seq()
    newest: list[BatchedGroup] = []
    async for batch in reader.back_from(place):
        newest = [*_chosen_groups(batch, request, records), *newest]
        if len(newest) >= request.limit:
            break
    for found in newest[-request.limit :]:
        yield found
    while request.follow and isinstance(reader, BatchReader):  # an ended run makes no more
        async for seq, batch in reader.after(place):
            place = seq
            await _until_trained(records, batch.number)
            for found in _chosen_groups(batch, request, records):
                yield found
        await asyncio.sleep(FOLLOW_INTERVAL_S)


def _chosen_groups(batch: Batch, request: Request, records: TrainedRecords) -> list[BatchedGroup]:
    """The chosen groups of a batch, in training order."""
    groups = request.choice.groups(batch)
    return [
        each for each in groups if not request.trained or training_outcome(records, batch.number, each.item.scored.group_id).trained
    ]


async def _until_trained(records: TrainedRecords, step: int) -> None:
    """Give the trainer a moment to record how it used a batch that has just come."""
    waited = 0.0
    while records.folder is not None and waited < TRAINED_WITHIN_S and records.for_step(step) is None:
        await asyncio.sleep(FOLLOW_INTERVAL_S / 4)
        waited += FOLLOW_INTERVAL_S / 4
