"""`swarm new`: a folder with a configuration that suits a model and a file of questions, and with a
reward to begin with.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError

from shared.hub_models import HUB, HUB_PATH
from shared.text import error_text
from swarm_cli.console import note, told_if_slow
from swarm_cli.errors import CommandError
from swarm_cli.installation import PROJECT_FILE
from swarm_cli.toml_view import toml_value

if TYPE_CHECKING:
    from shared.config import TaskSpec
    from shared.config.model_section import ModelSection

REWARD_FILE = "rewards.py"
SMALL_MODEL, SMALL_MODEL_RATE, USUAL_RATE, ADAPTER_FACTOR = 300_000_000, 1e-5, 1e-6, 10
"""Learning rates of all weights: SmolLM2-135M and Gemma 3 270M learn with the first, pretrained
models of usual sizes with the second; adapters take ten times that.
"""
RANK = 16
PROMPT_TOKENS_AT_LEAST = 64
CPU_TOKENS, GPU_TOKENS = 256, 1024
"""What a model that thinks before it answers is given at least."""
HELD_OUT, HELD_OUT_AT_LEAST, ONE_IN = 200, 16, 5
CHARS_PER_TOKEN = 3
"""Few, so that lengths are not underestimated: English has about four."""
KEPT_FREE_BYTES = 2 * 10**9
GPU_FRACTION = 0.3
"""Of a card's memory, which vLLM takes beside the trainer."""
_LOOKED_AT = 2000
_FILES_READ = 100
_BOXED = "Think step by step, and give the final answer in \\boxed{}."
PROMPTS = {
    "final_number": _BOXED,
    "math": _BOXED,
    "exact": "Give the final answer, and nothing else, between <answer> and </answer>.",
}
"""A system prompt for each verifier, in the order in which they are tried: the first that can read
nearly all reference answers scores them.
"""
_REWARD = '''"""Rewards of your own. To use this one, put `reward = "{file}:accuracy"` into {config} in the place
of `verifier`. `swarm task score` shows what it gives (docs/tasks.md).
"""

import re


def found(text):
    """{which}; without one all of it."""
    {code}


def accuracy(completions, answer, **columns):
    """1 for each completion with the row's answer, else 0; None: does not apply."""
    return [float(found(text) == found(str(right))) for text, right in zip(completions, answer)]
'''
_REWARD_IN_USE = _REWARD.replace(
    'Rewards of your own. To use this one, put `reward = "{file}:accuracy"` into {config} in the place\nof `verifier`.',
    "The reward that {config} names.",
)
STUBS = {
    "final_number": (
        "The last number in a text",
        r'numbers = re.findall(r"-?\d+(?:\.\d+)?", text)',
        "return numbers[-1] if numbers else text.strip()",
    ),
    "math": (
        "What is in the last box of a text",
        r'_, box, rest = text.rpartition("\\boxed{")',
        'return (rest.rpartition("}")[0] if box else text).strip()',
    ),
    "exact": (
        "What the last <answer> of a text holds",
        '_, tag, rest = text.rpartition("<answer>")',
        'return (rest.partition("</answer>")[0] if tag else text).strip()',
    ),
}
"""What the reward of `swarm new` looks for, by the verifier that suits the rows."""
_ASKED, _ANSWERED = "Question:", "Answer:"
"""How a model without a chat template is asked. Such a model goes on after its answer, with the
next question.
"""
_CONTENT = 'text = text if isinstance(text, str) else text[-1]["content"]  # to messages, completions are messages'
_CUT = f'text = text.partition("{_ASKED}")[0]  # the model may go on with a question of its own'


