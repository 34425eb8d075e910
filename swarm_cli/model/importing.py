"""`swarm model import`: convert a GGUF file, a package, a folder or a hub model to a tested folder
that every service loads.

The test: trainer and engine must give the model's tokens the same log-probabilities, as it is and
after a policy trained from it was published and loaded.
"""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.text import error_text
from swarm_cli.console import note
from swarm_cli.errors import CommandError

if TYPE_CHECKING:
    from services.generator.engines import Sample
    from shared.config.model_section import ModelSection
    from shared.model.importing import ImportPlan, ReadModel


def import_model(source: str, out: Path, *, revision: str = "", dtype: str | None = None) -> Path:
    """Write the model's folder to `out`, describe the model on standard error, and return `out`.

    The folder is tested before it is renamed to `out` (a leading ~ is the home folder), so it
    appears complete and working, or not at all.

    Raises:
        CommandError: the model cannot be imported, or trainer and engine give it different
        logprobs.
    """
    from shared.atomic_folder import atomic_folder, refuse_filled
    from shared.model.configuration import ModelLoadError
    from shared.model.gguf_file import gguf_read_once
    from shared.model.importing import check_room, find_source, plan_import, read_model, whole_path, write_model

    try:
        out = whole_path(out)
        refuse_filled(out, "the model")
        with gguf_read_once():
            found = find_source(source, revision)
            note(f"reading the headers of {found.origin} ...")
            plan = plan_import(found, dtype)
            check_room(plan, out)
            with atomic_folder(out) as staging:
                note(f"reading {plan.size.parameters:,} parameters, as {plan.dtype} ...")
                read = read_model(plan)
                note(f"writing {out} ...")
                write_model(plan, read, staging)
                _tell(plan, read, out, sum(file.stat().st_size for file in staging.iterdir()))
                # Free its copy of the weights, which the test of the folder does not need.
                del read
                note("comparing what trainer and engine make of it ...")
                note(f"{'parity':<16} {_tried(staging, out)}")
    except (ModelLoadError, FileExistsError) as error:
        raise CommandError(f"nothing was imported: {error}") from None
    except OSError as error:
        raise CommandError(f"nothing was imported: {_disk_trouble(error, out)}") from None
    return out


def _tried(folder: Path, out: Path) -> str:
    policy = folder / "published.policy"  # on the disk whose room was checked
    try:
        found = engine_parity(str(folder), policy)
    except ParityError as error:
        cause = str(error).replace(str(folder), str(out))
        raise CommandError(f"nothing was imported: the model was read, but cannot be used here: {cause}") from None
    finally:
        policy.unlink(missing_ok=True)
    for parity in found:
        if parity.problem:
            raise CommandError(f"nothing was imported: {parity.problem}")
    base, published = (f"{parity.largest_nats:.1e} nats on {parity.tokens} sampled tokens" for parity in found)
    return f"trainer and engine agree to {base}, and to {published} of a published policy (float32; {TOLERANCE_NATS:g} allowed)"


def _tell(plan: ImportPlan, read: ReadModel, out: Path, folder_bytes: int) -> None:
    """Print what one should know before training this model, to avoid failures later."""
    from shared.model.model_size import gigabytes

    size = plan.size
    halved = "; --dtype bfloat16 halves it" if plan.dtype == "float32" else ""
    for name, text in [
        ("parameters", f"{size.parameters:,} ({size.architecture}, {size.layers} layers of {size.width})"),
        ("weights", f"{plan.dtype}, a folder of {gigabytes(folder_bytes)}{halved}"),
        ("vocabulary", f"{size.vocabulary:,} tokens{_added(read.tokenizer)}"),
        ("context", f"{size.context_length:,} tokens" if size.context_length else "not limited by the configuration"),
        ("chat template", _chat(read.tokenizer)),
        ("first token", _beginning(read.tokenizer)),
        ("memory", f"`swarm model memory {out}` estimates it"),
        *(("note", text) for text in read.notes),
    ]:
        note(f"{name:<16} {text}")


