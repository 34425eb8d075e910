"""`swarm config`, `swarm task` and the errors of the command line, as a person meets them: through
the process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from shared.config import ConfigError, NodeConfig, load_config
from swarm_cli.asked_tasks import task_sources
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.base_model import is_hub_name, model_problem
from swarm_cli.toml_view import BASIC, config_toml
from tests import forked

ROOT = Path(__file__).parents[2]


def swarm(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    whole = {**kept, "PYTHONPATH": str(ROOT), **environment}
    return forked.run("swarm_cli", arguments, environment=whole, cwd=folder, timeout=180)


def test_what_config_show_prints_is_the_same_configuration(tmp_path: Path) -> None:
    demo = load_config(DEMO_CONFIG)
    printed = tmp_path / "printed.toml"
    printed.write_text(config_toml(demo))
    assert load_config(printed) == demo


@pytest.mark.slow
def test_config_show_names_no_verifier_where_a_reward_was_set(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def one(answer, reference):\n    return 1.0\n")
    file, printed = tmp_path / "node.toml", tmp_path / "printed.toml"
    file.write_text('[[tasks]]\npath = "q.jsonl"\nreward = "r.py:one"\n')
    printed.write_text(config_toml(load_config(file)))
    assert "\nverifier = " not in printed.read_text()
    assert load_config(printed).tasks == load_config(file).tasks


def test_config_show_says_what_each_value_means() -> None:
    shown = swarm("config", "show", "--all")
    assert shown.returncode == 0
    assert tomllib.loads(shown.stdout)["sampler"]["local"] == 4
    assert "# L: completions per group" in shown.stdout
    assert "One of wait, fill_local, short." in shown.stdout
    assert "One of auto." not in shown.stdout, "a list is allowed too"


@pytest.mark.slow
def test_config_show_prints_all_settings_also_of_a_file_whose_mistake_names_this_command(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[sampler]\nlokal = 3\nexternal = 3\n[[tasks]]\ndataset = "gcd"\n')
    shown = swarm("config", "show", "--all", "--config", str(file))
    printed = tomllib.loads(shown.stdout)["sampler"]
    assert printed["external"] == 3 and "local" in printed, "what has no fault, and the default"
    assert shown.returncode == 78 and "sampler.lokal" in shown.stderr


@pytest.mark.slow
def test_config_show_leaves_out_what_most_people_leave_alone_and_all_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[verifier]\nworker_memory_mb = 777\n[[tasks]]\ndataset = "gcd"\n')
    short, full = (swarm("config", "show", "--config", str(file), *flag) for flag in ([], ["--all"]))
    assert 'share = "informative"' in short.stdout and "worker_memory_mb = 777" in short.stdout, "basic ones, and what differs"
    assert "answer_timeout_s" not in short.stdout and "[log]" not in short.stdout
    assert "answer_timeout_s = 5.0" in full.stdout and "[log]" in full.stdout
    hidden = int(re.search(r"# and (\d+) settings that most users leave unchanged", short.stdout)[1])  # type: ignore[index]
    setting = re.compile(r"^(?:# )?\w+ (?:=|is not set)", re.MULTILINE)
    shown, everything = (len(setting.findall(each.stdout)) for each in (short, full))
    assert hidden == everything - shown > 50
    printed = tmp_path / "printed.toml"
    printed.write_text(short.stdout)
    assert load_config(printed) == load_config(file)


def test_the_basic_settings_are_there() -> None:
    defaults = NodeConfig.model_construct()
    assert 20 <= len(BASIC) <= 30
    for name in BASIC:
        functools.reduce(getattr, name.split("."), defaults)


@pytest.mark.slow
def test_config_show_says_first_where_the_values_come_from(tmp_path: Path) -> None:
    assert swarm("config", "show").stdout.startswith("# swarm_cli/local/defaults/demo.toml over the defaults\n")
    file = tmp_path / "node.toml"
    file.write_text('[[tasks]]\ndataset = "gcd"\n')
    shown = swarm("config", "show", "--config", str(file), SWARM_TRAINER__GRAD_CLIP="0.5", SWARM_CONFIG=str(DEMO_CONFIG))
    assert shown.stdout.startswith(f"# SWARM_TRAINER__GRAD_CLIP over {file} over the defaults\n")


def test_config_show_names_the_default_of_each_value_that_differs_and_of_no_other() -> None:
    lines = config_toml(load_config(DEMO_CONFIG)).splitlines()
    comment_of = {line.partition(" = ")[0]: before for before, line in pairwise(lines)}
    assert comment_of["local"].endswith("(default: 2)")
    assert comment_of["adapt"].endswith('(default: "adaptive")')
    assert comment_of["learning_rate"].endswith("(default: 1e-06)")
    assert "default:" not in comment_of["grad_clip"] + comment_of["strategy"]
    other = load_config(DEMO_CONFIG, {"trainer": {"constants": {"foreign_logprob_slack": None, "sequence_mask": [0.5, 2.0]}}})
    lines = config_toml(other).splitlines()
    assert lines[lines.index("# foreign_logprob_slack is not set") - 1].endswith("(default: 2.0)")
    assert lines[lines.index("sequence_mask = [0.5, 2.0]") - 1].endswith("(default: not set)")


@pytest.mark.slow
def test_a_list_in_the_environment_that_is_no_json_ends_config_check_with_78_and_one_sentence() -> None:
    checked = swarm("config", "check", SWARM_TRAINER__CONSTANTS__BETAS="0.8,0.9")
    assert checked.returncode == 78
    said = "swarm: environment variable SWARM_TRAINER__CONSTANTS__BETAS is '0.8,0.9': give JSON, e.g. [0.8, 0.9]"
    assert checked.stderr.splitlines() == [said]


@pytest.mark.slow
def test_an_unknown_key_ends_config_check_with_78_and_no_traceback(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[trainer]\nlearning_rat = 1e-3\n[[tasks]]\ndataset = "gcd"\n')
    checked = swarm("config", "check", "--config", str(wrong))
    assert checked.returncode == 78
    assert "trainer.learning_rat: unknown key" in checked.stderr
    assert "Traceback" not in checked.stderr


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("verifier.ack_wait_s", "it is fixed at 60.0"),
        ("sampler.prefetch", "it is fixed at 1"),
    ],
)
def test_a_former_setting_is_named_with_what_holds_now_in_a_file_and_in_a_variable(key: str, instead: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    file = tmp_path / "node.toml"
    file.write_text(f'[{section}]\n{name} = 3\n[[tasks]]\ndataset = "gcd"\n')
    with pytest.raises(ConfigError) as refused:
        load_config(file, environment={})
    [fault] = refused.value.faults
    assert fault.startswith(f"{key}: ") and instead in fault and "unknown" not in fault
    variable = f"SWARM_{section}__{name}".upper()
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"tasks": [{"dataset": "gcd"}]}, {variable: "3"})
    [fault] = refused.value.faults
    assert fault.startswith(f"environment variable {variable} ({key}): ") and instead in fault


@pytest.mark.slow
def test_a_wrong_dataset_name_and_a_missing_model_are_both_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[model]\npath = "models/not-here"\n[[tasks]]\ndataset = "chain_summ"\n')
    checked = swarm("config", "check", "--config", str(wrong))
    assert checked.returncode == 78
    assert "chain_sum" in checked.stderr and "swarm model import SOURCE models/not-here" in checked.stderr
    assert "Traceback" not in checked.stderr


@pytest.mark.slow
def test_the_toy_policy_that_swarm_up_will_build_is_a_note_and_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('[[tasks]]\ndataset = "gcd"\n')
    checked = swarm("config", "check", "--config", "node.toml", folder=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "note: models/base does not exist yet: `swarm up` builds it" in checked.stdout


@pytest.mark.slow
def test_check_and_up_say_alike_that_the_toy_policy_cannot_learn_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(9)))
    (tmp_path / "node.toml").write_text('[eval]\ntasks = 2\n[[tasks]]\nsource = "file"\npath = "mine.jsonl"\n')
    for command in (("config", "check", "--config", "node.toml"), ("up", "--config", "node.toml", "--nodes", "1")):
        said = swarm(*command, folder=tmp_path)
        assert said.returncode == 78 and "set model.path to a model of your own" in said.stderr, said
        assert "building the toy policy" not in said.stderr and "builds it" not in said.stdout


@pytest.mark.slow
def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, swarm_cli; print(sorted({'torch', 'transformers', 'matplotlib', 'reasoning_gym'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_taken_port_is_named_with_its_purpose_and_the_options_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        asked = swarm("up", "--run", "one", "--nats-port", str(port), SWARM_NODE__VAR_DIR=str(tmp_path / "var"))
    assert asked.returncode == 1
    assert re.search(rf"port {port}, needed for the NATS server.*, is taken", asked.stderr), asked.stderr
    assert "choose other ports with --nats-port 4333 --base-port 9500 (make run: UP_FLAGS=" in asked.stderr
    assert not (tmp_path / "var" / "runs" / "one").exists()


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_a_sentence_and_an_exit_code() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        asked = swarm("status", "--node-url", f"nats://127.0.0.1:{port}")
    assert asked.returncode == 1
    assert str(port) in asked.stderr and "Traceback" not in asked.stderr


def test_a_folder_that_is_missing_is_not_mistaken_for_a_hub_name(tmp_path: Path) -> None:
    assert is_hub_name("Qwen/Qwen2.5-0.5B-Instruct")
    assert not is_hub_name("models/base")
    assert not is_hub_name(str(tmp_path / "gone"))
    assert "config.json" in (model_problem(str(tmp_path)) or "")


def test_the_toy_is_offered_in_its_own_place_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`swarm model init --out models/base`" in (model_problem("models/base") or "")
    for missing in ("var/models/smollm2", str(tmp_path / "gone"), "models/bse"):
        said = model_problem(missing) or ""
        assert f"`swarm model import SOURCE {missing}`" in said and "check the spelling" in said
        assert "model init" not in said, "the toy would be trained in the place of the model that was meant"


@pytest.mark.slow
def test_without_the_hub_a_models_name_is_told_in_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    # Started, not forked: the hub's client reads its variables as it is imported.
    command = [sys.executable, "-m", "swarm_cli", "model", "memory", "ann/some-model", "--revision", "a" * 40]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert asked.returncode and len(asked.stderr.splitlines()) == 1
    assert "HF_HUB_OFFLINE" in asked.stderr and "give its folder" in asked.stderr


def test_task_sources_come_from_names_or_from_a_file(tmp_path: Path) -> None:
    assert [source.dataset for source in task_sources("gcd, chain_sum")] == ["gcd", "chain_sum"]
    file = tmp_path / "t.toml"
    file.write_text('[[tasks]]\ndataset = "gcd"\nconfig = { max_value = 12 }\n')
    assert task_sources(str(file))[0].config == {"max_value": 12}
    with pytest.raises(CommandError, match="no \\[\\[tasks\\]\\]"):
        file.write_text("")
        task_sources(str(file))
    with pytest.raises(CommandError, match="cannot be read"):
        task_sources(str(tmp_path / "missing.toml"))


@pytest.mark.slow
def test_task_show_prints_a_question_with_its_answer() -> None:
    shown = swarm("task", "show", "gcd", "--count", "1", "--settings", '{"max_value": 12}')
    assert shown.returncode == 0 and not shown.stderr
    assert "Greatest Common Divisor" in shown.stdout and "reference answer:" in shown.stdout
    refused = swarm("task", "show", "gcdd")
    assert refused.returncode == 1 and "did you mean gcd" in refused.stderr