_OWN_FORMS = {"group": "TRL's form", "verl": "verl's form", "plain": "the form f(answer, reference)"}
"""How a person's own reward is written, by the form that `shared.reward_files` names."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The nature of a file of questions. verifier: which can score it; the lengths are in
    characters of its longest questions and reference answers but for one in twenty. column: the
    one with the questions; empty if they are made of columns. messages: some are messages. system:
    all have a system message. names: its columns.
    """

    questions: int
    verifier: str
    question_chars: int
    answer_chars: int
    column: str = ""
    messages: bool = False
    system: bool = False
    names: frozenset[str] = frozenset()


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder to make.")],
    model: Annotated[str, typer.Option(help="The model to train: a folder, or a hub name (OWNER/NAME) with --revision.")],
    data: Annotated[
        str, typer.Option(help="Your questions and answers: a file or folder, or a hub data set, OWNER/NAME[/PART][@COMMIT].")
    ],
    revision: Annotated[str, typer.Option(help="Commit of a hub name, all 40 digits.")] = "",
    question: Annotated[str, typer.Option(help="Column with the questions.  [default: found by its name]")] = "",
    answer: Annotated[str, typer.Option(help="Column with the reference answers.  [default: found by its name]")] = "",
) -> None:
    """Write a folder with a configuration that suits your model and your questions, and a reward to
    begin with. `swarm up` in it trains.
    """
    from shared.config.model_section import ModelSection
    from shared.tasks.file_formats import SUFFIXES
    from swarm_cli.model.memory import check_named

    folder = Path(name)
    named = data.partition("@")[0]
    may_be_name = HUB_PATH.fullmatch(f"{HUB}{named}") and not Path(named).exists() and Path(named).suffix not in SUFFIXES
    from_hub = data.startswith(HUB) or may_be_name
    if not from_hub and not Path(data).exists():
        raise CommandError(
            f"there is no {data}: give a file or folder of questions with --data, or a data set of the hub as OWNER/NAME"
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise CommandError(f"{name} is a file: choose another name")
    replaced = "which would be replaced: choose another name, or move it away"
    if os.path.lexists(folder / PROJECT_FILE):
        raise CommandError(f"{name} has a {PROJECT_FILE}, {replaced}")
    check_named(model, revision)
    path = str(Path(model).absolute()) if Path(model).is_dir() else model
    columns = {name: column for name, column in (("question", question), ("answer", answer)) if column}
    with told_if_slow(f"reading the rows of {data}"):
        source = hub_source(data) if from_hub else {"path": str(Path(data).absolute())}
        rows = read_rows(source, columns)
    own = own_reward([Path() if from_hub else Path(data).parent, Path(data), folder], rows.names)
    if own is None and os.path.lexists(folder / REWARD_FILE):
        raise CommandError(f"{name} has a {REWARD_FILE} without a reward for these rows, {replaced}")
    if not from_hub:
        source = {"path": _as_written(Path(data), folder)}
    with told_if_slow(f"reading the model {model}"):
        system_prompt = "" if rows.system else PROMPTS[rows.verifier]
        section, context_tokens, talks = _fitting(ModelSection(path=path, revision=revision), system_prompt)
    reward_line = f"{REWARD_FILE}:accuracy"
    is_text = not rows.messages
    scored = ("verifier", rows.verifier, f'or of your own: reward = "{reward_line}"')
    if not talks:
        scored = ("reward", reward_line, "a model without a chat template goes on after its answer, which this cuts off")
        if is_text := bool(rows.column):
            columns["question"] = f"{_ASKED} {{{rows.column}}}\n{_ANSWERED}"
    if own is not None:
        reward_line = f"{_as_written(own.file, folder)}:{own.function}"
        scored = ("reward", reward_line, f'yours, in {own.form}; or built in: verifier = "{rows.verifier}"')
    with told_if_slow("finding settings that fit into the memory"):
        lines = [*chosen(section, rows, context_tokens, source | columns), scored]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROJECT_FILE).write_text(_toml(lines))
        which, *code = STUBS[rows.verifier]
        code = [*([_CONTENT] if rows.messages and not is_text else []), *([] if talks else [_CUT]), *code]
        reward = (_REWARD if talks else _REWARD_IN_USE).format(
            file=REWARD_FILE, config=PROJECT_FILE, which=which, code="\n    ".join(code)
        )
        if own is None:
            (folder / REWARD_FILE).write_text(reward if "re." in reward else reward.replace("import re\n\n\n", "\n"))
    except OSError as error:
        raise CommandError(f"{name}: cannot be written ({error_text(error)}): choose another folder") from None
    if own is None:
        note(f"wrote {folder / PROJECT_FILE} and {folder / REWARD_FILE}")
    else:
        more = f"; it also has {', '.join(own.others)}" if own.others else ""
        note(f"wrote {folder / PROJECT_FILE}; its reward is {own.function} of your {own.file}, in {own.form}{more}")
    note(f"next: cd {shlex.quote(name)} && swarm up        (swarm config check looks at everything first)")


