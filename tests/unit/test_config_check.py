"""`swarm config check` beyond single values: what is likely to ruin a run, which key was meant,
whether key files are what they are named for, and whether servers answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shared.config import ConfigError, NodeConfig, load_config
from shared.config.load import OTHER_NAMES, meant_key
from shared.config.node import load_config as load
from shared.identity.keys import new_seed
from swarm_cli import config_commands
from swarm_cli.config_commands import key_file_problems, unreachable
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.base_model import TOY_MARK, is_toy
from swarm_cli.observe.verdict import FEWEST_TASKS
from swarm_cli.risky_settings import risky_settings, risky_with_model, sent_keys, toys_settings
from tests import forked


def configured(**sections: dict[str, Any]) -> NodeConfig:
    return load_config(overrides={"tasks": [{"dataset": "gcd"}], **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainer": {"learning_rate": 1.0}}, "trainer.learning_rate = 1: .*usual is 1e-6 to 1e-5"),
        ({"trainer": {"learning_rate": 0.1, "lora": {"rank": 8}}}, "usual is 1e-5 to 1e-4 with adapters"),
        ({"generator": {"max_new_tokens": 1_000_000}}, "generator.max_new_tokens = 1,000,000"),
        ({"generator": {"temperature": 3.0}}, "generator.temperature = 3: answers become noise"),
        ({"generator": {"temperature": 0.05}}, "become alike"),
        ({"eval": {"tasks": 0}}, "eval.tasks = 0"),
        ({"eval": {"tasks": FEWEST_TASKS - 1}}, f"set {FEWEST_TASKS} or more"),
        ({"sampler": {"local": 0, "adapt": "off", "shortage": "wait"}}, "sampler.local = 0"),
        (
            {"trainer": {"objective": "gspo", "updates_per_batch": 2, "clip_low": 0.2}},
            "trainer.clip_low = 0.2: gspo as published has 0.0003",
        ),
        ({"tasks": [{"dataset": "simple_integration"}]}, "simple_integration: it is scored locally only"),
        ({"trainer": {"warmup_steps": 80, "max_steps": 60}}, "warmup_steps = 80: longer than max_steps = 60"),
        (
            {"trainer": {"objective": "dr_grpo", "objective_options": {"advantage_scale": "group"}}},
            "trainer.objective_options.advantage_scale = group: dr_grpo .* none",
        ),
    ],
)
def test_what_is_allowed_and_ruinous_is_warned_of_with_what_is_usual(sections: dict[str, Any], words: str) -> None:
    (sentence,) = risky_settings(configured(**sections))
    assert re.search(words, sentence), sentence


def test_the_demo_and_the_defaults_are_warned_of_nothing() -> None:
    assert risky_settings(load_config(DEMO_CONFIG)) == []
    assert risky_settings(load_config(DEMO_CONFIG, {"trainer": {"max_steps": 4}})) == [], "a short try is one"
    assert risky_settings(configured()) == []
    assert risky_with_model(configured(), 2048, True) == []


@pytest.mark.parametrize(
    "trainer",
    [
        {"objective": "gspo", "updates_per_batch": 4},
        {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.28},
        {"objective": "dapo", "updates_per_batch": 4},
        {"objective": "gepo", "updates_per_batch": 4},
    ],
)
def test_wide_clip_bounds_are_no_warning_where_they_are_usual_or_never_reached(trainer: dict[str, Any]) -> None:
    assert risky_settings(configured(trainer=trainer)) == []


def test_the_toys_settings_with_another_model_are_told_and_with_the_toy_are_not(tmp_path: Path) -> None:
    def told(config: NodeConfig) -> list[str]:
        return toys_settings(config, toy=is_toy(config.model.path))

    demo = load_config(DEMO_CONFIG)
    assert told(demo) == []
    other = demo.model_copy(update={"model": demo.model.model_copy(update={"path": str(tmp_path)})})
    assert [sentence.split(" = ")[0] for sentence in told(other)] == ["trainer.learning_rate", "generator.max_new_tokens"]
    (tmp_path / TOY_MARK).write_text("{}")
    assert told(other) == []
    assert told(load_config(Path("config/smollm2.toml"))) == []


def test_the_models_context_and_chat_template_are_held_against_the_settings() -> None:
    longer, plain = risky_with_model(configured(generator={"max_new_tokens": 4096}), 2048, False)
    assert "the model's context holds 2,048" in longer
    assert "no chat template" in plain
    asked = configured(tasks=[{"path": "sums.jsonl", "question": "Question: {prompt}\nAnswer:"}])
    assert risky_with_model(asked, 2048, False) == [], "what the warning asks for is there"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trainer]\nlearing_rate = 1e-5", "trainer.learing_rate: unknown key; did you mean trainer.learning_rate?"),
        ("[trainer]\ntop_p = 0.9", "did you mean generator.top_p?"),
        ("[trainer.lora]\nrnak = 8", "trainer.lora.rnak: unknown key; did you mean trainer.lora.rank?"),
        ("[generator]\ngroup_size = 8", "generator.group_size: unknown key; did you mean generator.completions?"),
        ("[trainr]\nlearning_rate = 1e-5", "trainr: unknown key; did you mean trainer?"),
        ("[sampler]\nzzz = 1", "remove it or correct its spelling"),
        ('[[tasks]]\ndataset = "gcd"\ntemprature = 0.7', "did you mean generator.temperature? A line after [[tasks]] belongs to"),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "node.toml").write_text(f'{text}\n[[tasks]]\ndataset = "gcd"\n')
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "node.toml")
    assert words in str(refused.value)


def test_a_file_with_a_byte_order_mark_as_some_editors_write_is_read(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_bytes(b'\xef\xbb\xbf[node]\nid = "gamma"\n[[tasks]]\ndataset = "gcd"\n')
    assert load(tmp_path / "node.toml").node.id == "gamma"


def test_the_names_that_other_trainers_use_lead_to_settings_that_there_are() -> None:
    for meant in {each for names in OTHER_NAMES.values() for each in names.split(" and ")}:
        section: Any = configured()
        for part in meant.split("."):
            section = getattr(section[0] if isinstance(section, list) else section, part)


def test_a_misspelt_name_of_other_trainers_leads_to_the_setting_of_that_meaning() -> None:
    for name, meant in (
        ("groups_size", "generator.completions"),
        ("num_generation", "generator.completions"),
        ("groups_per_cal", "generator.groups_per_call"),
    ):
        assert meant_key(NodeConfig, ("generator", name)) == f"did you mean {meant}?"


def test_a_misspelt_variable_is_named_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node.toml").write_text('[[tasks]]\ndataset = "gcd"\n')
    monkeypatch.setenv("SWARM_TRAINER__LEARNING_RAT", "1e-5")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "node.toml")
    said = str(refused.value)
    assert said.startswith("environment variable SWARM_TRAINER__LEARNING_RAT (trainer.learning_rat): unknown key; did you mean")
    assert "node.toml" not in said


def test_every_mistake_is_told_at_once_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node.toml").write_text(
        '[sampler]\nlocal = -1\n[trainer]\nlearing_rate = 1e-5\n[node]\nid = "beta"\n'
        '[[tasks]]\nweigth = 2.0\ndataset = "gcd"\n[[tasks]]\ndataset = "gdc"\n'
    )
    monkeypatch.setenv("SWARM_TRAINER__WARMUP_STEPS", "few")
    monkeypatch.setenv("SWARM_TRIANER__THREADS", "1")
    monkeypatch.setenv("SWARM_TRAINER__CONSTANTS__BETAS", "1,2")
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "node.toml")
    said = str(refused.value).splitlines()
    for words in ("TRIANER", "BETAS", "sampler.local", "trainer.learing_rate", "[[tasks]] 1: weigth", "WARMUP_STEPS"):
        assert len([line for line in said if words in line]) == 1, (words, said)


def config_check(file: Path) -> subprocess.CompletedProcess[str]:
    return forked.run("swarm_cli", ["config", "check", "--config", str(file)], environment=os.environ, cwd=Path.cwd(), timeout=180)


def faults_in(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "node.toml")
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def test_settings_that_do_not_go_together_are_told_where_each_is_right(tmp_path: Path) -> None:
    told = faults_in(
        tmp_path,
        "[trainer.constants]\nbetas = [0.9, 1.0]\nsequence_mask = [1.5, 2.0]\n"
        "[sampler]\nlocal = 0\nadapt = 'off'\nreplay = 1\n"
        "[[tasks]]\nsource = 'file'\nconfig = { a = 1 }\nverifier = 'reasoning_gym'\n",
    )
    begin = [
        *('[[tasks]] 1: source = "file" needs path', "[[tasks]] 1: a file has no settings"),
        *("[[tasks]] 1: verifier reasoning_gym scores only", "trainer.constants: betas [0.9, 1.0] must be", "sampler: replay is 1"),
    ]
    assert all(sum(line.startswith(each) for line in told) == 1 for each in begin), told
    assert len(told) == len(begin)


def test_a_file_that_cannot_be_read_does_not_hide_wrong_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TRAINER__WARMUP_STEPS", "few")
    monkeypatch.setenv("SWARM_TRIANER__THREADS", "1")
    (tmp_path / "node.toml").write_text("[sampler\nlocal = -1")
    for file, said in (("node.toml", "cannot be read (Expected"), ("none.toml", "does not exist"), (".", "(Is a directory)")):
        with pytest.raises(ConfigError) as refused:
            load(tmp_path / file)
        assert said in str(refused.value) and "Errno" not in str(refused.value)
        assert "WARMUP_STEPS" in str(refused.value) and "TRIANER" in str(refused.value)


@pytest.mark.slow
def test_config_check_numbers_task_sources_as_the_file_does_and_tells_of_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        '[trainer]\nobjective = "rloo"\nobjective_options = { a = 1, advantage_scale = "batch", dual_clip = 3.0 }\n'
        '[[tasks]]\ndataset = "gdc"\nverifier = "math2"\n[[tasks]]\nsource = "file"\npath = "no.jsonl"\n'
        '[[tasks]]\ndataset = "gcd"\nconfig = { min_valu = 1, max_valu = 2 }\n'
    )
    said = config_check(tmp_path / "node.toml").stderr
    for words in (
        *("[[tasks]] 1: gdc: neither", "[[tasks]] 1: no verifier is called", "[[tasks]] 2: no.jsonl"),
        *("[[tasks]] 3: gcd: config key", "config key 'min_valu' is unknown", "config key 'max_valu' is unknown"),
        *("trainer.objective_options.a", "use advantage_scale none or group", "dual_clip is for objectives that clip"),
    ):
        assert said.count(words) == 1, (words, said)


def test_a_key_of_a_task_source_that_was_misspelt_is_answered_too(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('[[tasks]]\ndataset = "gcd"\nweigth = 2.0\n')
    with pytest.raises(ConfigError, match=r"\[\[tasks\]\] 1: weigth: unknown key; did you mean weight?"):
        load(tmp_path / "node.toml")


def test_key_files_are_looked_at_and_their_content_is_not_shown(tmp_path: Path) -> None:
    seed, public, open_seed = (tmp_path / name for name in ("seed", "public", "open"))
    for file in (seed, open_seed):
        file.write_bytes(new_seed())
    seed.chmod(0o600)
    open_seed.chmod(0o644)
    public.write_text("UABCDEF")
    public.chmod(0o600)
    missing, folder = tmp_path / "missing", tmp_path

    def problems(**nats: Any) -> list[str]:
        return key_file_problems(configured(nats=nats))

    assert problems(node_key_file=str(seed)) == []
    assert "does not exist" in problems(node_key_file=f"{missing}")[0]
    assert len(problems(node_key_file=f"{tmp_path}/{{role}}.nk")) == 4, "one for each role"
    assert "chmod 600" in problems(node_key_file=str(open_seed))[0]
    assert "public key" in problems(swarm_key_file=str(public))[0]
    assert "is not a PEM certificate" in problems(node_ca_file=str(public))[0]
    assert "cannot be read" in problems(node_ca_file=str(folder))[0]
    roster = configured(verifier={"trust": "roster", "roster_file": str(missing)})
    assert key_file_problems(roster)


def test_a_check_says_which_secret_is_sent_where() -> None:
    server = {"openai_url": "https://example.org/v1", "openai_key_variable": "GITHUB_TOKEN"}
    (said,) = sent_keys(configured(generator={"engine": "openai", **server}))
    assert "generator.openai_key_variable = GITHUB_TOKEN" in said and "https://example.org/v1" in said
    assert not sent_keys(configured(generator={"engine": "openai", "openai_url": "https://example.org/v1"}))
    judge = {"url": "https://judge.example.org/v1", "model": "m", "key_variable": "AWS_SECRET"}
    (said,) = sent_keys(configured(tasks=[{"dataset": "gcd", "verifier": "judge", "judge": judge}] * 2))
    assert "judge.key_variable = AWS_SECRET" in said and "https://judge.example.org/v1" in said


def test_with_connect_servers_that_do_not_answer_and_ports_that_are_taken_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held, socket.socket() as closed:
        held.bind(("127.0.0.1", 0))
        held.listen()
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        url = f"nats://127.0.0.1:{closed.getsockname()[1]}"
        config = configured(nats={"node_url": url, "swarm_url": url}, http={"port": held.getsockname()[1]})
        monkeypatch.setattr(config_commands, "CONNECT_S", 0.5)
        said = asyncio.run(unreachable(config))
    assert any(line.startswith("nats.node_url") for line in said)
    assert any(line.startswith("nats.swarm_url") for line in said)
    assert any("is taken" in line for line in said)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, '[trainer]\n"' + "x" * 400_000 + '" = 1\n'], ids=["deep", "long"])
def test_a_file_made_to_hold_the_check_up_is_refused_at_once(text: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError):
        load_config(file)
    assert time.process_time() - began < 10, "minutes without a limit"


def test_keys_and_values_are_shown_so_that_they_act_on_no_terminal_and_forge_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NO\nOK: 4 task sources\x1b[2J__X", "1")
    told = faults_in(tmp_path, '"a\\nb: fine\\u001b[2J\\u202e" = 1\n[trainer]\n"x\\ty" = 2\nwarmup_steps = "' + "w" * 5000 + '"\n')
    where = {line.partition(": ")[0] for line in told[1:]}
    assert where == {r"a\nb", r"trainer.x\ty", "trainer.warmup_steps"}, told
    assert not any("\x1b" in line or "\u202e" in line for line in told) and max(map(len, told)) < 600
    assert r"no section 'no\nok" in told[0]


def test_values_of_a_list_are_counted_from_one(tmp_path: Path) -> None:
    told = faults_in(tmp_path, '[trainer.constants]\nbetas = [0.9, "x"]\n[[tasks]]\ndataset = "gcd"\n')
    assert told[0].startswith("trainer.constants.betas, value 2: "), told
