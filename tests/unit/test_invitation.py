"""Tokens: what one says comes back, and nothing that no invitation may say is taken in."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shared.config import load_config
from shared.contracts.codec import encode
from shared.contracts.wire import SWARM_SCHEMA_VERSION
from shared.identity.keys import SigningKey, new_seed
from swarm_cli import runs
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.invitation import (
    MAX_CHARS,
    PLAIN,
    SECRET,
    TOKEN_VARIABLE,
    Credential,
    Invitation,
    Member,
    OfferedTask,
    TokenError,
    checked_urls,
    given_text,
    read_token,
    task_specs,
    write_token,
)
from swarm_cli.invite_command import accepted
from swarm_cli.local.control import holding_run
from swarm_cli.local.procfile import Layout
from swarm_cli.local.up import note_run
from swarm_cli.runs import RunNote, StartOptions, write_note
from tests.nats_server import free_port
from tests.secured_server import make_certificates

SEED = new_seed().decode()
KEY = SigningKey(SEED.encode()).public_key
DEMO = load_config(DEMO_CONFIG)


def invitation(**changes: Any) -> Invitation:
    given: dict[str, Any] = {
        "url": "nats://hub.example.org:4222",
        "swarm_id": "demo",
        "swarm_schema": SWARM_SCHEMA_VERSION,
        "software": "swarm 0.1.0",
        "tasks_version": version("reasoning-gym"),
        "accepts": accepted(DEMO),
    }
    return Invitation(**(given | changes))


def sealed(body: bytes, word: str = PLAIN) -> str:
    """A token with a checksum that fits, whatever it holds."""
    payload = base64.urlsafe_b64encode(body).decode().rstrip("=")
    return f"{word}.{payload}.{hashlib.sha256(body).hexdigest()[:16]}"


def test_a_token_says_what_was_put_into_it_however_mail_breaks_its_lines() -> None:
    said = invitation(roster=[Member(node="alpha", public_key=KEY)])
    token = write_token(said)
    assert token.startswith(f"{PLAIN}.") and read_token(token) == said
    assert read_token("\n ".join(token[start : start + 60] for start in range(0, len(token), 60))) == said
    assert [spec["dataset"] for spec in task_specs(said)] == [task.dataset for task in DEMO.tasks]


@pytest.mark.parametrize(
    "pasted",
    [
        "'{}'",
        '"{}"',
        "<{}>",
        "`{}`",
        "\u201c{}\u201d",
        "swarm join {}",
        "$ swarm join {}",
        "> {}",
        "\u200b{}",
        "\ufeff{}\u200b",
        "({})",
    ],
)
def test_what_people_paste_around_a_token_is_ignored(pasted: str) -> None:
    token = write_token(invitation())
    assert read_token(pasted.format(token)) == invitation()
    half = len(token) // 2
    assert read_token(pasted.format(f"{token[:half]}\u200b\n> {token[half:]}")) == invitation()


def test_a_token_with_a_key_says_so_in_its_first_word() -> None:
    said = invitation(url="tls://hub:4222", credential=Credential(user="gamma", seed=SEED))
    token = write_token(said)
    assert token.startswith(f"{SECRET}.") and read_token(token) == said
    with pytest.raises(TokenError, match="contradict each other"):
        read_token(token.replace(SECRET, PLAIN, 1))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"url": "http://hub:4222"}, "nats://HOST:PORT or tls://HOST:PORT"),
        ({"url": "file:///etc/passwd"}, "nats://HOST:PORT"),
        ({"url": "http://here"}, "nats://HOST:PORT"),
        ({"url": "nats://user:word@hub:4222"}, "nats://HOST:PORT"),
        ({"url": "nats://hub:4222/$(id)"}, "nats://HOST:PORT"),
        ({"url": "nats://hub`id`:4222"}, "nats://HOST:PORT"),
        ({"url": "nats://hub:4222\x1b[2J"}, "nats://HOST:PORT"),
        ({"url": "tls://hub:4222,nats://hub:4223"}, "not encrypted"),
        ({"url": "nats://h:1," * 8 + "nats://h:1"}, "up to 8"),
        ({"url": ""}, "nats://HOST:PORT"),
        ({"swarm_id": "../../etc"}, "swarm_id"),
        ({"swarm_id": ".."}, "swarm_id"),
        ({"software": "swarm \x1b]0;gone\x07"}, "software"),
        ({"tasks_version": "1.0; rm -rf /"}, "tasks_version"),
        ({"tasks_version": "--index-url=x"}, "tasks_version"),
        ({"credential": Credential(user="gamma", seed=SEED)}, "tls:// address"),
        ({"url": "tls://h:1", "credential": Credential(user="gamma", seed="SU" + "A" * 56)}, "the key in the token is not valid"),
        ({"url": "tls://h:1", "credential": Credential(user="../gamma", seed=SEED)}, "user"),
        ({"url": "tls://h:1", "authority": b"/etc/passwd"}, "certificate in the token is not valid"),
        ({"url": "tls://h:1", "authority": b"x" * 20_000}, "authority"),
        ({"roster": [Member(node="a", public_key="UABC")]}, "a key in the token's roster is not valid"),
        ({"roster": [Member(node="a", public_key=KEY), Member(node="b", public_key=KEY)]}, "twice"),
        ({"roster": [Member(node="a\nb", public_key=KEY)]}, "roster"),
        ({"accepts": msgspec.structs.replace(accepted(DEMO), tasks=[OfferedTask(dataset="gcd", config="[" * 4000)])}, "settings"),
        ({"accepts": msgspec.structs.replace(accepted(DEMO), tasks=[OfferedTask(dataset="gcd", verifier="mine:run")])}, "verifier"),  # type: ignore[arg-type]
        ({"accepts": msgspec.structs.replace(accepted(DEMO), tasks=[OfferedTask(dataset="gcd")] * 65)}, "tasks"),
    ],
    ids=lambda value: ",".join(value)[:40] if isinstance(value, dict) else None,
)
def test_what_no_invitation_may_say_is_refused_without_quoting_it(changes: dict[str, Any], told: str) -> None:
    said = invitation(**changes)
    with pytest.raises(TokenError, match=told) as refused:
        read_token(sealed(encode(said), SECRET if said.credential else PLAIN))
    assert str(refused.value).isprintable() and SEED not in str(refused.value)


def test_damaged_foreign_and_endless_tokens_are_told_apart() -> None:
    token = write_token(invitation())
    for damaged in (
        token[:-1],
        token[:40] + ("A" if token[40] != "A" else "B") + token[41:],
        token.replace(".", "..", 1),
        f"{PLAIN}..",
    ):
        with pytest.raises(TokenError, match="damaged"):
            read_token(damaged)
    with pytest.raises(TokenError, match="another version"):
        read_token(token.replace(PLAIN, "swarm2", 1))
    with pytest.raises(TokenError, match="this is not a token"):
        read_token("nats://hub:4222")
    with pytest.raises(TokenError, match="longer than"):
        read_token("A" * (MAX_CHARS + 1))


def test_a_newer_tokens_further_fields_are_ignored_and_a_field_that_comes_twice_is_refused() -> None:
    fields = {**msgspec.to_builtins(invitation(), builtin_types=(bytes,)), "run": "rm -rf /"}
    assert read_token(sealed(msgspec.msgpack.encode(fields))) == invitation()
    body = encode(invitation())
    with pytest.raises(TokenError):
        read_token(sealed(bytes([body[0] + 1]) + body[1:] + msgspec.msgpack.encode("url") + msgspec.msgpack.encode("nats://other")))


@given(st.binary(max_size=400), st.sampled_from([PLAIN, SECRET]))
def test_any_bytes_with_a_good_checksum_are_an_invitation_or_a_sentence(body: bytes, word: str) -> None:
    with pytest.raises(TokenError) as refused:
        read_token(sealed(body, word))
    assert str(refused.value).isprintable()


@given(st.text(max_size=300))
def test_any_text_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(TokenError) as refused:
        read_token(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("url", ["nats://hub", "tls://a.b-c.org:4222", "nats://10.0.0.1:1,nats://[fe80::1]:4222"])
def test_addresses_of_servers_are_taken(url: str) -> None:
    assert checked_urls(url) == url


@dataclass
class Pipe:
    """Standard input with something in it."""

    text: str

    def read(self, limit: int) -> str:
        return self.text[:limit]


def test_a_token_comes_from_the_command_line_standard_input_or_the_environment_and_stays_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "from the environment")
    assert given_text("given") == "given" and TOKEN_VARIABLE not in os.environ
    monkeypatch.setenv(TOKEN_VARIABLE, " from the environment\n")
    assert given_text(None) == "from the environment" and TOKEN_VARIABLE not in os.environ
    monkeypatch.setattr(sys, "stdin", Pipe("piped\n"))
    assert given_text("-") == "piped"
    with pytest.raises(CommandError, match=TOKEN_VARIABLE):
        given_text(None)


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["invite", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip(), result.stderr


def test_invite_prints_the_token_alone_and_no_secret_unless_asked(tmp_path: Path) -> None:
    ca, _, _ = make_certificates(tmp_path / "tls")
    roster = tmp_path / "roster.txt"
    roster.write_text(f"alpha {KEY} the first\n")
    folder = ("--folder", str(tmp_path / "keys"))
    token, told = run("--url", "tls://hub:4222", "--ca", str(ca), "--roster", str(roster), *folder)
    said = read_token(token)
    assert said.credential is None and [member.node for member in said.roster] == ["alpha"]
    assert said.authority.decode() in ca.read_text() and said.accepts == accepted(DEMO)
    assert "swarm join TOKEN" in told and not (tmp_path / "keys").exists()

    token, told = run("--url", "tls://hub:4222", "--node", "gamma", *folder)
    seed = (tmp_path / "keys" / "gamma" / "swarm.nk").read_text().strip()
    said = read_token(token)
    assert said.credential is not None and (said.credential.user, said.credential.seed) == ("gamma", seed)
    assert seed not in told and token not in told and "send it to that person only" in told

    token, told = run("--url", "tls://hub:4222", "--observer", *folder)
    observer = read_token(token).credential
    assert observer is not None and observer.user == "observer" and "the token allows looking and nothing else" in told


def only_folder_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user who has set nothing but where runs are."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(folder))


def test_invite_takes_the_server_of_the_run_on_this_machine_and_says_that_no_other_machine_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_folder_set(tmp_path, monkeypatch)
    monkeypatch.setenv("SWARM_NATS__SWARM_ID", "mine")
    mine = tmp_path / "runs" / "mine"
    mine.mkdir(parents=True)
    write_note(mine, RunNote("nats://127.0.0.1:31461", "nats://127.0.0.1:31461", StartOptions()))
    with holding_run(mine):
        token, told = run()
        assert read_token(token).url == "nats://127.0.0.1:31461" and "can be reached from this machine only" in told
        monkeypatch.setenv("SWARM_NATS__SWARM_URL", "nats://hub:4222")
        token, told = run()
        assert read_token(token).url == "nats://hub:4222" and "this machine" not in told


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists open files there")
def test_invite_in_a_folder_without_a_run_prints_no_token_and_names_the_runs_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever answers at the usual address. Replaced: the list of processes, by this one's alone,
    as other tests run swarms too.
    """
    only_folder_set(tmp_path / "here", monkeypatch)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(runs, "_PROCESSES", tmp_path / "proc")

    def refused() -> str:
        result = CliRunner().invoke(app, ["invite"])
        assert isinstance(result.exception, CommandError) and not result.stdout
        return str(result.exception)

    assert "--url" in refused() and "run " not in refused().partition("--url")[2]
    folders = [tmp_path / name / "runs" / f"run-{name}" for name in ("there", "yonder")]
    with holding_run(folders[0]), holding_run(folders[1]):
        write_note(folders[0], RunNote("nats://127.0.0.1:31461", "nats://127.0.0.1:31461", StartOptions(), swarm_id="there"))
        write_note(folders[1], RunNote("nats://127.0.0.1:31471", "none", StartOptions()))
        lines = refused().splitlines()[1:]
        assert lines == [f"  swarm invite --url nats://127.0.0.1:31461   run {folders[0]}"], "a node without a swarm invites nobody"
        monkeypatch.setenv("SWARM_NATS__SWARM_ID", "mine")  # or the server would be asked
        assert read_token(run("--url", "nats://127.0.0.1:31461")[0]).url == "nats://127.0.0.1:31461"
        monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path / "there"))
        assert read_token(run()[0]).swarm_id == "mine", "a folder that was named"