def _chat(tokenizer: Any) -> str:
    from shared.model.chat_template import default_system_prompt, takes_system_prompt

    if not tokenizer.chat_template:
        return "none: questions are plain text, after model.system_prompt if it is set"
    if not takes_system_prompt(tokenizer):
        return "yes, without a system turn: leave model.system_prompt empty"
    own = "; inserts its own if model.system_prompt is empty" if default_system_prompt(tokenizer) else ""
    return f"yes, with a system turn{own}"


def _beginning(tokenizer: Any) -> str:
    from shared.contracts.messages import user_prompt
    from shared.model.prompts import render_prompt

    first = render_prompt(tokenizer, user_prompt("x"))[:1]
    bos = tokenizer.bos_token_id
    if bos is None:
        return "the tokenizer has no BOS token; prompts begin without one"
    begins = "begin" if first == [bos] else "do not begin"
    return f"BOS is {tokenizer.bos_token}; prompts {begins} with it"


def _added(tokenizer: Any) -> str:
    added = len(tokenizer.added_tokens_decoder)
    return f", {added} of them added or control tokens" if added else ""


def _disk_trouble(error: OSError, out: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {out.absolute().parent} is full: make room there or choose another folder"
    if error.errno == errno.EFBIG:
        return f"a file of the model is larger than {out.absolute().parent} or this process's limits allow: choose another folder"
    return f"{error.filename or out}: {error_text(error)}: check the folder and its permissions, or choose another one"


QUESTIONS = (
    "What is 3 + 4?",
    "Name a colour.",
    "Which is larger, 17 or 71, and by how much? Answer with the larger number first and the difference after it.",
    "Write the numbers 1, 4, 9 and 16 in reverse order.",
)
"""Of different lengths, so that the engine pads them, or reports that it cannot."""
SAMPLES = 4
NEW_TOKENS = 16
TOLERANCE_NATS = 1e-3
"""In float32. A different order of computation changes logprobs by about 1e-5; a wrong position or
mask by tenths or more.
"""


_MOVE, _SHIFT = 0.1, 1e-3


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference in nats, over `tokens` sampled tokens. published: that of a policy
    that was published, instead of the base's.
    """

    largest_nats: float
    tokens: int
    published: bool = False

    @property
    def problem(self) -> str:
        """Why the two do not agree; empty if they do."""
        if self.largest_nats <= TOLERANCE_NATS:
            return ""
        when = " once a policy was published" if self.published else ""
        return (
            f"the trainer's log-probabilities of sampled tokens differ from the engine's by up to {self.largest_nats:.2g} "
            f"nats{when} ({TOLERANCE_NATS:g} are allowed, {self.tokens} tokens): the policy being trained would differ from the "
            "one that samples. This architecture is not supported: choose another model"
        )


class ParityError(RuntimeError):
    """The model cannot be sampled or scored at all; the message says why."""


def engine_parity(folder: str, policy: Path) -> list[Parity]:
    """Sample from the model in `folder` with the engine `transformers`, then compute the logprobs
    with the trainer, in float32 on the CPU: of the base policy, and of one that differs from it in
    every weight, which is written to the file `policy` as a trainer publishes it.

    Trainer and engine run one after the other, so that only one copy of the model is in memory.

    Raises:
        ParityError: the engine or the trainer refuses the model.
        OSError: the policy's file cannot be written.
    """
    from services.generator.engines import EngineError
    from shared.contracts.messages import user_prompt
    from shared.model.configuration import ModelLoadError, library_cause
    from shared.model.prompts import render_prompt
    from shared.model.reading import load_tokenizer
    from shared.model.weights import WeightsError

    try:
        tokenizer = load_tokenizer(_section(folder))
        prompts = [render_prompt(tokenizer, user_prompt(question)) for question in QUESTIONS]
        _publish(folder, policy)
        gc.collect()
        samples = asyncio.run(_sampled(folder, prompts, policy))
        gc.collect()
        scored = _scored(folder, prompts, samples)
    except (EngineError, ModelLoadError, WeightsError, ValueError) as error:
        raise ParityError(str(error)) from None
    except OSError:
        raise
    # torch and transformers raise many types for invalid numbers that no earlier check refused.
    except Exception as error:  # noqa: BLE001
        raise ParityError(
            f"it can be read, but not sampled and scored ({library_cause(error)}): check its configuration's numbers and weights"
        ) from None
    return [_compared(*each, published=bool(version)) for version, each in enumerate(zip(samples, scored, strict=True))]


def _compared(groups: Sequence[Sequence[Sample]], scored: Sequence[Sequence[Sequence[float]]], *, published: bool) -> Parity:
    pairs = [
        (engine_logprob, trainer_logprob)
        for samples, rows in zip(groups, scored, strict=True)
        for sample, row in zip(samples, rows, strict=True)
        for engine_logprob, trainer_logprob in zip(sample.logprobs or (), row, strict=True)
    ]
    apart = [abs(engine_logprob - trainer_logprob) for engine_logprob, trainer_logprob in pairs]
    # A NaN means disagreement, but max() may skip it.
    return Parity(max(apart) if all(value == value for value in apart) else float("inf"), len(apart), published)


def move(model: Any) -> None:
    """Change every trained weight of a model in place, each in its own way, as some steps of
    training might, to numbers of bfloat16; the same each time.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim else 1
            # One factor for each column is cheap, and no norm cancels it.
            factor, shift = torch.rand(2, width, generator=generator).sub_(0.5).to(parameter.device, parameter.dtype)
            if not parameter.ndim:
                factor, shift = factor[0], shift[0]
            # Rounded, so that the policy's file is half as large and says the same.
            parameter.copy_(parameter.mul(1 + _MOVE * factor).add_(_SHIFT * shift).bfloat16())


def _publish(folder: str, policy: Path) -> None:
    import torch

    from shared.model.weights import policy_tensors, write_tensors

    model = _trained(folder)
    move(model)
    write_tensors(policy_tensors(model, torch.bfloat16), policy)


def _trained(folder: str) -> Any:
    """The model as the trainer has it."""
    import torch

    from services.trainer.gradient.forward import set_training_modes, silence
    from services.trainer.policy_model import check_trainable
    from shared.model.loading import load_causal_lm

    model = load_causal_lm(_section(folder), dtype=torch.float32, device=torch.device("cpu"))
    silence(model)
    set_training_modes(model)
    check_trainable(model)
    return model


def _section(folder: str) -> ModelSection:
    from shared.config.model_section import ModelSection

    return ModelSection(path=folder, dtype="float32", device="cpu")


async def _sampled(folder: str, prompts: Sequence[Sequence[int]], policy: Path) -> list[list[list[Sample]]]:
    """Of the base policy, and of the published one."""
    from services.generator.engines import SamplingParams, create_engine

    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    engine = create_engine("transformers", folder, dtype="float32", device="cpu")
    try:
        await engine.start()
        base = await engine.generate(prompts, SAMPLES, params, seed=0)
        await engine.load_policy(policy, 1)
        return [base, await engine.generate(prompts, SAMPLES, params, seed=1)]
    finally:
        await engine.close()


def _scored(
    folder: str, prompts: Sequence[Sequence[int]], samples: Sequence[Sequence[Sequence[Sample]]]
) -> list[list[list[list[float]]]]:
    """The trainer's logprobs of the base policy's samples and of those of the moved one."""
    from services.trainer.gradient.forward import plain_rows_reason
    from services.trainer.gradient.rows import TokenGroup
    from services.trainer.gradient.update import UpdateConfig, batch_logprobs

    model = _trained(folder)
    update = UpdateConfig(packed=not plain_rows_reason(model))
    found = []
    for version, groups in enumerate(samples):
        if version:
            move(model)
        token_groups = [
            TokenGroup(
                prompt_ids=prompt,
                completions=[sample.token_ids for sample in group],
                behaviour_logprobs=[sample.logprobs for sample in group],
                # Groups whose advantages are all 0 are skipped.
                advantages=[1.0] * len(group),
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        found.append([[row.tolist() for row in rows] for rows in batch_logprobs(model, token_groups, update)])
    return found
