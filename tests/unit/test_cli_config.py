"""`swarm config`, `swarm task` and the errors of the command line, as a person meets them: through the process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared.config import load_config
from swarm_cli.base_model import is_hub_name, model_problem
from swarm_cli.errors import CommandError
from swarm_cli.ports import check_ports
from swarm_cli.task_sources import task_sources
from swarm_cli.toml_view import config_toml

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "config" / "demo.toml"


def swarm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return subprocess.run(
        [sys.executable, "-m", "swarm_cli", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_what_config_show_prints_is_the_same_configuration(tmp_path: Path) -> None:
    demo = load_config(DEMO)
    printed = tmp_path / "printed.toml"
    printed.write_text(config_toml(demo))
    assert load_config(printed) == demo


def test_config_show_says_what_each_value_means() -> None:
    shown = swarm("config", "show")
    assert shown.returncode == 0
    assert tomllib.loads(shown.stdout)["sampler"]["local"] == 4
    assert "# L: completions per group" in shown.stdout
    assert "One of wait, fill_local, short." in shown.stdout


def test_an_unknown_key_ends_config_check_with_78_and_no_traceback(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[trainer]\nlearning_rat = 1e-3\n[[tasks]]\ndataset = "gcd"\n')
    checked = swarm("config", "check", "--config", str(wrong))
    assert checked.returncode == 78
    assert "trainer.learning_rat: unknown key" in checked.stderr
    assert "Traceback" not in checked.stderr


@pytest.mark.slow
def test_a_wrong_dataset_name_and_a_missing_model_are_both_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[model]\npath = "models/not-here"\n[[tasks]]\ndataset = "chain_summ"\n')
    checked = swarm("config", "check", "--config", str(wrong))
    assert checked.returncode == 78
    assert "chain_sum" in checked.stderr and "swarm model init --out models/not-here" in checked.stderr
    assert "Traceback" not in checked.stderr


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, swarm_cli; print(sorted({'torch', 'transformers', 'matplotlib', 'reasoning_gym'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


def test_a_taken_port_is_named_with_its_purpose_before_anything_starts() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CommandError, match=rf"port {port}, wanted for the NATS server, is taken"):
            check_ports({port: "the NATS server"})


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
    assert "swarm model init" in (model_problem(str(tmp_path / "gone")) or "")
    assert "config.json" in (model_problem(str(tmp_path)) or "")


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
    shown = swarm("task", "show", "gcd", "--count", "1", "--config", '{"max_value": 12}')
    assert shown.returncode == 0
    assert "Greatest Common Divisor" in shown.stdout and "reference answer:" in shown.stdout
    refused = swarm("task", "show", "gcdd")
    assert refused.returncode == 1 and "did you mean gcd" in refused.stderr