@pytest.mark.parametrize("user", ["operator", "watch"])
def test_a_token_with_a_key_of_more_than_a_node_is_neither_written_nor_read(user: str) -> None:
    said = invitation(url="tls://hub:4222", credential=Credential(user=user, seed=SEED))
    with pytest.raises(TokenError, match=user):
        write_token(said)
    with pytest.raises(TokenError, match=user):
        read_token(sealed(encode(said), SECRET))


def test_invite_takes_the_name_of_the_swarm_of_the_run_too_before_any_node_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token for a swarm of another name is accepted by `swarm join` and by no node."""
    only_folder_set(tmp_path, monkeypatch)
    live = tmp_path / "runs" / "live"
    live.mkdir(parents=True)
    config = load_config(overrides={"node": {"run": "live", "var_dir": tmp_path}, "tasks": [{"dataset": "gcd"}]})
    note_run(config, Layout(nats_port=free_port()))
    with holding_run(live):
        token, told = run()
        assert read_token(token).swarm_id == "live" and "the default" not in told
        monkeypatch.setenv("SWARM_NATS__SWARM_ID", "chosen")
        assert read_token(run()[0]).swarm_id == "chosen"


@pytest.mark.slow
def test_invite_prints_a_token_for_a_server_that_is_not_there_yet() -> None:
    """The hub may be started after its tokens are made, so the exit code is 0 (`run`)."""
    token, told = run("--url", "nats://no-such-host.invalid")
    assert read_token(token).url == "nats://no-such-host.invalid" and "the token names the swarm 'swarm', the default" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--url", "http://hub"), "nats://HOST:PORT"),
        pytest.param(("--url", "nats://hub:1", "--node", "gamma"), "tls:// address", marks=pytest.mark.slow),
        (("--url", "tls://hub:1", "--node", "operator"), "is not a node"),
        (("--url", "tls://hub:1", "--node", "a", "--observer"), "give one of the two"),
        (("--url", "tls://hub:1", "--ca", "/dev/null"), "give the"),
        (("--url", "tls://hub:1", "--ca", "/dev/zero"), "not a regular file"),
    ],
)
def test_invite_refuses_what_nobody_could_join_with(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(app, ["invite", *arguments, "--folder", str(tmp_path)])
    assert result.exit_code != 0 and told in str(result.exception)


def test_a_tasks_settings_that_are_nested_too_deep_to_be_shown_are_refused() -> None:
    deep = OfferedTask(dataset="gcd", config='{"a":' * 300 + "1" + "}" * 300, weight=1.0, verifier="exact")
    with pytest.raises(TokenError, match="a task in the token has invalid settings"):
        write_token(
            Invitation(
                url="nats://hub:4222",
                swarm_id="swarm",
                swarm_schema=SWARM_SCHEMA_VERSION,
                software="x",
                tasks_version="1",
                accepts=msgspec.structs.replace(accepted(load_config(DEMO_CONFIG)), tasks=[deep]),
            )
        )
