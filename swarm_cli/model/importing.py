"""`swarm model import`: convert a GGUF file, a package, a folder or a hub model to a tested folder
that every service loads.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.text import error_text
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.model.memory import SIDE_BY_SIDE_TOKENS, gigabytes

if TYPE_CHECKING:
    from shared.model.import_plan import ImportPlan
    from shared.model.importing import ReadModel


def import_model(source: str, out: Path, *, revision: str = "", dtype: str | None = None) -> Path:
    """Write the model's folder to `out`, describe the model on standard error, and return `out`.

    The folder is tested before it is renamed to `out` (a leading ~ is the home folder), so it
    appears complete and working, or not at all.

    Raises:
        CommandError: the model cannot be imported, or trainer and engine give it different
        logprobs.
    """
    from shared.atomic_folder import atomic_folder, refuse_filled
    from shared.model.import_plan import check_room, plan_import
    from shared.model.import_source import find_source, whole_path
    from shared.model.importing import gguf_read_once, read_model, write_model
    from shared.model.quiet_reading import ModelLoadError

    try:
        out = whole_path(out)
        refuse_filled(out, "the model")
        with gguf_read_once():
            plan = plan_import(find_source(source, revision), dtype)
            check_room(plan, out)
            note(f"reading {plan.source.origin}")
            with atomic_folder(out) as staging:
                read = read_model(plan)
                write_model(plan, read, staging)
                _tell(plan, read, out, sum(file.stat().st_size for file in staging.iterdir()))
                # Free its copy of the weights, which the test of the folder does not need.
                del read
                note(f"{'parity':<16} {_tried(staging, out)}")
    except (ModelLoadError, FileExistsError) as error:
        raise CommandError(f"nothing was imported: {error}") from None
    except OSError as error:
        raise CommandError(f"nothing was imported: {_disk_trouble(error, out)}") from None
    return out


def _tried(folder: Path, out: Path) -> str:
    from swarm_cli.model.parity import TOLERANCE_NATS, ParityError, engine_parity

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
    """Print what one should know before training this model, to avoid failures later: the memory it
    needs, whether it has a chat template, and its first token.
    """
    from shared.model.model_size import LORA_RANK

    size = plan.size
    trained = [gigabytes(size.full_training_bytes()), *(gigabytes(size.adapter_training_bytes(width)) for width in (4, 2))]
    sampling = [gigabytes(size.generation_bytes(width, SIDE_BY_SIDE_TOKENS)) for width in (4, 2)]
    halved = "; --dtype bfloat16 halves it" if plan.dtype == "float32" else ""
    lines = [
        ("parameters", f"{size.parameters:,} ({size.architecture}, {size.layers} layers of {size.width})"),
        ("weights", f"{plan.dtype}, a folder of {gigabytes(folder_bytes)}{halved}"),
        ("vocabulary", f"{size.vocabulary:,} tokens{_added(read.tokenizer)}"),
        ("context", f"{size.context_length:,} tokens" if size.context_length else "not limited by the configuration"),
        ("chat template", _chat(read.tokenizer)),
        ("first token", _beginning(read.tokenizer)),
        (
            "memory to train",
            f"all weights {trained[0]}; LoRA of rank {LORA_RANK} {trained[1]} over a float32 base, {trained[2]} over bfloat16; "
            f"plus activations (swarm model memory {out})",
        ),
        ("to generate", f"{sampling[0]} in float32, {sampling[1]} in bfloat16, with {SIDE_BY_SIDE_TOKENS:,} tokens at once"),
    ]
    for name, text in lines:
        note(f"{name:<16} {text}")
    for text in read.notes:
        note(f"{'note':<16} {text}")


def _chat(tokenizer: Any) -> str:
    from shared.model.chat_template import default_system_prompt, takes_system_prompt

    if not tokenizer.chat_template:
        return "none: questions are plain text, after model.system_prompt if it is set"
    if not takes_system_prompt(tokenizer):
        return "yes, without a system turn: leave model.system_prompt empty"
    own = "; inserts its own if model.system_prompt is empty" if default_system_prompt(tokenizer) else ""
    return f"yes, with a system turn{own}"


def _beginning(tokenizer: Any) -> str:
    from shared.model.prompts import render_prompt

    first = render_prompt(tokenizer, "x")[:1]
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
