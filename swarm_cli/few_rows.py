"""Warns of rows of files that are not used, as no answer earns full marks, and of files whose rows
are soon used up for sharing: the border takes only so many groups of a row from each sender in an
hour. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.config import NodeConfig
from shared.text import visible
from swarm_cli.console import count
from swarm_cli.observe.node_state import duration

if TYPE_CHECKING:
    from shared.tasks.file_questions import FileQuestions

GROUPS_PER_S = 1.0
"""What a small model on one GPU makes (the demo's toy on two cores makes 5 to 15, a large model far
less): a file that is not used up at this rate is not warned of.
"""


def left_out_rows(files: Sequence[FileQuestions]) -> list[str]:
    """A sentence for each file some rows of which are left out, with its lines."""
    return [
        "\n  ".join(f"[[tasks]] {file.place + 1}: {visible(line, 500)}" for line in file.left_out)
        for file in files
        if file.left_out
    ]


def soon_used_up(config: NodeConfig, files: Sequence[FileQuestions]) -> list[str]:
    """A sentence for each file of which a sender of `GROUPS_PER_S` uses up all rows before the
    first may come again; none if this node takes no foreign groups.
    """
    if not files or not config.sampler.external or config.nats.swarm_url is None:
        return []
    # Imports numpy, which commands without a file do without.
    from services.verifier.copies import GROUPS_OF_A_ROW, REMEMBERED_S

    return [sentence for file in files if (sentence := _sentence(file, GROUPS_OF_A_ROW, REMEMBERED_S))]


def _sentence(file: FileQuestions, of_a_row: int, remembered_s: float) -> str:
    """Empty if the file lasts. of_a_row: groups that are taken of a row from one sender within
    `remembered_s`.
    """
    trained, per_s = file.questions - file.held_out, GROUPS_PER_S * file.part
    most = trained * of_a_row
    if most >= remembered_s * per_s:
        return ""
    enough = math.ceil(remembered_s * per_s / of_a_row)
    besides = f" besides the {file.held_out:,} that evaluation takes" if file.held_out else ""
    return (
        f"[[tasks]] {file.place + 1}: {visible(file.path, 200)}: few rows for sharing, {count(trained, 'question')}{besides}. Of "
        f"each, a node takes {of_a_row} groups an hour from another node: {most:,} in all, which one that makes a group a second "
        f"has sent in {duration(most / per_s)}. Further ones are refused as `repeated`, and the node trains on its local groups "
        f"alone until the hour is over. Use more rows: {enough:,} to train on last the hour; no setting raises the limit"
    )