class OwnReward(NamedTuple):
    """A reward in a person's own file; others: the file's other rewards."""

    file: Path
    function: str
    form: str
    others: tuple[str, ...]


def own_reward(folders: Iterable[Path], columns: Collection[str]) -> OwnReward | None:
    """The first reward for rows of these columns that a Python file in `folders` has. Only in a
    `rewards.py` may it be of the plain form, which other functions have by chance. Nothing is run.
    """
    from shared.reward_files import RewardFileError, rewards_in

    for folder in folders:
        for file in sorted(folder.glob("*.py"), key=lambda each: (each.name != REWARD_FILE, each.name))[:_FILES_READ]:
            with suppress(RewardFileError):
                found = rewards_in(str(file), columns)
                names = [name for name, form in found.items() if form != "plain" or file.name == REWARD_FILE]
                if names:
                    return OwnReward(file, names[0], _OWN_FORMS[found[names[0]]], tuple(names[1:]))
    return None


def _as_written(data: Path, folder: Path) -> str:
    """The path of the data in the configuration: from its folder if the data lies in or beside it,
    so that both can be moved.
    """
    data, folder = Path(os.path.realpath(data)), Path(os.path.realpath(folder))  # ".." does not lead back through a link
    near = data.is_relative_to(folder) or data.parent == folder.parent
    return os.path.relpath(data, folder) if near else str(data)


def hub_source(data: str) -> dict[str, str]:
    """The settings of a data set on the hub, with its newest commit unless one is given. Raises
    CommandError.
    """
    from shared.tasks.file_formats import FileSourceError
    from shared.tasks.hub_files import newest_commit

    name, _, revision = data.removeprefix(HUB).partition("@")
    try:
        return {"path": f"{HUB}{name}", "revision": revision} if revision else newest_commit(f"{HUB}{name}")
    except FileSourceError as error:
        raise CommandError(str(error)) from None


