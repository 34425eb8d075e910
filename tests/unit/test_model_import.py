"""`swarm model import`: what comes of real small GGUF files and folders, and what is refused before
anything is written.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gguf", reason="needs the extra `gguf`")

from shared.config.model_section import ModelSection
from shared.contracts.messages import user_prompt
from shared.model.configuration import ModelLoadError
from shared.model.importing import check_room, find_source, plan_import
from shared.model.prompts import render_prompt
from shared.model.reading import load_tokenizer
from swarm_cli.errors import CommandError
from swarm_cli.model import importing
from swarm_cli.model.importing import import_model
from tests import forked
from tests.engines.tiny_models import random_policy, write_model_folder
from tests.gguf_files import BOS, CHAT, END, Q4_1, SPACES, TOKENS, TURN_END, random_llama, with_type, write_gguf

pytestmark = pytest.mark.slow  # each import builds a model and tries it

ROOT = Path(__file__).parents[2]
TEXT = torch.tensor([[10, 20, 30, 40, 50, 60, 70]])
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
DROPS_SYSTEM = CHAT.replace("{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}")


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)(TEXT).logits


def refusal(source: str | Path, out: Path) -> str:
    """Return what is said of a source that is not taken; nothing may be left of it."""
    with pytest.raises(CommandError) as caught:
        import_model(str(source), out)
    said = str(caught.value)
    assert said.startswith("nothing was imported: ") and "\n" not in said
    assert not out.exists() and not list(out.parent.glob(f".{out.name}-*"))
    return said


# --- what comes of a source


def test_a_gguf_file_becomes_the_very_model_that_it_was_written_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_llama(tied=False)
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf", model)), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(logits(folder), model(TEXT).logits)
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.float32}
    assert "quantization_config" not in (folder / "config.json").read_text()
    said = capsys.readouterr().err
    for fact in (
        "parameters ",
        f"{len(TOKENS)} tokens",
        "256 tokens",
        "with a system turn",
        "swarm model memory",
        "trainer and engine agree",
    ):
        assert fact in said, fact


def test_the_fields_of_a_file_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds for a vocabulary of 50,000 tokens, and the table of names for 30 layers."""
    import gguf

    made: list[str] = []
    initialise, table = gguf.GGUFReader.__init__, gguf.get_tensor_name_map

    def counted(reader: object, path: str) -> None:
        made.append("GGUFReader")
        initialise(reader, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *arguments: (made.append("names"), table(*arguments))[1])
    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    import_model(str(write_gguf(tmp_path / "tiny.gguf")), tmp_path / "out")
    assert sorted(made) == ["GGUFReader", "names"]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_quantised_weights_are_kept_in_bfloat16_and_in_float32_where_asked(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", quantised=Q4_1)
    short, exact = import_model(str(file), tmp_path / "short"), import_model(str(file), tmp_path / "exact", dtype="float32")
    half, full = (load_file(folder / "model.safetensors") for folder in (short, exact))
    assert all(torch.equal(half[name], full[name].to(torch.bfloat16)) for name in full)
    assert {value.dtype for value in half.values()} == {torch.bfloat16}
    assert not torch.equal(logits(short), logits(exact))


def test_digits_are_split_as_the_file_says_and_not_as_gpt2_does(tmp_path: Path) -> None:
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf")), tmp_path / "out")
    tokens = AutoTokenizer.from_pretrained(str(folder)).tokenize("  7")
    assert tokens == [SPACES, "7"]


def test_a_folder_is_imported_in_its_own_dtype_with_its_weights_unchanged(tmp_path: Path) -> None:
    source = write_model_folder(tmp_path / "source", random_policy(3, tied=True))
    folder = import_model(str(source), tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (source, folder))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_files_can_be_read_by_other_users(tmp_path: Path) -> None:
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf")), tmp_path / "out")
    assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {"0o644"}


# --- where a source is looked for


def installed_package(folder: Path, files: int) -> Path:
    """A package as pip leaves it, `tiny-model` 1.0 with so many GGUF files."""
    (folder / "tiny_model").mkdir(parents=True)
    names = [f"tiny_model/tiny{number}.gguf" for number in range(files)]
    for name in names:
        write_gguf(folder / name)
    info = folder / "tiny_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*names, "tiny_model/__init__.py"]))
    return folder


def test_a_package_is_imported_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = installed_package(tmp_path / "site", 1)
    (site / "tiny_model" / "__init__.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(str(site))
    assert (import_model("tiny-model", tmp_path / "out") / "model.safetensors").is_file()


@pytest.mark.parametrize(("files", "said"), [(0, "contains no GGUF file"), (2, "holds 2 GGUF files")])
def test_a_package_without_one_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, said: str) -> None:
    monkeypatch.syspath_prepend(str(installed_package(tmp_path / "site", files)))
    assert said in refusal("tiny-model", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no-such-package-here", "nor an installed package"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("somebody/some-model", "set --revision to the full hash"),
        ("a name with spaces", "check the spelling"),
    ],
)
def test_a_source_that_is_not_there_is_refused_with_what_helps(tmp_path: Path, source: str, said: str) -> None:
    assert said in refusal(source, tmp_path / "out")


