"""Warnings about settings and data that are allowed but will most likely spoil a run: values that
have ruined runs, a key that is sent in clear, files with unusable or too few rows. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from services.trainer.objectives.config import configured_objective, departures
from shared.config import NodeConfig
from shared.registry import DEFAULT_VERIFIER, SCORED_LOCALLY
from shared.text import visible
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.console import count
from swarm_cli.observe.node_state import duration
from swarm_cli.observe.verdict import FEWEST_TASKS

if TYPE_CHECKING:
    from shared.tasks.file_rows import FileQuestions
    from swarm_cli.task_probe import Derived


HIGHEST_RATE, HIGHEST_ADAPTER_RATE = 1e-3, 1e-2
"""Learning rates of AdamW above which to warn. Full fine-tuning of pretrained policies takes 1e-6
to 1e-5, the demo's toy 1e-4, and adapters ten times that.
"""
_LONG_ANSWER = 65_536
TOY_RATE, TOY_TOKENS, FEWEST_STEPS = 5e-5, 16, 50
_HOT, _COLD = 1.5, 0.3


def risky_settings(config: NodeConfig) -> list[str]:
    """A sentence for each setting that is likely to ruin the run, with the usual value."""
    return [*_training_ruin(config), *_sampling_ruin(config), *_shown_key(config)]


def unlike_its_source(config: NodeConfig) -> list[str]:
    """Return what the chosen objective deliberately leaves out of its source; empty if nothing."""
    with suppress(ValueError, TypeError):
        differs = configured_objective(config).objective.differs
        return [f"trainer.objective = {config.trainer.objective}: {differs}"] if differs else []
    return []


def risky_with_model(
    config: NodeConfig,
    context_tokens: int,
    has_chat_template: bool,
    undeclared_end: str = "",
    unlisted_end: str = "",
    tokenizer_tokens: int = 0,
) -> list[str]:
    """The same for settings that depend on the model, of which the arguments are
    `swarm_cli.model.facts`.
    """
    sentences = []
    asked = config.generator.max_new_tokens
    if asked >= context_tokens:
        sentences.append(
            f"generator.max_new_tokens = {asked:,}: the model's context holds {context_tokens:,} with the question, so it "
            "cuts answers off, and an answer that never ends fills it; a few hundred are enough for most tasks"
        )
    if not has_chat_template and not all("{" in source.question for source in config.tasks):
        sentences.append(
            f"model.path = {config.model.path}: its tokenizer has no chat template, so the model goes on with the question's text. "
            'For a base model, write how in [[tasks]], with your column in braces, also one of messages: question = "Question: '
            '{question}\\nAnswer:". A chat model answers badly: '
            "use its -Instruct folder, or add chat_template.jinja"
        )
    if undeclared_end:
        sentences.append(
            f"model.path = {config.model.path}: its chat template ends a turn with {visible(undeclared_end, 60)}, which is no end "
            "token of the model, so answers may go on after it until generator.max_new_tokens: add it to eos_token_id in "
            "generation_config.json, or bring the model in with `swarm model import`, which does that"
        )
    if unlisted_end:
        sentences.append(
            f"model.path = {config.model.path}: its chat template ends a turn with {visible(unlisted_end, 60)}, and the "
            "end tokens in its generation_config.json are others: answers end here, and may not in other programs that load the "
            "model: add it to eos_token_id there"
        )
    if 0 < tokenizer_tokens <= asked:
        sentences.append(
            f"generator.max_new_tokens = {asked:,}: the model's tokenizer says that it is for texts of up to "
            f"{tokenizer_tokens:,} tokens (model_max_length in tokenizer_config.json), so longer answers may be nonsense: "
            "correct that number, or ask for less"
        )
    return sentences


def toys_settings(config: NodeConfig, *, toy: bool) -> list[str]:
    """A sentence for each setting that suits the demo's toy and not the model that is trained: a
    copy of its configuration has both. toy: whether the toy is trained.
    """
    if toy:
        return []
    trainer, asked = config.trainer, config.generator.max_new_tokens
    sentences = []
    if TOY_RATE <= trainer.learning_rate <= HIGHEST_RATE and not trainer.lora.rank:
        sentences.append(
            f"trainer.learning_rate = {trainer.learning_rate:g}: that of the demo's toy, at which a pretrained model forgets what "
            "it knows; usual is 1e-6 to 1e-5"
        )
    if asked <= TOY_TOKENS:
        sentences.append(
            f"generator.max_new_tokens = {asked}: that of the demo's toy; an answer of a pretrained model is cut off after {asked} "
            "tokens: a few hundred are enough for most tasks"
        )
    return sentences


def _training_ruin(config: NodeConfig) -> Iterator[str]:
    trainer = config.trainer
    adapters = trainer.lora.rank > 0
    if trainer.learning_rate > (HIGHEST_ADAPTER_RATE if adapters else HIGHEST_RATE):
        usual = "1e-5 to 1e-4 with adapters" if adapters else "1e-6 to 1e-5 for a pretrained model"
        yield f"trainer.learning_rate = {trainer.learning_rate:g}: the policy forgets all it knows in a few steps; usual is {usual}"
    if FEWEST_STEPS <= trainer.max_steps < trainer.warmup_steps:  # fewer steps are a try
        yield (
            f"trainer.warmup_steps = {trainer.warmup_steps:,}: longer than max_steps = {trainer.max_steps:,}, so the learning rate "
            "is never reached; usual is 0 to 20"
        )
    with suppress(ValueError, TypeError):  # `swarm_cli.config_checks.objective_problem` says why
        yield from departures(trainer, configured_objective(config).objective)
    for dataset in sorted({spec.dataset for spec in config.tasks if spec.verifier == DEFAULT_VERIFIER} & SCORED_LOCALLY):
        yield (
            f"[[tasks]] {dataset}: it is scored locally only, so no group of it is shared or taken from another node; train on "
            "another dataset beside it, or use verifier exact"
        )
    for spec in config.tasks:
        if not spec.sandbox and _takes_foreign(config):
            name = visible(spec.file_name if spec.source == "file" else spec.dataset, 80)
            yield f"[[tasks]] {name}: sandbox = false, so no group of it is taken from another node; local groups alone train on it"
    if not config.sampler.local:
        yield "sampler.local = 0: the policy learns only from other nodes' answers, never from its own"
    if not config.eval.tasks:
        yield "eval.tasks = 0: nothing measures whether the policy gets better or worse; 200 held-out questions are enough"
    elif config.eval.tasks < FEWEST_TASKS:
        yield f"eval.tasks = {config.eval.tasks}: too few to judge a run by at its end; set {FEWEST_TASKS} or more"


def _sampling_ruin(config: NodeConfig) -> Iterator[str]:
    generator = config.generator
    if generator.temperature > _HOT:
        yield f"generator.temperature = {generator.temperature:g}: answers become noise; usual is 0.7 to 1"
    if generator.temperature < _COLD:
        yield (
            f"generator.temperature = {generator.temperature:g}: the answers of a group become alike, so the policy learns "
            "nothing from them; usual is 0.7 to 1"
        )
    if generator.max_new_tokens > _LONG_ANSWER:
        yield (
            f"generator.max_new_tokens = {generator.max_new_tokens:,}: an answer that never ends delays its group and fills the "
            "trainer's memory; a few hundred are enough for most tasks, a few thousand for long reasoning"
        )


def sent_keys(config: NodeConfig) -> list[str]:
    """Say where a configuration, perhaps somebody else's, has this machine's secrets sent."""
    return [
        f"what {each.key_setting} = {visible(each.key, 200)} holds is sent to {visible(each.url, 200)} as the key of that server"
        for each in _servers(config)
        if each.key
    ]


class _Server(NamedTuple):
    """A server that is asked: the setting with its address, and that with its key, if any."""

    setting: str
    url: str
    key_setting: str
    key: str


def _servers(config: NodeConfig) -> Iterator[_Server]:
    generator = config.generator
    if generator.engine == "openai":
        yield _Server("generator.openai_url", generator.openai_url, "generator.openai_key_variable", generator.openai_key_variable)
    for judge in dict.fromkeys(spec.judge for spec in (*config.tasks, *config.eval.sets) if spec.judge.url):
        yield _Server("judge.url", judge.url, "judge.key_variable", judge.key_variable)


def _shown_key(config: NodeConfig) -> Iterator[str]:
    for each in _servers(config):
        try:
            asked = urlsplit(each.url)
        except ValueError:  # no address, which sends nothing
            continue
        if each.key and asked.scheme == "http" and asked.hostname not in LOOPBACK:
            yield (
                f"{each.setting} = {visible(each.url, 200)}: the key of {each.key_setting.rpartition('.')[2]} is sent there "
                "unencrypted, where everybody on the way can read it; use https:// with a server on another machine"
            )


GROUPS_PER_S = 1.0
"""What a small model on one GPU makes (the demo's toy on two cores makes 5 to 15, a large model far
less): a file that is not used up at this rate is not warned of.
"""


def left_out_rows(files: Sequence[FileQuestions]) -> list[str]:
    """A sentence for each file whose columns had to be chosen, and for each some rows of which are
    left out, with its lines.
    """
    noted = [f"[[tasks]] {file.place + 1}: {file.path}: {visible(file.note, 500)}" for file in files if file.note]
    return noted + [
        "\n  ".join(f"[[tasks]] {file.place + 1}: {visible(line, 500)}" for line in file.left_out)
        for file in files
        if file.left_out
    ]


def row_limit_warnings(config: NodeConfig, files: Sequence[FileQuestions]) -> list[str]:
    """A sentence for each file of which a sender of `GROUPS_PER_S` uses up all rows before the
    first may come again; none if this node takes no foreign groups.
    """
    if not files or not _takes_foreign(config):
        return []
    # Imports numpy, which commands without a file do without.
    from services.verifier.copies import GROUPS_OF_A_ROW, REMEMBERED_S

    return [sentence for file in files if (sentence := _sentence(file, GROUPS_OF_A_ROW, REMEMBERED_S))]


def sharing_warnings(config: NodeConfig, tasks: Derived) -> list[str]:
    """`row_limit_warnings`, and a sentence for each source of which this node refuses all foreign
    groups because no pass is defined.
    """
    waits = _takes_foreign(config) and not config.verifier.foreign_partial_credit
    return [*(tasks.awaiting_pass if waits else []), *row_limit_warnings(config, tasks.files)]


def _takes_foreign(config: NodeConfig) -> bool:
    return bool(config.sampler.external) and config.nats.swarm_url is not None


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