def read_rows(source: Mapping[str, str], columns: Mapping[str, str]) -> Rows:
    """Read the questions, and find the verifier that can read their reference answers.

    Raises:
        CommandError: the file cannot be used; with a line for each mistake.
    """
    from shared.config import TaskSpec
    from shared.tasks.derive import TaskError
    from shared.tasks.file_formats import FileSourceError
    from shared.tasks.file_source import load_rows
    from shared.tasks.prompt import row_messages

    try:
        spec = TaskSpec.model_validate({**source, **columns})
        rows = load_rows(spec)
        named = spec.model_copy(update={"dataset": rows.name})
        verifier = _verifier(named, len(rows))
    except ValidationError as error:
        raise CommandError("\n".join(str(each.get("ctx", {}).get("error", each["msg"])) for each in error.errors())) from None
    except (FileSourceError, TaskError) as error:
        raise CommandError(str(error)) from None
    step = max(1, len(rows) // _LOOKED_AT)
    seen = [rows.row(index) for index in range(0, len(rows), step)]
    column = columns.get("question", "") or rows.columns.get("question", "question")
    messages = [row[0].startswith("\0") for row in seen]  # as `prompt_text` writes them
    system = all(any(role == "system" for role, _ in row_messages(row[0])) for row in seen)
    question_chars, answer_chars = (_most(len(each[part]) for each in seen) for part in (0, 1))
    return Rows(
        rows.distinct_questions(),
        verifier,
        question_chars,
        answer_chars,
        "" if "{" in column else column,
        any(messages),
        system,
        frozenset({"question", "answer", *rows.columns.values(), *rows.names}),
    )


def _verifier(spec: TaskSpec, size: int) -> str:
    """The first of `PROMPTS` that leaves out at most one in twenty of the rows, else the one that
    leaves out the fewest.
    """
    from shared.tasks.reference_checks import look

    left_out: dict[str, float] = {}
    for verifier in PROMPTS:
        looked = look(spec.model_copy(update={"verifier": verifier}), size)
        left_out[verifier] = len(looked.left_out) / max(1, looked.rows)
        if left_out[verifier] <= 0.05:
            return verifier
    return min(left_out, key=left_out.__getitem__)


def _most(lengths: Any) -> int:
    """The length that nineteen of twenty do not exceed."""
    ordered = sorted(lengths)
    return int(ordered[math.ceil(len(ordered) * 0.95) - 1])


def _fitting(model: ModelSection, system_prompt: str) -> tuple[ModelSection, int, bool]:
    """The model with the system prompt, or without one if it has no place for it; its context in
    tokens; and whether it has a chat template. Raises CommandError if the model cannot be used.
    """
    from swarm_cli.model.facts import read_facts

    facts = read_facts(model)()
    if facts.problems:
        raise CommandError("\n".join(facts.problems))
    if not facts.has_chat_template:
        return model, facts.context_tokens, False
    prompted = model.model_copy(update={"system_prompt": system_prompt})
    return (model if read_facts(prompted)().problems else prompted), facts.context_tokens, True


def chosen(model: ModelSection, rows: Rows, context_tokens: int, source: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """The settings, each with its value and its reason."""
    import torch

    from shared.model.model_size import available_memory_bytes, gigabytes
    from swarm_cli.model.memory import configuration_of, model_memory

    gpu = torch.cuda.is_available()
    prompt = max(PROMPT_TOKENS_AT_LEAST, (rows.question_chars + len(model.system_prompt)) // CHARS_PER_TOKEN)
    wanted = max(GPU_TOKENS if gpu else CPU_TOKENS, 64 * math.ceil(2 * rows.answer_chars / CHARS_PER_TOKEN / 64))
    answer = max(1, min(wanted, context_tokens - 2 * prompt))
    width = prompt + answer
    budget = max(width, 8192 if gpu else 1024)
    found = model_memory(
        configuration_of(model.path, model.revision),
        torch.bfloat16 if gpu else torch.float32,
        rank=1,
        tokens=budget,
        width=width,
        gpus=1,
    )
    whole = found.methods[0].plain
    free = int(torch.cuda.mem_get_info()[0] * (1 - GPU_FRACTION)) if gpu else (available_memory_bytes() or 0) - found.generating
    fits = whole is not None and whole.total + KEPT_FREE_BYTES <= free
    rate = SMALL_MODEL_RATE if found.size.parameters <= SMALL_MODEL else USUAL_RATE
    need = "" if whole is None else f", {gigabytes(whole.total)} in a step"
    held_out = min(HELD_OUT, max(HELD_OUT_AT_LEAST, rows.questions // ONE_IN), rows.questions // 2)
    lines: list[tuple[str, Any, str]] = [("model.path", model.path, "")]
    if model.revision:
        lines.append(("model.revision", model.revision, "the commit that you reviewed"))
    if model.system_prompt:
        lines.append(("model.system_prompt", model.system_prompt, "the form in which answers are found"))
    lines.append(("generator.max_new_tokens", answer, "longer answers are cut off; thinking needs more"))
    if gpu:
        lines.append(("generator.gpu_memory_fraction", GPU_FRACTION, "of the card, for vLLM; the trainer has the rest"))
    else:
        lines.append(("generator.groups_per_call", 4, "a step's groups: fewer wait for less, and are fresher"))
    lines += [
        ("eval.tasks", held_out, f"held out of {rows.questions:,} different questions and never trained on"),
        ("eval.every_versions", 10, "steps between evaluations"),
        ("sampler.local", 4, "groups of a step"),
        ("sampler.external", 0, "a node of its own; remove both lines to share (docs/joining.md)"),
    ]
    if fits:
        lines.append(("trainer.learning_rate", rate, f"all {found.size.parameters / 1e6:,.0f} million weights{need}"))
    else:
        rank = min(RANK, found.size.highest_rank or RANK)
        lines.append(("trainer.lora.rank", rank, f"adapters, since all weights need too much memory{need}"))
        lines.append(("trainer.learning_rate", rate * ADAPTER_FACTOR, "of adapters"))
    lines.append(("trainer.token_budget", budget, "tokens of a pass; less saves memory, with the same result"))
    return [*lines, *((key, value, "") for key, value in source.items())]


def _toml(lines: Sequence[tuple[str, Any, str]]) -> str:
    """The settings as dotted keys, which is how messages and pages call them."""
    text = ["# Chosen by `swarm new`; all other settings: swarm config show --all"]
    for key, value, reason in lines:
        if key == "path":
            text += ["", "[[tasks]]"]
        text.append(f"{key} = {toml_value(value)}" + (f"  # {reason}" if reason else ""))
    return "\n".join(text) + "\n"
