"""A malformed model is refused wherever one comes in, with what is wrong and what to do: by the
trainer, its reference model, the engines, `swarm config check`, `eval`, `model import` and the
export of what was trained from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from services.generator.engines import EngineError, create_engine
from services.trainer.checkpoint import CheckpointStore, LearnerState, PolicyVersion, TrainedModel
from services.trainer.learner import Learner
from services.trainer.policy_model import PolicyModel, load_reference_model
from shared.config.model_section import ModelSection
from shared.contracts.messages import user_prompt
from shared.model.configuration import ModelLoadError
from shared.model.loading import load_causal_lm
from shared.model.prompts import render_prompt
from shared.model.reading import load_tokenizer
from shared.run_records import CHECKPOINTS
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.errors import CommandError
from swarm_cli.model import facts
from swarm_cli.model.commands import export_node
from swarm_cli.model.importing import import_model
from swarm_cli.risky_settings import risky_with_model
from tests import forked
from tests.engines.tiny_models import END_TOKEN_ID
from tests.integration.trainer_life import node_config, tiny_policy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAD, EMBEDDING, MATRIX = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
CHAT = (
    "{% for message in messages %}<|pad|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


# --- what is wrong with a folder


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})

    return apply


def renamed(new: Callable[[str], str]) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[new(name)] = tensors.pop(name)

    return weights(change)


def one_weight(value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MATRIX][3, 4] = value

    return weights(change)


def in_json(file: str, **values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))

    return apply


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text) and None


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [change(folder) for change in changes] and None


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def in_header(change: Callable[[dict[str, Any]], None], after: bytes = b"") -> Callable[[Path], None]:
    """Change the header of the weights, whose bytes stay; `after` comes behind them."""

    def apply(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        data = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:data])
        change(header)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[data:] + after)

    return apply


def shared_bytes(header: dict[str, Any]) -> None:
    header[MATRIX]["data_offsets"] = header[MATRIX.replace("up_proj", "gate_proj")]["data_offsets"]


def reversed_place(header: dict[str, Any]) -> None:
    header[MATRIX]["data_offsets"].reverse()


def smaller_shape(header: dict[str, Any]) -> None:
    header[MATRIX]["shape"] = [1, 1]


def absent_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    placed = {MATRIX: "model-00001-of-00002.safetensors", HEAD: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def in_shards(change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None, **placed: str) -> Callable[[Path], None]:
    """Weights in two files, of which the second holds what `change` adds to it; `placed` changes
    the index.
    """

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        second = {MATRIX: tensors.pop(MATRIX)}
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        index = dict.fromkeys(tensors, names[0]) | dict.fromkeys(second, names[1]) | placed
        change(second)
        for name, held in zip(names, (tensors, second), strict=True):
            save_file(held, folder / name, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return apply


def twice(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")


def wordless(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def more_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{number}>" for number in range(50)])
    tokenizer.save_pretrained(folder)


def torch_file(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """The weights in torch's own format, as older models have them."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    return apply


def in_torch_shards(folder: Path) -> None:
    """In two of torch's files with an index, and one tensor in both."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    second = {MATRIX: tensors.pop(MATRIX), HEAD: torch.ones(300, 32)}
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, held in zip(names, (tensors, second), strict=True):
        torch.save(held, folder / name)
    index = dict.fromkeys(tensors, names[0]) | {MATRIX: names[1]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def encoded(file: str, encoding: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_text().encode(encoding))

    return apply


def no_file(file: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return apply


def zeros(names: str) -> Callable[[Path], None]:
    """Of all matrices whose name contains this."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if names in name and tensors[name].ndim == 2:
                tensors[name] = torch.zeros_like(tensors[name])

    return weights(change)


