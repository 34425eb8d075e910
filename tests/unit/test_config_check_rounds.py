"""Mistakes of a configuration are told once each by `swarm config check`, and what only follows
from one of them is not told.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shared.config import ConfigError, load_config
from swarm_cli import config_commands
from swarm_cli.config_commands import check, unreachable
from swarm_cli.errors import CommandError
from tests.integration.local_swarm import free_port_range
from tests.long_forms import FULL

# Each configuration that is checked costs a process or two; the short form has some of each kind.
pytestmark = pytest.mark.slow
TASK = '[[tasks]]\ndataset = "gcd"\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(text: str, *, connect: bool = False) -> list[str]:
    """The lines of `swarm config check` about this file, apart from headings."""
    Path("node.toml").write_text(text)
    with pytest.raises((CommandError, ConfigError)) as refused:
        check(Path("node.toml"), connect)
    return [line.strip() for line in str(refused.value).splitlines() if not line.endswith("cannot be used:")]


def rows(count: int, name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps({"problem": f"q{n}", "answer": n}) + "\n" for n in range(count)))


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        pytest.param(
            '[model]\npath = "owner/name"\nrevision = "main"\n' + TASK,
            ["model.revision: 'main' is not a full commit hash; a branch"],
            marks=pytest.mark.long,
        ),
        (
            '[node]\nid = "Alpha!"\n[nats]\nnode_key_file = "keys/{node}/{role}.nk"\nnode_ca_file = "none.pem"\n' + TASK,
            ["node.id: must be 1 to 32"],
        ),
        pytest.param(
            '[trainer]\nobjective = "gropo"\nobjective_options = { a = 1 }\n' + TASK,
            ["trainer.objective: no objective is called 'gropo': did you mean"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            '[trainer.lora]\nrank = 8\ntarget_modules = "nope"\n' + TASK,
            ["trainer.lora.target_modules: Input should be 'all-linear' or a valid list, got 'nope'"],
            marks=pytest.mark.long,
        ),
        (
            '[tracing]\notlp_endpoint = "http://a:4317"\n[[tasks]]\ndataset = "Gcd"\n',
            [
                "[[tasks]] 1: dataset: must be 1 to 63 small letters, digits or _, beginning with a letter or digit, got 'Gcd'",
                "tracing: unknown key; ",
            ],
        ),
        (
            '[nats]\nnode_url = "nats//alpha:4222"\nswarm_url = "nats://a:4222, nats://b"\n[sampler]\nlocal = -1\n' + TASK,
            ["nats.node_url: 'nats//alpha:4222' is not a server's address: write nats://HOST:PORT", "sampler.local: "],
        ),
        pytest.param(
            '[tasks]\ndataset = "gcd"',
            ["tasks: is a single table, and must be a list of them: write [[tasks]] instead of [tasks]"],
            marks=pytest.mark.long,
        ),
        (
            '[[tasks]]\ndataset = "questions.jsonl"\n',
            [
                "[[tasks]] 1: dataset: must be 1 to 63 small letters, digits or _, beginning with a letter or digit, got "
                '\'questions.jsonl\'; for a file write source = "file", path = "questions.jsonl" instead of dataset'
            ],
        ),
    ],
    ids=["revision", "node", "objective", "union", "patterns", "address", "table", "file"],
)
def test_each_mistake_is_told_and_not_what_follows_from_it(text: str, begin: list[str]) -> None:
    found = [line for line in told(f"{text}\n") if "models/base" not in line]
    assert len(found) == len(begin), found
    assert all(any(line.startswith(each) for line in found) for each in begin), found


def test_a_misspelt_key_hides_no_mistake_of_the_model_a_file_an_entry_or_a_folder() -> None:
    text = '[trainer]\nlearing_rate = 1\n[node]\nvar_dir = "/proc/nothing"\n[model]\npath = "none"\n'
    text += '[[tasks]]\ndataset = "gcd"\nweight = -1\n[[tasks]]\nsource = "file"\npath = "none.jsonl"\n'
    begins = ("trainer.learing_rate", "[[tasks]] 1: weight", "[[tasks]] 2: none.jsonl", "model.path none", "node.var_dir: /proc")
    found = told(text)
    assert len(found) == len(begins) and all(any(line.startswith(each) for line in found) for each in begins), found
    found = told(text.replace("learing_rate", "learning_rate").replace("-1", "1"))
    assert len(found) == 3 and not any("trainer." in line or "weight" in line for line in found), found


def test_what_a_fault_may_have_hidden_is_not_told() -> None:
    assert len(told('[model]\npth = "mine"\n[[tasks]]\ndataset = "gcd"\n')) == 1


def test_rows_are_held_against_the_share_that_is_held_out_only_where_that_is_known() -> None:
    rows(60)
    source = '[[tasks]]\nsource = "file"\npath = "rows.jsonl"\nquestion = "problem"\n'
    few = "it has 60 different questions"
    assert any(few in line for line in told('[eval]\ntasks = 100\n[model]\npath = "none"\n' + source))
    texts = (
        "[eval]\ntasks = 'few'\n" + source,
        "[eval]\ntasks = 50\n" + source + '[[tasks]]\ndataset = "Gcd"\n',
        "[evl]\ntasks = 2\n" + source,
        "[eval]\ntasks = 50\n" + source + "[[tasks]]\ndataset = 'gcd'\nweight = -1\n",
        "[eval]\ntask = 2\n" + source,
        "[eval]\nheld_out = 2\n" + source,
    )
    for text in texts if FULL else texts[:3]:
        found = [line for line in told(text) if not line.startswith("the toy policy learns")]
        assert len(found) == 1 and few not in found[0], found


def test_with_connect_only_servers_that_the_user_named_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_commands, "CONNECT_S", 0.5)
    ports = f"[http]\nbase_port = {free_port_range()}\n"
    found = told(ports + '[nats]\nnode_url = "nats//x"\n[trainer]\nlearing_rate = 1\n' + TASK, connect=True)
    assert len(found) == 2, found


def test_the_swarms_server_that_does_not_answer_is_mended_by_the_swarms_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_commands, "CONNECT_S", 0.5)
    config = load_config(None, {"tasks": [{"dataset": "gcd"}], "nats": {"swarm_url": "nats://127.0.0.1:1"}})
    said = next(line for line in asyncio.run(unreachable(config)) if line.startswith("nats.swarm_url: "))
    assert said.endswith("or set nats.swarm_url"), said


def test_a_folder_as_model_needs_no_commit_and_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    found = told('[model]\npath = "./mine"\nrevision = "main"\n' + TASK)
    assert (
        found[0] == "model.revision: 'main' is not a full commit hash, and model.path ./mine is a folder, which has none: remove it"
    )
    assert "hub" not in "".join(found)