# --- files that cannot be read


def broken_files(folder: Path) -> dict[str, Path]:
    whole = write_gguf(folder / "whole.gguf").read_bytes()

    def file(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return {
        "is not a GGUF file": file("picture.gguf", b"\x89PNG" + bytes(100)),
        "is not a GGUF file ": file("empty.gguf", b""),
        "is truncated": file("header.gguf", whole[:3000]),
        "is truncated ": file("start.gguf", whole[:10]),
        "is truncated  ": file("data.gguf", whole[:-500]),
        "or damaged: it announces": file("turned.gguf", whole[:4] + whole[4:8][::-1] + whole[8:]),
        "or damaged: it announces ": file("huge.gguf", whole[:24] + struct.pack("<Q", 1 << 60) + whole[32:]),
        "or damaged: it announces  ": file("list.gguf", whole[:8] + struct.pack("<QQQsIIQ", 0, 1, 1, b"a", 9, 0, 1 << 50)),
        "version 9": file("newer.gguf", whole[:4] + struct.pack("<I", 9) + whole[8:]),
        "holds the architecture 'clip'": write_gguf(folder / "clip.gguf", architecture="clip"),
        "holds the architecture 't5'": write_gguf(folder / "t5.gguf", architecture="t5"),
        "in the quantisation Q8_1": with_type(write_gguf(folder / "q.gguf"), "blk.0.attn_v.weight", 9),
        "is not a valid GGMLQuantizationType": with_type(write_gguf(folder / "n.gguf"), "blk.0.attn_v.weight", 99),
        "is one of 3 parts": write_gguf(folder / "part.gguf", settings={"split.count": 3}),
        "does not contain a model (adapter)": write_gguf(folder / "adapter.gguf", settings={"general.type": "adapter"}),
        "scales its rotary positions (yarn)": write_gguf(folder / "yarn.gguf", settings={"llama.rope.scaling.type": "yarn"}),
        "among them rope_freqs.weight": write_gguf(folder / "rope.gguf", add={"rope_freqs.weight": np.ones(8, dtype=np.float32)}),
        "it would be another model": write_gguf(folder / "short.gguf", leave_out="blk.1.ffn_up.weight"),
    }


def test_files_that_cannot_be_read_are_refused_in_a_sentence_with_a_remedy(tmp_path: Path) -> None:
    for said, path in broken_files(tmp_path).items():
        told = refusal(path, tmp_path / "out")
        assert said.strip() in told and path.name in told, told
        assert told.count(": ") >= 2, f"no remedy: {told}"


def test_without_the_package_gguf_it_is_said_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'swarm-rl[gguf]'" in refusal(file, tmp_path / "out")


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        return write_model_folder(tmp_path / name, random_policy(3, tied=False))

    cut = folder("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    bare = folder("bare")
    (bare / "model.safetensors").unlink()
    short = folder("short")
    tensors = load_file(short / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "layers.1.mlp.up" not in name}, short / "model.safetensors")
    parts = folder("parts")
    (parts / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    adapter = folder("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    quantised = folder("quantised")
    config = (quantised / "config.json").read_text()
    (quantised / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1))
    wordless = folder("wordless")
    for file in wordless.glob("tokenizer*"):
        file.unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    for place, said in {
        cut.parent: "is truncated",
        bare: "holds no weights",
        short: "lacks 1 weights of its model, such as model.layers.1.mlp.up_proj.weight",
        parts: "lacks model-00001-of-00002.safetensors",
        adapter: "holds an adapter",
        quantised: "quantised weights (gptq)",
        wordless: "holds no tokenizer",
        empty: "neither config.json nor a GGUF file",
    }.items():
        assert said in refusal(place, tmp_path / "out"), place.name


# --- room


def test_a_model_larger_than_memory_is_refused_before_it_is_read_with_the_size_that_fits(tmp_path: Path) -> None:
    plan = plan_import(find_source(str(write_gguf(tmp_path / "tiny.gguf"))))
    check_room(plan, tmp_path / "out", memory_bytes=2 * plan.memory_bytes)
    with pytest.raises(ModelLoadError, match=r"0 million parameters: .* a model of up to 0 million parameters fits here"):
        check_room(plan, tmp_path / "out", memory_bytes=100_000_000)
    large = SimpleNamespace(source=plan.source, size=SimpleNamespace(parameters=70_000_000_000), memory_bytes=525e9, disk_bytes=1)
    with pytest.raises(ModelLoadError, match=r"70 billion parameters.* 525.00 GB of memory, and 24.00 GB are free: .* 2.5 billion"):
        check_room(large, tmp_path / "out", memory_bytes=24_000_000_000)


def test_a_disk_without_room_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A full disk cannot be had in a test without being root; the next test has a write that fails.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    assert "has 1.0 MB left: make room there" in refusal(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")


def test_nothing_is_left_when_writing_fails_half_way(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    asked = ["100000", "swarm_cli", "model", "import", str(file), str(tmp_path / "out")]
    ended = forked.run("tests.small_files", asked, environment=os.environ, cwd=ROOT, timeout=300)
    assert ended.returncode == 1 and "swarm: nothing was imported: " in ended.stderr and "Traceback" not in ended.stderr, (
        ended.stderr
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tiny.gguf"]


def test_a_folder_that_holds_files_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(CommandError, match="is not empty: choose another folder for the model"):
        import_model(str(write_gguf(tmp_path / "tiny.gguf")), out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]


# --- tokenizers and chat templates


def test_without_a_chat_template_questions_are_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf", template=None)), tmp_path / "out")
    tokenizer = load_tokenizer(ModelSection(path=str(folder), system_prompt="Be brief."))
    assert tokenizer.decode(render_prompt(tokenizer, user_prompt("2 + 2?"), "Be brief.")) == "Be brief.\n\n2 + 2?"
    assert "none: questions are plain text" in capsys.readouterr().err


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_a_template_without_a_system_turn_works_and_a_system_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf", template=template)), tmp_path / "out")
    assert "without a system turn: leave model.system_prompt empty" in capsys.readouterr().err
    load_tokenizer(ModelSection(path=str(folder)))
    with pytest.raises(ModelLoadError, match="has no place for a system prompt"):
        load_tokenizer(ModelSection(path=str(folder), system_prompt="Be brief."))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('tools only') }}", "cannot write a question (TemplateError: tools only)"),
        ("{% for message in", "cannot write a question"),
        ("{{ messages[1:] | length }}", "leaves the question out"),
    ],
)
def test_a_template_that_cannot_ask_is_refused(tmp_path: Path, template: str, said: str) -> None:
    assert said in refusal(write_gguf(tmp_path / "tiny.gguf", template=template), tmp_path / "out")


@pytest.mark.parametrize("template", [None, "{{ bos_token }}" + CHAT])
def test_a_bos_of_its_own_stands_once_before_a_prompt_and_never_before_an_answer(tmp_path: Path, template: str | None) -> None:
    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf", template=template, begins_with_bos=True)), tmp_path / "out")
    tokenizer = load_tokenizer(ModelSection(path=str(folder)))
    prompt = render_prompt(tokenizer, user_prompt("2 + 2?"))
    bos = TOKENS.index(BOS)
    assert prompt[0] == bos and prompt.count(bos) == 1
    assert bos not in tokenizer("4", add_special_tokens=False)["input_ids"]


def test_the_token_that_ends_a_turn_ends_answers_though_the_file_names_another(tmp_path: Path) -> None:
    from services.generator.engines.model_folder import read_model_folder

    folder = import_model(str(write_gguf(tmp_path / "tiny.gguf", end=END)), tmp_path / "out")
    assert set(read_model_folder(str(folder), max_model_len=64).end_token_ids) == {TOKENS.index(END), TOKENS.index(TURN_END)}


def test_added_tokens_stay_whole_and_tokens_without_weights_are_refused(tmp_path: Path) -> None:
    source = write_model_folder(tmp_path / "source", random_policy(3, tied=True))
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(source)
    folder = import_model(str(source), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(str(folder)).tokenize("a<think>b") == ["a", "<think>", "b"]
    tokenizer.add_tokens([f"<extra{number}>" for number in range(100)])
    tokenizer.save_pretrained(source)
    assert "tokens without weights, such as '<extra40>' (number 300; the model has 300 rows)" in refusal(source, tmp_path / "more")


# --- parity


@pytest.mark.parametrize("version", [0, 1])
def test_a_model_on_which_trainer_and_engine_disagree_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    # No architecture is known that passes the trainer's and the engine's own probes and fails here,
    # so the trainer is made to err, about the base policy or about the published one.
    right = importing._scored

    def wrong(*arguments: object) -> list[list[list[list[float]]]]:
        scored = right(*arguments)  # type: ignore[arg-type]
        scored[version][2][1][0] += 0.25
        return scored

    monkeypatch.setattr(importing, "_scored", wrong)
    told = refusal(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert "0.25 nats" in told and ("published" in told) == bool(version)


def test_a_difference_that_is_no_number_is_no_agreement() -> None:
    assert importing.Parity(float("inf"), 4).problem and not importing.Parity(1e-5, 4).problem