def filled(names: str, value: float, start: int = 0) -> Callable[[Path], None]:
    """All tensors whose name contains this hold nothing else, from a row on."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if names in name:
                tensors[name][start:] = value

    return weights(change)


def key_twice(folder: Path) -> None:
    text = (folder / "config.json").read_text().strip()
    (folder / "config.json").write_text(text.removesuffix("}").rstrip() + ', "rms_norm_eps": 0.5}')


def in_tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return apply


def unknown(signs: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        content["model"]["unk_token"] = "a"
        for sign in signs:
            vocabulary[f"{sign}{sign}"] = vocabulary.pop(sign)

    return change


def random_merges(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    pairs = ["th", "he", "qu", "ro", "wn", "ju", "mp", "ov", "er", "la", "zy", "do"]
    for number, pair in enumerate(pairs):
        vocabulary[pair] = 260 + number
    content["model"] |= {"merges": [list(pair) for pair in pairs], "dropout": 0.5}


WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "distributed wrapper": (renamed(lambda name: f"module.{name}"), "'module.'"),
    "compiled": (renamed(lambda name: f"_orig_mod.{name}"), "'_orig_mod.'"),
    "compiled blocks": (renamed(lambda name: name.replace(".self_attn.", "._orig_mod.self_attn.")), "'_orig_mod.'"),
    "adapter wrapper": (renamed(lambda name: f"base_model.model.{name}"), "'base_model.model.'"),
    "unheard-of wrapper": (renamed(lambda name: f"actor.policy.{name}"), "'actor.policy.'"),
    "missing": (weights(lambda tensors: tensors.__delitem__(MATRIX)), MATRIX),
    "missing norm": (weights(lambda tensors: tensors.__delitem__("model.norm.weight")), "model.norm.weight"),
    "missing head": (weights(lambda tensors: tensors.__delitem__(HEAD)), "tie_word_embeddings"),
    "another tensor": (weights(lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(2)})), "layers.0.extra"),
    "adapters inside": (
        weights(lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2, 32)})),
        "lora_A",
    ),
    "more layers than config.json": (in_json("config.json", num_hidden_layers=1, layer_types=["full_attention"]), "model.layers.1"),
    "fewer layers": (in_json("config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3), "model.layers.2"),
    "another shape": (weights(lambda tensors: tensors.update({MATRIX: torch.ones(64, 31)})), f"{MATRIX} has the shape (64, 31)"),
    "transposed": (weights(lambda tensors: tensors.update({MATRIX: tensors[MATRIX].T})), f"{MATRIX} has the shape (32, 64)"),
    "nan": (one_weight(float("nan")), MATRIX),
    "infinite": (one_weight(float("-inf")), MATRIX),
    "nan in half": (
        weights(lambda tensors: tensors.update({MATRIX: torch.full((64, 32), float("nan"), dtype=torch.bfloat16)})),
        MATRIX,
    ),
    "nan in a file of torch": (torch_file(lambda tensors: tensors[MATRIX].__setitem__((3, 4), float("nan"))), MATRIX),
    "infinite in a file of torch": (torch_file(lambda tensors: tensors[MATRIX].__setitem__((3, 4), float("inf"))), MATRIX),
    "an output layer of zeros in a file of torch": (
        torch_file(lambda tensors: tensors[HEAD].__setitem__(slice(None), 0.0)),
        f"{HEAD} is wholly 0",
    ),
    "layers of another architecture": (
        in_json("config.json", layer_types=["full_attention", "chunked_attention"]),
        "'chunked_attention' (layer_types)",
    ),
    "layers without attention": (in_json("config.json", layer_types=["conv", "full_attention"]), "'conv' (layer_types)"),
    "an output layer of zeros": (zeros(HEAD), f"{HEAD} is wholly 0 (1 of 16 matrices"),
    "many matrices of zeros": (zeros("layers.1."), "is wholly 0 (7 of 16 matrices"),
    "an output layer of ones": (filled(HEAD, 1.0), f"{HEAD} holds the number 1 only"),
    "an embedding that broke off": (filled(EMBEDDING, 0.0, 200), f"the last quarter of the weight {EMBEDDING} is 0"),
    "integers": (
        weights(lambda tensors: tensors.update({MATRIX: torch.ones(64, 32, dtype=torch.int8)})),
        f"{MATRIX} is stored as I8",
    ),
    "tied by config.json, two tensors": (in_json("config.json", tie_word_embeddings=True), f"{HEAD} is {EMBEDDING}"),
    "quantised": (in_json("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "(gptq)"),
    "truncated": (cut, "is truncated"),
    "two tensors in one place": (in_header(shared_bytes), "tensors that share bytes"),
    "a place that ends before it begins": (in_header(reversed_place), f"{MATRIX} a place that does not fit"),
    "a place of another size": (in_header(smaller_shape), f"{MATRIX} a place that does not fit"),
    "bytes of no tensor": (in_header(lambda header: None, b"more"), "belong to no tensor"),
    "float8": (weights(lambda tensors: tensors.update({MATRIX: tensors[MATRIX].to(torch.float8_e4m3fn)})), "F8_E4M3"),
    "absent shard": (absent_shard, "lacks model-00002-of-00002.safetensors (1 of 2 parts)"),
    "twice": (twice, "model-00001-of-00001.safetensors"),
    "a tensor in two shards": (in_shards(lambda second: second.update({HEAD: torch.ones(300, 32)})), f"{HEAD} twice"),
    "a tensor in two files of torch": (in_torch_shards, f"{HEAD} twice"),
    "a pipe for end tokens": (no_file("generation_config.json", os.mkfifo), "generation_config.json is a folder, a pipe"),
    "a folder for end tokens": (no_file("generation_config.json", Path.mkdir), "generation_config.json is a folder, a pipe"),
    "a link to nothing": (
        no_file("tokenizer_config.json", lambda file: file.symlink_to("absent")),
        "tokenizer_config.json is a folder, a pipe or a link to nothing",
    ),
    "a byte order mark": (encoded("config.json", "utf-8-sig"), "config.json is saved as UTF-16 or with a byte order mark"),
    "UTF-16": (encoded("config.json", "utf-16"), "config.json is saved as UTF-16"),
    "UTF-16 without a mark": (encoded("generation_config.json", "utf-16-le"), "generation_config.json is saved as UTF-16"),
    "an index of other shards": (
        in_shards(**{HEAD: "model-00002-of-00002.safetensors"}),
        f"{HEAD} is in model-00002-of-00002.safetensors",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights"),
    "no layers": (in_json("config.json", num_hidden_layers=0), "layers"),
    "a key twice": (key_twice, "rms_norm_eps stands twice"),
    "norm by a negative number": (in_json("config.json", rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    "rotary base of 0": (
        in_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        "rotary positions is 0",
    ),
}
"""Changes of a good folder, and what must be named."""

TOKENS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (wordless, "holds no tokenizer"),
    "vocabulary too small": (more_tokens, "'<extra41>' (number 300; the model has 300 rows)"),
    "digits are unknown": (in_tokenizer(unknown("0123456789")), "its tokenizer changes text"),
    "an operator is unknown": (in_tokenizer(unknown("+")), "its tokenizer changes text"),
    "random tokens": (in_tokenizer(random_merges), "its tokenizer "),
    "end token is true": (in_json("generation_config.json", eos_token_id=True), "True"),
    "end token is plain text": (in_json("config.json", eos_token_id=65), "config.json declares that token 65"),
    "end token is plain text there": (in_json("generation_config.json", eos_token_id=[256, 65]), "generation_config.json"),
    "end token beyond the model": (in_json("generation_config.json", eos_token_id=300), "300"),
    "template with a clock": (template("{{ strftime_now('%d %B') }}\n" + CHAT.replace("strftime", "")), "date"),
    "template with chance": (template(CHAT + "{{ range(1000) | random }}"), "random"),
    "template without an opening": (template(CHAT.partition("{% if")[0]), "'<|pad|>assistant'"),
    "template without the question": (template("{{ messages[1:] | length }}"), "leaves the question out"),
    "template that drops digits": (template(CHAT.replace("['content']", "['content'] | replace('3', '')")), "changes the question"),
    "template that ends the prompt": (
        template(CHAT.partition("{% if")[0] + "{% if add_generation_prompt %}<|end|>{% endif %}"),
        "ends the prompt with '<|end|>'",
    ),
    "template that ends the prompt and the line": (
        template(CHAT.replace("<|pad|>assistant", "<|pad|>assistant<|end|>")),
        "ends the prompt with '<|end|>'",
    ),
    "template for HTML": (template(CHAT.replace("['content']", "['content'] | e")), "changes the question"),
    "template that wraps lines": (template(CHAT.replace("['content']", "['content'] | wordwrap(400)")), "changes the question"),
    "template that shortens": (template(CHAT.replace("['content']", "['content'][:1000]")), "changes the question"),
    "template for short questions": (
        template("{% if messages[-1].content | length > 130 %}{{ raise_exception('too long') }}{% endif %}" + CHAT),
        "too long",
    ),
    "template with the address of a function": (template("{{ range }}" + CHAT), " at 0x"),
    "template with the address of a filter": (template("{{ messages | map('upper') }}" + CHAT), " at 0x"),
    "template that fails": (template("{{ raise_exception('tools only') }}"), "tools only"),
    "template that never ends": (
        template(ENDLESS + CHAT),
        "2 s of processor time",
    ),
    "template that never ends after an answer": (
        template(CHAT + "{% for m in messages if m.role == 'assistant' %}" + ENDLESS + "{% endfor %}"),
        "2 s of processor time",
    ),
    "template that never ends with a system turn": (
        template(CHAT + "{% for m in messages if m.role == 'system' %}" + ENDLESS + "{% endfor %}"),
        "2 s of processor time",
    ),
    "template that never ends with a long question": (
        template(CHAT + "{% for a in messages[0].content %}{% for b in messages[0].content %}{% endfor %}{% endfor %}"),
        "2 s of processor time",
    ),
    "template that takes all memory": (
        template("{% set n = namespace(x='a' * 64) %}{% for a in range(31) %}{% set n.x = n.x + n.x %}{% endfor %}" + CHAT),
        "256 MiB of memory",
    ),
}


# --- doors


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("good") / "model", tied=False)


def changed(good: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(good, folder)
    change(folder)
    return folder


def through_import(folder: Path) -> None:
    out = folder.parent / "imported"
    try:
        import_model(str(folder), out)
    finally:
        assert not list(out.parent.glob(f".{out.name}-*"))
    shutil.rmtree(out)


def through_trainer(folder: Path) -> None:
    Learner(node_config(folder, folder.parent))


def through_reference(folder: Path) -> None:
    policy = PolicyModel(None, None, torch.device("cpu"), torch.float32)
    load_reference_model(node_config(folder, folder.parent), policy)


def through_engine(kind: str) -> Callable[[Path], None]:
    async def start(folder: Path) -> None:
        engine = create_engine(kind, str(folder), device="cpu", max_model_len=64, threads=1)
        try:
            await engine.start()
        finally:
            await engine.close()

    return lambda folder: asyncio.run(start(folder))


def through_config_check(folder: Path) -> None:
    if problems := facts._facts(ModelSection(path=str(folder))).problems:
        raise CommandError(problems[0])


def through_eval(folder: Path) -> None:
    ended = forked.run(
        "swarm_cli", ["eval", str(folder), "--n", "1"], environment=os.environ | forked.SERVER, cwd=ROOT, timeout=120
    )
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        raise CommandError(ended.stderr)


def through_export(folder: Path) -> None:
    node = folder.parent / "node"
    if not node.exists():
        good = load_causal_lm(ModelSection(path=str(folder.parent / "good")), dtype=torch.float32, device=torch.device("cpu"))
        model = TrainedModel(
            model_path=str(folder),
            dtype="float32",
            lora_rank=0,
            lora_alpha=16.0,
            lora_target_modules="all-linear",
        )
        store = CheckpointStore(node / CHECKPOINTS, keep=1, keep_best=False)
        state = LearnerState(dict(good.named_parameters()), {}, {"cpu": torch.get_rng_state()})
        store.save(state, PolicyVersion(batch_number=1, stream_seq=1, consumed_local=1), model)
    export_node(node, folder.parent / "exported")


DOORS: dict[str, Callable[[Path], None]] = {
    "import": through_import,
    "trainer": through_trainer,
    "reference": through_reference,
    "transformers": through_engine("transformers"),
    "vllm": through_engine("vllm"),
    "config check": through_config_check,
    "eval": through_eval,
    "export": through_export,
}


def told(door: str, folder: Path) -> str:
    with pytest.raises((ModelLoadError, EngineError, CommandError)) as caught:
        DOORS[door](folder)
    return str(caught.value)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verdicts about names and shapes, which `swarm config check` keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_not_the_models_are_refused_at_every_door(good: Path, tmp_path: Path, case: str) -> None:
    change, named = WEIGHTS[case]
    shutil.copytree(good, tmp_path / "good")
    folder = changed(good, tmp_path / "odd", change)
    for door in DOORS:
        said = told(door, folder)
        assert named in said and ": " in said, f"{door}: {said}"


@pytest.mark.parametrize("case", TOKENS)
def test_a_tokenizer_that_cannot_ask_is_refused_at_every_door(good: Path, tmp_path: Path, case: str) -> None:
    change, named = TOKENS[case]
    shutil.copytree(good, tmp_path / "good")
    folder = changed(good, tmp_path / "odd", change)
    # The reference model reads no tokenizer, and an export says nothing of where answers end.
    for door in DOORS.keys() - {"reference", *(["export"] if "end token" in case else [])}:
        if door == "import" and "clock" in case:
            continue
        said = told(door, folder)
        assert named in said and ": " in said, f"{door}: {said}"


def test_config_check_says_no_to_a_model_whose_names_do_not_fit(good: Path, tmp_path: Path) -> None:
    """The command itself, where the model is a setting like any other."""
    folder = changed(good, tmp_path / "odd", WEIGHTS["distributed wrapper"][0])
    (tmp_path / "node.toml").write_text(f'[model]\npath = "{folder}"\n[[tasks]]\ndataset = "gcd"\n')
    asked = ["config", "check", "--config", str(tmp_path / "node.toml")]
    ended = forked.run("swarm_cli", asked, environment=os.environ | forked.SERVER, cwd=tmp_path, timeout=120)
    assert ended.returncode == EXIT_CONFIG and "'module.'" in ended.stderr and str(folder) in ended.stderr


@pytest.mark.parametrize("zero", ["transformer.wte.weight", "lm_head.weight"])
def test_an_embedding_of_zeros_is_known_by_what_it_does_and_not_by_its_name(good: Path, tmp_path: Path, zero: str) -> None:
    folder = changed(good, tmp_path / "gpt2", lambda folder: (folder / "model.safetensors").unlink())
    config = GPT2Config(
        vocab_size=300, n_positions=256, n_embd=32, n_layer=4, n_head=4, eos_token_id=256, tie_word_embeddings=False
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    through_config_check(folder)
    weights(lambda tensors: tensors.update({zero: torch.zeros_like(tensors[zero])}))(folder)
    for door in ("config check", "trainer", "transformers"):
        assert f"the weight {zero} is wholly 0" in told(door, folder), door


def test_a_model_that_tells_no_tokens_apart_is_refused_where_it_is_loaded(good: Path, tmp_path: Path) -> None:
    """Nothing in the files tells: norms of some architectures are stored as what is added to 1."""
    folder = changed(good, tmp_path / "odd", filled("norm", 0.0))
    for door in ("trainer", "reference", "transformers"):
        assert "every token the same logit" in told(door, folder), door


def test_a_template_whose_turns_end_with_a_token_that_is_no_end_token_is_warned_of(good: Path, tmp_path: Path) -> None:
    folder = changed(good, tmp_path / "odd", template(CHAT.replace("<|end|>", "<|pad|>")))
    assert [facts._facts(ModelSection(path=str(each))).undeclared_end for each in (good, folder)] == ["", "<|pad|>"]
    (tmp_path / "node.toml").write_text(
        f'[model]\npath = "{folder}"\n[generator]\nmax_new_tokens = 64\n[[tasks]]\ndataset = "gcd"\n'
    )
    asked = ["config", "check", "--config", str(tmp_path / "node.toml")]
    ended = forked.run("swarm_cli", asked, environment=os.environ | forked.SERVER, cwd=tmp_path, timeout=120)
    assert ended.returncode == 0 and "<|pad|>" in ended.stdout + ended.stderr
    imported = import_model(str(folder), tmp_path / "out")
    assert facts._facts(ModelSection(path=str(imported))).undeclared_end == ""


def test_end_tokens_that_are_not_the_templates_and_a_tokenizer_for_shorter_texts_are_warned_of(good: Path, tmp_path: Path) -> None:
    folder = changed(
        good,
        tmp_path / "odd",
        both(
            template(CHAT),
            in_json("generation_config.json", eos_token_id=[257]),
            in_json("tokenizer_config.json", model_max_length=16),
        ),
    )
    found = facts._facts(ModelSection(path=str(folder)))
    assert (found.problems, found.undeclared_end, found.unlisted_end, found.tokenizer_tokens) == ([], "", "<|end|>", 16)
    config = node_config(folder, tmp_path, generator={"max_new_tokens": 64})
    ends, short = risky_with_model(config, *found[1:])
    assert "generation_config.json" in ends and "model_max_length" in short
    fine = facts._facts(ModelSection(path=str(changed(good, tmp_path / "fine", template(CHAT)))))
    assert fine.unlisted_end == "" and risky_with_model(config, *fine[1:]) == []


# --- what is taken in, and is right


def stale_buffer(tensors: dict[str, torch.Tensor]) -> None:
    """As checkpoints of older versions hold it; the architecture says that it is of no matter."""
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def same_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


RIGHT: dict[str, Callable[[Path], None]] = {
    "two shards": in_shards(),
    "a file of torch": torch_file(lambda tensors: None),
    "layers with windows": in_json(
        "config.json", layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=8
    ),
    "a matrix of zeros": zeros(MATRIX),
    "rows of zeros for tokens that no text has": filled(HEAD, 0.0, 270),
    "a buffer of older versions": weights(stale_buffer),
    "tied by config.json, one tensor twice": both(weights(same_head), in_json("config.json", tie_word_embeddings=True)),
    "template whose turns only end": template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"),
    "template whose question opens the answer": template(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|end|>{% endif %}"
        "{% endfor %}"
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_only_looks_odd_is_taken_in_at_every_door(good: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(good, tmp_path / "good")
    folder = changed(good, tmp_path / "odd", RIGHT[case])
    for door in DOORS.keys() - {"vllm", "eval", *(["export"] if "tied" in case else [])}:
        DOORS[door](folder)


def test_a_tokenizer_that_appends_its_end_token_ends_no_prompt_with_it(good: Path, tmp_path: Path) -> None:
    def appends(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=["<|pad|>", "$A", "<|end|>"], special_tokens=[("<|end|>", END_TOKEN_ID), ("<|pad|>", 257)]
        )
        tokenizer.save_pretrained(folder)

    folder = changed(good, tmp_path / "odd", appends)
    first, *_, last = AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    assert (first, last) == (257, END_TOKEN_ID)
    for place in (folder, import_model(str(folder), tmp_path / "out")):
        tokenizer = load_tokenizer(ModelSection(path=str(place)))
        prompt = [257, *tokenizer("2 + 2?", add_special_tokens=False)["input_ids"]]
        assert render_prompt(tokenizer, user_prompt("2 + 2?")) == prompt
        assert Learner(node_config(place, tmp_path)).rules.prompt_ids(user_prompt("2 + 2?")) == prompt


def test_import_writes_a_fixed_date_where_a_template_writes_todays(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    today = "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date }}\n"
    folder = changed(good, tmp_path / "odd", template(today + CHAT))
    out = import_model(str(folder), tmp_path / "out")
    tokenizer = load_tokenizer(ModelSection(path=str(out)))
    assert (
        tokenizer.decode(render_prompt(tokenizer, user_prompt("x"))).startswith("Today: 26 Jul 2024\n")
        and "date" in capsys.readouterr().err
    )


def test_import_keeps_the_dtype_of_the_weights_whatever_the_configuration_says(good: Path, tmp_path: Path) -> None:
    folder = changed(good, tmp_path / "odd", in_json("config.json", dtype="bfloat16"))
    out = import_model(str(folder), tmp_path / "out")
    before, after = (load_file(place / "model.safetensors") for place in (folder, out))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_one_function_loads_the_weights_of_a_model() -> None:
    product = [file for place in ("services", "shared", "swarm_cli", "lab") for file in (ROOT / place).rglob("*.py")]
    loads = [file.relative_to(ROOT) for file in product if "AutoModelForCausalLM.from_pretrained" in file.read_text()]
    assert loads in ([], [Path("shared/model/loading.py")])


def test_eval_leaves_out_a_question_that_the_template_cannot_write(good: Path, tmp_path: Path) -> None:
    folder = changed(good, tmp_path / "odd", template("{% if 'q7' in messages[-1].content %}" + ENDLESS + "{% endif %}" + CHAT))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "q{n}", "answer": "{n}"}}\n' for n in range(10)))
    task = '[[tasks]]\nsource = "file"\npath = "rows.jsonl"\nverifier = "exact"\n'
    (tmp_path / "node.toml").write_text(f"{task}[generator]\nmax_new_tokens = 4\n")
    asked = ["eval", str(folder), "--config", "node.toml", "--n", "10", "--json"]
    ended = forked.run("swarm_cli", asked, environment=os.environ | forked.SERVER, cwd=tmp_path, timeout=120)
    assert ended.returncode == 0 and json.loads(ended.stdout)["n"] == 9
    assert "'q7'" in ended.stderr and "2 s of processor time" in ended.stderr
